"""`headrace keys`: who may use the HTTP door. The commands work on the ledger, so they are for its operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cli.output import Exit, Failure, err, out, print_json

if TYPE_CHECKING:
    from ledger.credentials import ApiKey, IssuedKey
    from ledger.keys import Keys

app = typer.Typer(help="Make, list, rotate and revoke the API keys of the HTTP door.", no_args_is_help=True)

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
LONGEST_S = 100 * 365 * UNITS_S["d"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def seconds(text: str) -> float:
    """A length of time as people write it: 90s, 15m, 12h, 30d, 4w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    length_s = float(match.group(1)) * UNITS_S[match.group(2)] if match else -1.0
    if not 0 <= length_s <= LONGEST_S:
        raise typer.BadParameter(f"{text!r} is no length of time, such as 90s, 15m, 12h, 30d or 4w")
    return length_s


def _name(text: str) -> str:
    from headrace.contract import Name
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter[str](Name).validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"{text!r}: letters, digits and . _ : / - only, at most 128") from None


def _scope(text: str) -> str:
    from ledger.credentials import Scope

    if text not in list(Scope):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(Scope)}")
    return text


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose jobs the key is for.", parser=_name)] = "default",
    name: Annotated[str, typer.Option(help="What the key is for, to tell it from others.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it allows: submit, read, cancel, metrics, or admin (everything, for every tenant). May be "
            "repeated; by default submit, read and cancel.",
            parser=_scope,
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="How long it is valid, e.g. 90d; by default until it is revoked.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Its own limit of requests.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Its own limit of tokens.")] = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, this once: the ledger keeps only its hash."""
    from ledger.credentials import DEFAULT_SCOPES, NewKey, Scope

    if len(name) > 128:
        raise Failure("the name has more than 128 characters", code=Exit.USAGE)
    scopes = frozenset(map(Scope, scope)) if scope else DEFAULT_SCOPES
    lifetime_s = None if expires is None else seconds(expires)
    asked = NewKey(tenant, name, scopes, lifetime_s, requests_per_minute, tokens_per_minute)
    with _keys() as keys:
        _print_issued(keys.create(asked), as_json)


@app.command("list")
def list_keys(
    everyone: Annotated[bool, typer.Option("--all", "-a", help="Also those that are not valid any more.")] = False,
    as_json: Json = False,
) -> None:
    """List the keys, newest first. The secrets are nowhere to be had."""
    with _keys() as keys:
        found = keys.list(usable=not everyone)
    if as_json:
        print_json([_shown(key) for key in found])
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("Key", "Tenant", "Name", "Scopes", "Created", "Ends"):
        table.add_column(column, overflow="fold", no_wrap=column == "Key")
    for key in found:
        table.add_row(
            f"hr_{key.id}",
            key.tenant,
            escape(key.name),
            ", ".join(sorted(key.scopes)),
            f"{key.created_at:%F}",
            _end(key),
        )
    out.print(table if found else "no keys")


@app.command()
def revoke(
    keys: Annotated[list[str], typer.Argument(help="Keys, by what `list` shows of them.", metavar="KEY...")],
) -> None:
    """End keys now. The API refuses them within seconds, and ends the event streams that they follow."""
    ids = [_id(key) for key in keys]
    with _keys() as ring:
        for key_id in ids:
            ended = ring.revoke(key_id)
            out.print(f"hr_{ended.id} is revoked", soft_wrap=True)


@app.command()
def rotate(
    key: Annotated[str, typer.Argument(help="The key, by what `list` shows of it.", metavar="KEY")],
    overlap: Annotated[str, typer.Option(help="How long the old one stays valid beside the new one.")] = "24h",
    as_json: Json = False,
) -> None:
    """Make a key that is as another one, which stays valid for a while, and print it, this once."""
    key_id, overlap_s = _id(key), seconds(overlap)
    with _keys() as keys:
        _print_issued(keys.rotate(key_id, overlap_s), as_json)
    err.print(f"hr_{key_id} is valid for {overlap} more, or until it ends by itself", soft_wrap=True)


def _id(shown: str) -> str:
    """The id in what people have of a key: the id, the prefix, or the whole token."""
    match = re.fullmatch(r"(?:hr_)?([0-9a-f]{16})(?:_.*)?", shown)
    if match is None:
        raise Failure("that names no key", "`headrace keys list` shows them, as hr_ and 16 digits", Exit.USAGE)
    return match.group(1)


@contextmanager
def _keys() -> Iterator[Keys]:
    from cli.instance import instance_settings, ledger_url
    from ledger import Ledger
    from ledger.keys import UnknownKey

    ledger = Ledger(ledger_url(instance_settings()))
    try:
        yield ledger.keys
    except UnknownKey as unknown:
        raise Failure(str(unknown), "`headrace keys list --all` shows every key") from None
    finally:
        ledger.close()


def _print_issued(issued: IssuedKey, as_json: bool) -> None:
    if as_json:
        print_json(_shown(issued.key) | {"token": issued.token})
        return
    print(issued.token)
    scopes = ", ".join(sorted(issued.key.scopes))
    err.print(f"for tenant {issued.key.tenant}: {scopes}. It is shown this once; keep it.", soft_wrap=True)


def _shown(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
    }


def _end(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%F %H:%M}"
    return f"{key.expires_at:%F %H:%M}" if key.expires_at is not None else ""
