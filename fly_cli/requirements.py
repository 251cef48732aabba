"""The releases of the libraries that this package was made for, as its own metadata names them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from .errors import ModelError

PACKAGE = "fly-decode"


def refuse_other_releases() -> None:
    """Raise `ModelError` where a library is not of a release that this package works with.

    pip installs what fits, and later installs may replace it: cache and model calls change their meaning between
    releases without an error.
    """
    for line in requires(PACKAGE) or ():
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(needed.name)
        except PackageNotFoundError:
            found = None
        # A build of somebody's own, as 2.14.0a0, counts as the release that it leads to.
        if found is None or not needed.specifier.contains(Version(found).base_version):
            there = f"{needed.name} {found} is installed" if found else f"{needed.name} is not installed"
            raise ModelError(
                f"{there}, and fly works with {needed.specifier}",
                hint=f"pip install '{needed.name}{needed.specifier}'",
            )
