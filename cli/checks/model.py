"""The configured model: there, and unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cli.checks.finding import Finding, Reporter
from engine.fake import is_fake
from engine.model.catalog import CATALOG, HUB_ID, list_models
from engine.model.digest import file_sha256
from engine.model.peft_config import UnsupportedAdapter, read_peft_config
from settings import Settings

model = Reporter("model")


def check_model(settings: Settings) -> Iterator[Finding]:
    """Whether a worker could load the model without fetching it, and whether its adapters are there."""
    yield _check_files(settings)
    for name, path in settings.model.adapters.items():
        yield _adapter(name, path)


def _adapter(name: str, path: Path) -> Finding:
    try:
        read_peft_config(path)
    except UnsupportedAdapter as error:
        return model.fail(f"adapter {name} can't be served: {error}", "name another directory in model.adapters")
    return model.ok(f"adapter {name} is in {path}")


def _check_files(settings: Settings) -> Finding:
    name = settings.model.model_path
    if is_fake(name):
        return model.ok(f"{name}: no weights needed")
    if name in CATALOG:
        return _catalogued(name, settings.cache)
    if Path(name).exists():
        return model.ok(f"{name} is there")
    if HUB_ID.match(name):
        return model.warn(
            f"{name} is a hub id; a worker fetches it when it starts", "fetch it now: headrace models pull"
        )
    return model.fail(f"there is no model {name}", f"name one of {', '.join(CATALOG)}, a path, or a hub id (org/name)")


def _catalogued(name: str, cache: Path) -> Finding:
    path = next(entry.path for entry in list_models(cache) if entry.name == name)
    if path is None:
        return model.warn(f"{name} is not in the cache; a worker fetches it when it starts", "headrace models pull")
    if file_sha256(path, cache) != CATALOG[name].sha256:
        return model.fail(f"{path} is not what it should be (SHA-256)", f"rm {path} && headrace models pull {name}")
    return model.ok(f"{name} is in the cache, SHA-256 {CATALOG[name].sha256[:12]}…")
