"""Files of the model hub: what a repository holds, and fetching it. The only file that talks to the hub."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DownloadError, FlyError, ModelNotFoundError, UnsupportedModelError
from .progress import Progress
from .storage import require_disk, watched

PATIENCE_SECONDS = 5.0  # until a hub that does not answer counts as out of reach
WANTED = re.compile(r"[^/]+\.(json|jinja|model|txt|py|tiktoken)|model[^/]*\.safetensors")
UNWANTED = re.compile(r".*\.(gguf|bin|pt|pth|h5|msgpack|onnx)\.index\.json|README.*|LICENSE.*")
PICKLES = re.compile(r"[^/]+\.(bin|pt|pth)")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size: int
    sha256: str | None


def is_offline() -> bool:
    """Whether the environment forbids connections to the hub."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def list_files(repo: str, revision: str | None) -> dict[str, RemoteFile]:
    """The files of a repository by name, asked of the hub.

    Raises `ModelNotFoundError` where there is no such model, `DownloadError` where the hub is out of reach
    (after a few seconds, not after the minutes that retries take) or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(api.model_info(repo, revision=revision, files_metadata=True, timeout=PATIENCE_SECONDS))
        except Exception as error:  # told in the thread that waits
            found.append(error)

    # A look-up of the hub's address can hang longer than any timeout of the connection.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE_SECONDS)
    if not found:
        raise unreachable(repo)
    with explained(repo):
        if isinstance(found[0], Exception):
            raise found[0]
    return {
        file.rfilename: RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in found[0].siblings or []
    }


def fetch_file(repo: str, file: RemoteFile, revision: str | None, folder: Path, progress: Progress) -> Path:
    """The path of `file` in `folder`, fetched; an interrupted fetch is taken up where it stopped."""
    from huggingface_hub import hf_hub_download

    progress.start(f"fetching {file.name} from the hub", file.size)
    with explained(repo), watched(folder, file.size, progress):
        path = hf_hub_download(
            repo,
            file.name,
            revision=revision,
            local_dir=folder,
            endpoint=endpoint(),
            tqdm_class=silent_bar(),
            etag_timeout=PATIENCE_SECONDS,
        )
    return Path(path)


def fetch_model(repo: str, revision: str | None, progress: Progress, *, weights: bool = True) -> Path:
    """The folder of a model in the hub's own cache: safetensors, configuration and tokenizer, fetched where missing.

    Without `weights` only the others are fetched.
    """
    from huggingface_hub import snapshot_download

    files = list_files(repo, revision)
    wanted = [name for name in choose_files(repo, files) if weights or not name.endswith(".safetensors")]
    total = sum(files[name].size for name in wanted)
    cache = cache_location()
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    have = sum(path.stat().st_size for path in blobs.glob("*") if path.is_file()) if blobs.is_dir() else 0
    require_disk(cache, max(total - have, 0), f"fetching `{repo}`")
    what = repo if weights else f"the configuration of {repo}"
    progress.start(f"fetching {what} from the hub", total)
    progress.advance(min(have, total))
    with explained(repo), watched(blobs, max(total - have, 0), progress):
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=wanted,
            cache_dir=cache,
            endpoint=endpoint(),
            tqdm_class=silent_bar(),
        )
    return Path(folder)


def choose_files(repo: str, files: Mapping[str, RemoteFile]) -> list[str]:
    """The names that a model needs, of the top folder only: originals and other formats stay where they are.

    Raises `UnsupportedModelError` for a repository without safetensors.
    """
    chosen = sorted(name for name in files if WANTED.fullmatch(name) and not UNWANTED.fullmatch(name))
    if not any(name.endswith(".safetensors") for name in chosen):
        raise no_safetensors(repo, list(files))
    return chosen


def no_safetensors(name: str, files: list[str]) -> FlyError:
    """What to say of a repository or folder that has no safetensors."""
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if ggufs:
        return UnsupportedModelError(
            f"`{name}` holds GGUF files: {', '.join(ggufs[:3])}{' …' if len(ggufs) > 3 else ''}",
            hint="give the path of one of them, or an alias with `hub` and `file` in your config file",
        )
    if any(PICKLES.fullmatch(file) for file in files):
        return UnsupportedModelError(
            f"`{name}` has only pickled weights (.bin), and loading those can run any code",
            hint="use a model with .safetensors files, or load it where you trust it and call `save_pretrained`",
        )
    return ModelNotFoundError(
        f"`{name}` holds no weights that can be loaded", hint="a model needs .safetensors files beside its config.json"
    )


def cached_file(repo: str, name: str, revision: str | None) -> Path | None:
    """A file in the hub's own cache, or None. Never connects."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, cache_dir=cache_location(), revision=revision)
    return Path(found) if isinstance(found, str) else None


def cache_location() -> Path:
    """The folder of the hub's own cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """The hub's address (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def silent_bar() -> Any:
    """A progress bar that shows nothing: progress is told by what arrives on disk."""
    from huggingface_hub.utils.tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return SilentBar


def unreachable(repo: str) -> DownloadError:
    return DownloadError(
        f"`{repo}` cannot be fetched: the hub ({endpoint()}) does not answer",
        hint="check the network and HF_ENDPOINT; the default pair needs no hub: `fly pull`",
    )


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn the hub's errors into ours: bad token, access needed, no such model, out of reach. No token is shown."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RevisionNotFoundError,
    )

    try:
        yield
    except FlyError:
        raise
    except HFValidationError as error:
        raise ModelNotFoundError(f"`{repo}` is not a hub id", hint="hub ids have the form owner/name") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"`{repo}` has no such revision on the hub", hint="check `revision` of the alias"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        told_missing = status and error.response.headers.get("X-Error-Code") == "RepoNotFound"
        if status == 401 and get_token() and not told_missing and not isinstance(error, GatedRepoError):
            raise DownloadError(
                "the hub refuses your access token, even for public models",
                hint="unset HF_TOKEN or give a valid one; `hf auth login` stores it",
            ) from None
        if status == 403 or isinstance(error, GatedRepoError):
            raise DownloadError(
                f"`{repo}` needs access that you do not have yet",
                hint=f"accept its terms at {endpoint()}/{repo}, then `hf auth login` or set HF_TOKEN",
            ) from None
        if isinstance(error, EntryNotFoundError):
            raise ModelNotFoundError(
                f"a file of `{repo}` is gone from the hub", hint="try again, or use another model"
            ) from None
        if status in (401, 404):
            raise ModelNotFoundError(
                f"the hub has no model `{repo}` that you may see",
                hint="check the spelling; `fly models` lists aliases. For a private model log in with `hf auth login`",
            ) from None
        raise DownloadError(
            f"the hub answered {status or 'with an error'} for `{repo}`", hint="try again later"
        ) from None
    except Exception as error:
        # Its network library changed from release to release, so its errors are told by where they come from.
        from_network = type(error).__module__.startswith(("httpx", "httpcore", "requests"))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError("the disk is full", hint="free some space, or set HF_HOME to a larger disk") from error
        if from_network or (isinstance(error, OSError) and error.filename is None):
            raise unreachable(repo) from error
        raise
