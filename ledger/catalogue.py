"""The models that workers serve, as the door needs to know them."""

from __future__ import annotations

from headrace.contract import ModelCard
from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ledger.clock import db_now
from ledger.models import ModelRow


def register_model(connection: Connection, card: ModelCard, text_bundle: bytes) -> None:
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    row = insert(ModelRow).values(
        alias=card.id, card=card.model_dump(mode="json"), text_bundle=text_bundle, registered_at=db_now()
    )
    newest = {name: row.excluded[name] for name in ("card", "text_bundle", "registered_at")}
    connection.execute(row.on_conflict_do_update(index_elements=[ModelRow.alias], set_=newest))


def models(connection: Connection) -> dict[str, ModelCard]:
    rows = connection.execute(select(ModelRow.alias, ModelRow.card).order_by(ModelRow.alias))
    return {row.alias: ModelCard.model_validate(row.card) for row in rows}


def text_bundle(connection: Connection, model: str) -> bytes | None:
    return connection.execute(select(ModelRow.text_bundle).where(ModelRow.alias == model)).scalar_one_or_none()
