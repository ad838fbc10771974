"""Parameters of a job from the command line: any field of the contract, by its name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer

from cli.output import Exit, Failure


def named_params(given: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; a value is JSON, or text if it isn't."""
    params: dict[str, Any] = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise Failure(f"--param {pair!r} is not NAME=VALUE", "e.g. --param repetition_penalty=1.2", Exit.USAGE)
        if name in params:
            raise Failure(f"--param {name} is given twice", code=Exit.USAGE)
        try:
            params[name] = json.loads(value)
        except ValueError:
            params[name] = value
    return params


Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", help="A low-rank adapter that jobs may name: its directory. May be repeated.", metavar="NAME=PATH"
    ),
]


def named_paths(given: Sequence[str]) -> dict[str, str]:
    """`name=path` pairs of --adapter."""
    paths: dict[str, str] = {}
    for pair in given:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path:
            raise Failure(f"--adapter {pair!r} is not NAME=PATH", "e.g. --adapter sql=/models/sql-lora", Exit.USAGE)
        if name in paths:
            raise Failure(f"--adapter {name} is given twice", code=Exit.USAGE)
        paths[name] = path
    return paths


def schema_format(file: TextIO) -> dict[str, Any]:
    """The `response_format` of a file that holds a JSON schema."""
    try:
        schema = json.load(file)
    except ValueError as error:
        raise Failure(f"{file.name} holds no JSON: {error}", code=Exit.USAGE) from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}
