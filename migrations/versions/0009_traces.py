"""Jobs know the span that asked for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision: str | None = "0008"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("traceparent", sa.String(55)))


def downgrade() -> None:
    op.drop_column("jobs", "traceparent")
