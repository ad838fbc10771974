"""The reaper's indexes begin with the state: without it SQLite reads all jobs that wait to find those that are late."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision: str | None = "0007"
branch_labels: str | None = None
depends_on: str | None = None

INDEXES = (("ix_jobs_deadline", "deadline", "queued"), ("ix_jobs_lease", "lease_until", "running"))


def upgrade() -> None:
    _make("status")


def downgrade() -> None:
    _make()


def _make(*first: str) -> None:
    for name, column, status in INDEXES:
        where = sa.text(f"status = '{status}'")
        op.drop_index(name, "jobs")
        op.create_index(name, "jobs", [*first, column], postgresql_where=where, sqlite_where=where)
