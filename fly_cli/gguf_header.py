"""The header of a GGUF file, read in plain Python: what the file holds, before anything heavy is started.

Layout (little endian): magic `GGUF`, u32 version, u64 tensors, u64 fields; the fields (string key, u32 type, value);
the tensors (string name, u32 dimensions, u64 each, u32 type, u64 offset); padding; the tensors' data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import UnsupportedModelError

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MOST = 1_000_000  # tensors or fields: no model has so many, and counting them takes seconds
MOST_STRINGS = 10_000_000  # of an array; vocabularies and their merges have 500,000
MOST_BYTES = 100_000_000  # of one text
MOST_DIMENSIONS = 8
MOST_NESTED = 8  # arrays of arrays


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself; sizes in bytes."""

    architecture: str
    parameters: int  # elements of all tensors, a separate output layer counted
    largest_tensor: int  # elements
    split_count: int
    data_bytes: int  # the smallest file that holds all tensors

    @property
    def converted_bytes(self) -> int:
        """The model as bf16."""
        return 2 * self.parameters

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the conversion: the bf16 weights, one tensor unpacked twice in fp32, Python and torch."""
        return self.converted_bytes + 8 * self.largest_tensor + 800_000_000


def read_header(path: Path) -> GgufHeader:
    """The header of `path`. Raises `UnsupportedModelError` unless it is a whole, unsplit GGUF file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            looks = ": it looks like a web page" if start.lstrip()[:1] == b"<" else ""
            raise UnsupportedModelError(
                f"`{path}` is not a GGUF file{looks}", hint="download it again, and check that the link is to the file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = parse(Reader(data))
            except Unknown as error:
                raise UnsupportedModelError(
                    f"`{path.name}` {error}",
                    hint="use a newer release of fly, another file, or download it again",
                ) from error
            except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
                raise truncated(path) from error
    if header.split_count > 1:
        raise UnsupportedModelError(
            f"`{path.name}` is one of {header.split_count} parts of a split GGUF file",
            hint="join the parts with `llama-gguf-split --merge`, and give the joined file",
        )
    if size < header.data_bytes:
        raise truncated(path)
    return header


def truncated(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"`{path}` is cut short or damaged: its header promises more than the {path.stat().st_size:,} bytes it has",
        hint="download it again",
    )


class Reader:
    """A cursor over the bytes of a header."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = len(MAGIC)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.count(MOST_BYTES, "bytes of a text")
        if self.position + length > len(self.data):
            raise IndexError("string past the end")
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def count(self, most: int, what: str, code: str = "Q") -> int:
        """How many there are of something. Raises `Unknown` for more than any file has."""
        number: int = self.number(code)
        if number > most:
            raise Unknown(f"promises {number:,} {what}")
        return number

    def value(self, kind: int, level: int = 0) -> Any:
        """One field's value; of an array only its length, which is all that is needed here."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            if kind not in NUMBERS:
                raise Unknown(f"has a field of type {kind}, which is not known here")
            return self.number(NUMBERS[kind])
        item = self.number("I")
        if item in NUMBERS:
            count: int = self.number("Q")
            self.position += count * struct.calcsize("<" + NUMBERS[item])
            return count
        if level == MOST_NESTED or item not in (STRING, ARRAY):
            raise Unknown(f"has an array of type {item}, which is not known here")
        count = self.count(MOST_STRINGS, "strings or arrays in a field")
        for _ in range(count):
            self.value(item, level + 1) if item == ARRAY else self.skip_string()
        return count

    def skip_string(self) -> None:
        (length,) = struct.unpack_from("<Q", self.data, self.position)  # vocabularies: 300,000 strings in a file
        self.position += 8 + length


class Unknown(Exception):
    """Something that this program does not know in a header that is whole."""


def block_of(kind: int) -> tuple[int, int]:
    """Elements of a block of a tensor of this type, and its bytes. Raises `Unknown`."""
    from gguf.constants import GGML_QUANT_SIZES

    if kind not in GGML_QUANT_SIZES:
        raise Unknown(f"has a tensor of type {kind}, which is not known here")
    elements, size = GGML_QUANT_SIZES[kind]
    return elements, size


def parse(reader: Reader) -> GgufHeader:
    reader.number("I")  # version
    tensors, count = reader.count(MOST, "tensors"), reader.count(MOST, "fields")
    fields = {}
    for _ in range(count):
        key = reader.string()
        fields[key] = reader.value(reader.number("I"))
    sizes, ends = [0], [0]
    for _ in range(tensors):
        reader.string()
        elements = prod(reader.number("Q") for _ in range(reader.count(MOST_DIMENSIONS, "dimensions of a tensor", "I")))
        block, block_bytes = block_of(reader.number("I"))
        sizes.append(elements)
        ends.append(reader.number("Q") + elements // block * block_bytes)
    if not isinstance(fields.get("general.architecture"), str):
        raise Unknown("does not name its architecture")
    alignment, splits = fields.get("general.alignment", DEFAULT_ALIGNMENT), fields.get("split.count", 1)
    if type(alignment) is not int or alignment <= 0 or type(splits) is not int:
        raise Unknown("has no whole number as its alignment or as the count of its parts")
    data_start = -(-reader.position // alignment) * alignment
    return GgufHeader(
        architecture=fields["general.architecture"],
        parameters=sum(sizes),
        largest_tensor=max(sizes),
        split_count=splits,
        data_bytes=data_start + max(ends) if tensors else reader.position,
    )
