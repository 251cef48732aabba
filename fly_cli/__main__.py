"""`python -m fly_cli` is `fly`."""

import sys

from .cli import main

sys.exit(main())
