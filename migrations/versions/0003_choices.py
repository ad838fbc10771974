"""Results of several completions, and logprobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

COLUMNS = ("choices", "logprobs", "prompt_logprobs")


def upgrade() -> None:
    for column in COLUMNS:
        op.add_column("results", sa.Column(column, sa.JSON))


def downgrade() -> None:
    with op.batch_alter_table("results") as results:
        for column in COLUMNS:
            results.drop_column(column)
