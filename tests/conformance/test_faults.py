"""`docs/faults.md` names a test for every fault, and each test cites the report that it was learned from."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORIES = {
    "vLLM": "vllm-project/vllm",
    "vllm-metal": "vllm-project/vllm-metal",
    "llama.cpp": "ggml-org/llama.cpp",
    "nano-vllm": "GeeeekExplorer/nano-vllm",
    "SGLang": "sgl-project/sglang",
    "LMCache": "LMCache/LMCache",
}
KNOWN = {
    "Stopping": ["vLLM 3572", "vLLM 3672", "vLLM 11089", "llama.cpp 9867", "vLLM 21987", "vLLM 5849", "vLLM 4589",
                 "vLLM 1973", "nano-vllm"],
    "Text": ["vLLM 48853", "vLLM 8627", "vLLM 27486", "common", "common"],
    "Limits": ["vLLM 765", "vLLM 1673", "vLLM 16445", "SGLang 28530", "nano-vllm 274", "vLLM 6866", "vLLM 13175",
               "common"],
    "Sampling": ["vLLM 51226", "vLLM 17524", "vLLM 1623", "vLLM 5404", "common", "vllm-metal 69", "vLLM 9453"],
    "Cache, scheduling, lifetime": ["nano-vllm 211", "nano-vllm 233", "vLLM 49449", "vLLM 5543", "vLLM 30931",
                                    "vLLM 42125", "vLLM 16832", "vLLM 5952", "SGLang 1674", "vLLM 10774", "vLLM 41951",
                                    "vLLM 40004", "LMCache 3688", "vLLM 6145", "vLLM 34643"],
    "Jobs": ["llm-d-async 404", "celery 5935, kombu 337", "celery 4354, celery 3802, kombu 1836", "celery 10302",
             "celery 10490, celery 8147", "OpenTranscribe 823", "celery 9844", "cog 2229",
             "celery 9082, worker-vllm 29", "llm-d-async 391", "BentoML 5694", "runpod-python 250", "kaapi 723",
             "warmbly 333", "celery 4028", "celery 6533, celery 7912", "celery 3813, BentoML 5189", "flower 1128",
             "opentelemetry-python-contrib 1002", "llm-d-async 353, llm-d-async 150", "vllm 30268",
             "batch-gateway 645"],
}  # fmt: skip


class Fault(NamedTuple):
    section: str
    source: str
    tests: tuple[tuple[Path, str], ...]


def faults() -> list[Fault]:
    found, section = [], ""
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith(("| learned", "|---")):
            source, _, _, named = (cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | "))
            tests = tuple((_file(path), test) for path, test in re.findall(r"`(\S+?)::(\S+?)`", named))
            found.append(Fault(section, source, tests))
    return found


def _file(path: str) -> Path:
    """A test's file, named by its place in `tests` or in `tests/unit`."""
    within = ROOT / "tests" / path
    return within if within.exists() else ROOT / "tests/unit" / path


@cache
def functions(path: Path) -> dict[str, str]:
    """Each test of a file and the source that it stands in, from its decorators on."""
    text = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in nodes if node.name.startswith("test_")}


def test_every_known_fault_has_its_row() -> None:
    rows: dict[str, list[str]] = {}
    for fault in faults():
        rows.setdefault(fault.section, []).append(fault.source)
    assert rows == KNOWN


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.section}-{fault.source}")
def test_its_tests_exist_and_one_cites_the_report(fault: Fault) -> None:
    assert fault.tests
    sources = [functions(path)[name] for path, name in fault.tests]
    if fault.source == "common":
        return
    if fault.section == "Jobs":
        for report in fault.source.split(", "):
            assert any(re.search(re.escape(report) + r"(?!\d)", source) for source in sources), f"{report} is not cited"
        return
    name, _, number = fault.source.partition(" ")
    url = f"https://github.com/{REPOSITORIES[name]}" + (f"/issues/{number}" if number else "")
    cited = re.compile(re.escape(url) + r"(?!\d)")
    assert all(cited.search(source) for source in sources), f"{url} is not cited by each of {fault.tests}"


def test_every_report_that_the_engines_tests_cite_is_a_row() -> None:
    """Nobody learns from a report without telling."""
    told = {fault.source for fault in faults()}
    for path in sorted((ROOT / "tests/unit").glob("*/**/test_*.py")):
        if path.parts[len(ROOT.parts) + 2] not in ("engine", "kernels", "text"):
            continue
        for repository, number in re.findall(r"https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)", path.read_text()):
            names = [name for name, known in REPOSITORIES.items() if known == repository]
            assert names, f"{path} cites {repository}, which the table does not know"
            assert f"{names[0]} {number}" in told, f"{path} cites {names[0]} {number}"
