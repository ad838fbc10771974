"""What the package exports, and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import headrace
import pytest

SOURCE = Path(headrace.__file__)


def test_every_public_name_is_listed_and_exists() -> None:
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headrace.")
        for alias in node.names
    }
    assert set(headrace.__all__) == imported
    assert all(getattr(headrace, name) is not None for name in headrace.__all__)
    assert set(headrace.__all__) <= set(dir(headrace))
    assert list(headrace.__all__) == sorted(headrace.__all__)


def test_every_error_that_can_be_raised_is_exported() -> None:
    from headrace import errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(headrace.__all__)
    assert all(issubclass(getattr(errors, name), headrace.HeadraceError) for name in raised)


def test_the_package_says_that_it_is_typed() -> None:
    assert SOURCE.with_name("py.typed").exists()


@pytest.mark.parametrize("module", ["celery", "kombu", "redis", "torch", "sqlalchemy", "fastapi", "httpx"])
def test_importing_it_loads_no_server_library(python: str, module: str) -> None:
    code = f"import sys, headrace; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([python, "-c", code], check=False, timeout=30).returncode == 0


def test_producer_without_celery_says_what_to_install(python: str) -> None:
    code = (
        "import sys; sys.modules['celery'] = None\n"
        "import headrace\n"
        "try: headrace.Producer('redis://127.0.0.1:1/0')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=30)
    assert "pip install './client[celery]'" in done.stdout
