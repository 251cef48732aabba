"""Ways to spoil a file: its bytes, or one of the values in it.

FLY_FUZZ_EXAMPLES=20000 pytest tests/test_fuzz.py        # other examples each time, as many for each test
"""

import copy
import json
import os
from codecs import BOM_UTF8, BOM_UTF16_LE

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FLY_FUZZ_EXAMPLES", "0"))

JUNK = [b"\0", b"\xff", b"\x1b[2J", BOM_UTF8, BOM_UTF16_LE, b"\n", b"\r\n", b"\n\n", b"\\ud800", "\u2028é😀".encode()]
JUNK += [b"{", b"}", b"[", b"]", b'"', b",", b":", b" ", b"-", b"[]", b"{}", b"null", b"true", b"NaN", b"-Infinity"]
JUNK += [b"1e999", b"1e308", b"5e-324", b"9" * 400, b"9" * 5000, b"9223372036854775808", b"-1", b"0.5", b'"a":1,"a":2,']
JUNK += [b"[" * 120, b'{"a":' * 120, b"[" * 100_000, b"x" * 100_000]

SIZES = st.sampled_from([-1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64, 10**40, 10**4000])
NUMBERS = st.sampled_from([0.0, -1.0, 0.5, 5e-324, 1e9, 1e300, float("nan"), float("inf"), -float("inf")])
TEXTS = st.text(max_size=5) | st.sampled_from(["\ud83d", "\x1b[2J", "ok", "0", "1", "-1", "99999999", "²", "x" * 300])
SCALARS = st.none() | st.booleans() | SIZES | NUMBERS | TEXTS
NESTED = st.integers(1, 300).map(lambda depth: json.loads("[" * depth + "]" * depth))
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, SCALARS, max_size=3) | NESTED


def fuzz(examples):
    """The same few examples in each run of the suite; more and new ones where the environment asks for them."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw, content: bytes, junk=tuple(JUNK)):
    """The bytes with up to three pieces cut out, doubled, overwritten or put in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 40)) | st.just(len(content)))
        piece = content[start:end]
        content = (
            content[:start] + draw(st.sampled_from([b"", piece * 2, *junk]) | st.binary(max_size=8)) + content[end:]
        )
    return content


@st.composite
def spoilt(draw, value):
    """The value with one of its parts gone, replaced or joined by another, somewhere inside."""
    value = copy.deepcopy(value)
    part = value
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        key = draw(st.sampled_from(keys)) if keys else None
        if key is None or not (isinstance(part[key], dict | list) and draw(st.booleans())):
            break
        part = part[key]
    how = draw(st.sampled_from(["replace", "remove", "add"])) if key is not None else "add"
    if how == "replace":
        part[key] = draw(VALUES)
    elif how == "remove":
        del part[key]
    elif isinstance(part, dict):
        part[draw(TEXTS)] = draw(VALUES)
    else:
        part.append(draw(VALUES))
    return value


@st.composite
def spoilt_line(draw, lines):
    """JSON lines as bytes: one of them with another value in it, or all with damaged bytes."""
    lines = list(lines)
    if draw(st.booleans()):
        return draw(damaged(b"".join(lines)))
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(draw(spoilt(json.loads(lines[at])))).encode() + b"\n"
    return b"".join(lines)
