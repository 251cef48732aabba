"""Loads tokenizers, and says whether two models speak the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from .errors import ModelError
from .text import GGUF_PLACEHOLDER, one_line


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder. Raises `ModelError` when there is none that loads."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # the files may hold anything, and the readers raise anything about it
        raise ModelError(
            f"the tokenizer in `{folder}` cannot be loaded: {one_line(error)}",
            hint="the folder needs tokenizer.json (or the files of a slow tokenizer) and tokenizer_config.json",
        ) from error


def vocabulary_difference(target: Path, draft: Path, *, trust_remote_code: bool = False) -> str | None:
    """Why the ids of two model folders do not mean the same, or None when they do.

    Ids that only one side has are fine, and so are special tokens under another name: the target judges every token.
    """
    names = [folder / "tokenizer.json" for folder in (target, draft)]
    if all(name.is_file() for name in names) and names[0].read_bytes() == names[1].read_bytes():
        return None
    theirs = [load_tokenizer(folder, trust_remote_code=trust_remote_code) for folder in (target, draft)]
    words, special = zip(*(table_of(tokenizer) for tokenizer in theirs), strict=True)
    shared = words[0].keys() & words[1].keys()
    differing = [i for i in shared if words[0][i] != words[1][i] and not (i in special[0] and i in special[1])]
    if not differing:
        return None
    first = min(differing)
    return (
        f"their tokenizers differ in {len(differing)} of {len(shared)} shared ids "
        f"(id {first} is {words[0][first]!r} in one and {words[1][first]!r} in the other)"
    )


def table_of(tokenizer: Any) -> tuple[dict[int, str], set[int]]:
    """Token strings by id, and the ids of added tokens. Placeholder rows are left out."""
    words = {i: token for token, i in tokenizer.get_vocab().items() if not GGUF_PLACEHOLDER.fullmatch(token)}
    return words, set(tokenizer.added_tokens_decoder)
