"""The tables. People read them with SQL, so what they ask for most (`p99` by tenant and model) stands in columns."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from headrace.contract import JobStatus, Priority, Reason
from headrace.tracing import TRACEPARENT_CHARS
from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Dialect,
    Double,
    Enum,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from ledger.clock import UtcTime
from ledger.contract import Topic

MAX_ID_CHARS = 255
"""Celery lets a producer choose any task id; a longer one can't be a job."""


class PlainText(TypeDecorator[str]):
    """Text of any origin. PostgreSQL can't hold U+0000, so it is kept as U+FFFD; a result's token ids stay exact."""

    impl: type[String] = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value.replace("\0", "\ufffd") if value is not None else None


class PlainString(PlainText):
    """The same, with a bounded length."""

    impl = String
    cache_ok = True


def _words(values: type[StrEnum], length: int) -> Enum:
    """A column of the enum's values, as a plain string."""
    return Enum(values, native_enum=False, length=length, values_callable=lambda e: [member.value for member in e])


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class JobRow(Base):
    """One job. The database itself refuses a lease without work, and an end without its time."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(PlainString(MAX_ID_CHARS), primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainString(128))
    model: Mapped[str] = mapped_column(PlainString(128))
    status: Mapped[JobStatus] = mapped_column(_words(JobStatus, 16))
    priority: Mapped[Priority] = mapped_column(_words(Priority, 16))
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(Integer)
    fence: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Rises whenever the right to write the outcome changes hands."""
    cancel_requested: Mapped[bool] = mapped_column(server_default=false())
    worker: Mapped[str | None] = mapped_column(String(255))
    lease_until: Mapped[datetime | None] = mapped_column(UtcTime)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    accepted_at: Mapped[datetime] = mapped_column(UtcTime)
    """When it was submitted, or the last retry asked for."""
    queued_at: Mapped[datetime] = mapped_column(UtcTime)
    """When it last came into the queue: accepted, released, reaped or published again."""
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    """When the newest attempt began."""
    finished_at: Mapped[datetime | None] = mapped_column(UtcTime)
    deadline: Mapped[datetime | None] = mapped_column(UtcTime)
    error_code: Mapped[Reason | None] = mapped_column(_words(Reason, 32))
    error_message: Mapped[str | None] = mapped_column(PlainText)
    queue_time_ms: Mapped[float | None] = mapped_column(Double)
    time_to_first_token_ms: Mapped[float | None] = mapped_column(Double)
    generation_time_ms: Mapped[float | None] = mapped_column(Double)
    total_time_ms: Mapped[float | None] = mapped_column(Double)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    """Of the prompt, and the most that it may generate; a guess where nobody has counted the prompt's."""
    prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    completion_tokens: Mapped[int | None] = mapped_column(Integer)
    idempotency_key: Mapped[str | None] = mapped_column(PlainString(255))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    labels: Mapped[dict[str, str]] = mapped_column("metadata", JSON)
    traceparent: Mapped[str | None] = mapped_column(String(TRACEPARENT_CHARS))
    """The span that asked for the job."""
    raw: Mapped[str | None] = mapped_column(PlainText)
    """What a malformed message held."""
    request: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """The whole request, seed filled in; NULL if there never was a valid one."""

    __table_args__ = (
        CheckConstraint("(status = 'running') = (lease_until IS NOT NULL)", "lease"),
        CheckConstraint("(status IN ('queued', 'running')) = (finished_at IS NULL)", "finished"),
        CheckConstraint("attempt BETWEEN 0 AND max_attempts", "attempt"),
        Index(
            "ix_jobs_idempotency",
            "tenant",
            "idempotency_key",
            unique=True,
            postgresql_where=text("idempotency_key IS NOT NULL"),
            sqlite_where=text("idempotency_key IS NOT NULL"),
        ),
        Index(
            "ix_jobs_dead",
            "created_at",
            "id",
            postgresql_where=text("error_code = 'dead_letter'"),
            sqlite_where=text("error_code = 'dead_letter'"),
        ),
        Index("ix_jobs_created", "created_at", "id"),
        Index("ix_jobs_tenant_created", "tenant", "created_at", "id"),
        Index("ix_jobs_tenant_status_created", "tenant", "status", "created_at", "id"),
        Index("ix_jobs_model_created", "model", "created_at", "id"),
        Index("ix_jobs_status_created", "status", "created_at", "id"),
        Index("ix_jobs_model_status_finished", "model", "status", "finished_at"),
        Index(
            "ix_jobs_waiting",
            "model",
            "tenant",
            "tokens",
            postgresql_where=text("status = 'queued'"),
            sqlite_where=text("status = 'queued'"),
        ),
        Index(
            "ix_jobs_deadline",
            "status",
            "deadline",
            postgresql_where=text("status = 'queued'"),
            sqlite_where=text("status = 'queued'"),
        ),
        Index(
            "ix_jobs_lease",
            "status",
            "lease_until",
            postgresql_where=text("status = 'running'"),
            sqlite_where=text("status = 'running'"),
        ),
    )


class ResultRow(Base):
    """What the one committed attempt of a job brought. `text` is NULL if it brought nothing but timings."""

    __tablename__ = "results"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str | None] = mapped_column(PlainText)
    token_ids: Mapped[list[int] | None] = mapped_column(JSON(none_as_null=True))
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    stop_reason: Mapped[str | int | None] = mapped_column(JSON(none_as_null=True))
    usage: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    choices: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    """Every completion, of a job that asked for several."""
    logprobs: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    prompt_logprobs: Mapped[list[dict[str, Any] | None] | None] = mapped_column(JSON(none_as_null=True))
    embedding: Mapped[list[float] | None] = mapped_column(JSON(none_as_null=True))
    """The vector of a text, of a job that asked for one."""
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class OutboxRow(Base):
    """A message to send; ids are never used again.

    A job's own message is its place in the queue: the row of every queued job stays, marked as sent, until the job is
    claimed or ends. `ledger.lines` says whose turn it is.
    """

    __tablename__ = "outbox"
    __table_args__ = (
        Index(
            "ix_outbox_unsent",
            "line",
            "due_at",
            "id",
            postgresql_where=text("sent_at IS NULL"),
            sqlite_where=text("sent_at IS NULL"),
        ),
        Index(
            "ix_outbox_sent",
            "line",
            "sent_at",
            postgresql_where=text("sent_at IS NOT NULL"),
            sqlite_where=text("sent_at IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    topic: Mapped[Topic] = mapped_column(_words(Topic, 16))
    line: Mapped[str | None] = mapped_column(PlainString(300))
    """Model, class and tenant, as `ledger.lines` writes them; NULL for what is sent whatever else waits."""
    due_at: Mapped[datetime] = mapped_column(UtcTime)
    """Not to be sent before this; a relay that takes a row moves it ahead, so that no other relay sends it too."""
    sent_at: Mapped[datetime | None] = mapped_column(UtcTime)
    """When the broker took it."""
    raised: Mapped[bool] = mapped_column(server_default=false())
    """Whether it has waited so long that it stands in the first class's line."""


class LossRow(Base):
    """An attempt whose lease ran out: its worker died, or couldn't renew it. Kept with its job."""

    __tablename__ = "losses"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    attempt: Mapped[int] = mapped_column(Integer)
    worker: Mapped[str] = mapped_column(String(255), index=True)
    """The process, not only its name: the jobs that it lost were together in it."""
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    lost_at: Mapped[datetime] = mapped_column(UtcTime)


class RevocationRow(Base):
    """A revoke of a job that has no row: if its raw message still comes, it ends as cancelled."""

    __tablename__ = "revocations"

    job_id: Mapped[str] = mapped_column(PlainString(MAX_ID_CHARS), primary_key=True)
    asked_at: Mapped[datetime] = mapped_column(UtcTime, index=True)


class ModelRow(Base):
    """A model that some worker serves, and what the door needs to speak for it."""

    __tablename__ = "models"

    alias: Mapped[str] = mapped_column(String(128), primary_key=True)
    card: Mapped[dict[str, Any]] = mapped_column(JSON)
    text_bundle: Mapped[bytes] = mapped_column(LargeBinary)
    registered_at: Mapped[datetime] = mapped_column(UtcTime)


class ApiKeyRow(Base):
    """A key of the HTTP door, by its hash."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the token, in hexadecimal digits."""
    name: Mapped[str] = mapped_column(PlainString(128))
    tenant: Mapped[str] = mapped_column(PlainString(128))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcTime)
    requests_per_minute: Mapped[int | None] = mapped_column(Integer)
    tokens_per_minute: Mapped[int | None] = mapped_column(Integer)


class RoleRow(Base):
    """A duty that one process at a time has."""

    __tablename__ = "roles"

    role: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    held_until: Mapped[datetime] = mapped_column(UtcTime)
