"""Adds the request bodies that routes read by themselves to the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def json_body(model: type[BaseModel], examples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `model`."""
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": _REF.format(model=model.__name__)},
                    "examples": {name: {"value": value} for name, value in examples.items()},
                }
            },
        }
    }


def install(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Let the document of `app` define `bodies` and what they refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            known = schema.setdefault("components", {}).setdefault("schemas", {})
            for body in bodies:
                own = body.model_json_schema(ref_template=_REF)
                for name, definition in {**own.pop("$defs", {}), body.__name__: own}.items():
                    known.setdefault(name, definition)
            _drop_framework_errors(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _drop_framework_errors(schema: dict[str, Any]) -> None:
    """Without the 422 that FastAPI announces: a wrong parameter is answered with 400."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
