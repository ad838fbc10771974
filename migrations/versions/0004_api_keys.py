"""API keys of the HTTP door."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None

moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("expires_at", moment),
        sa.Column("revoked_at", moment),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("tokens_per_minute", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )


def downgrade() -> None:
    op.drop_table("api_keys")
