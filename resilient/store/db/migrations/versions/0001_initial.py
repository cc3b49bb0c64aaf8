"""The first tables.

Types are spelled out and not imported from the models: a migration is history and does not change with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0001"
down_revision = None

# Times are fixed-width text on SQLite, so that they compare as text. Keys sort as bytes on every database.
TIME: Final = sa.DateTime(timezone=True).with_variant(sa.String(26), "sqlite")
KEY: Final = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
NAME: Final = sa.String(255)
DOCUMENT: Final = sa.JSON().with_variant(sa.Text(), "sqlite")  # SQLite rounds numbers in a column called JSON
SEARCHED: Final = sa.Text().with_variant(JSONB(), "postgresql")
BIG_ID: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# PostgreSQL's storage parameters. The server's defaults (vacuum at 20 % dead rows, in slow motion) are made
# for tables that are read; these are written: a job leaves two dead rows behind, a turn one, a busy resource
# many a second. A job's marks and progress are updated in place (HOT) while its page has room.
JOB: Final = {
    "fillfactor": 85,
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.05,
    "autovacuum_vacuum_cost_delay": 0,
}
# Inserted and deleted, hardly ever updated.
QUEUE: Final = {
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 500,
    "autovacuum_analyze_scale_factor": 0.05,
    "autovacuum_vacuum_cost_delay": 0,
}
# Few rows, updated all the time, no index on what changes: half of each page stays free, so updates are HOT.
HOT: Final = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 200,
    "autovacuum_vacuum_cost_delay": 0,
}


def _store(op: Operations, table: str, parameters: dict[str, float]) -> None:
    """``postgresql_with=`` would say it too, but SQLAlchemy knows that only since 2.1."""
    context = op.get_context()
    if context.dialect.name == "postgresql":
        schema = context.opts["version_table_schema"]
        name = f'"{schema}".{table}' if schema else table
        op.execute(f"ALTER TABLE {name} SET ({', '.join(f'{key} = {value}' for key, value in parameters.items())})")


def _index(
    op: Operations, table: str, short: str, columns: list[Any], where: str | None = None, **options: Any
) -> None:
    condition = sa.text(where) if where else None
    name = f"{table}_{short}"
    op.create_index(name, table, columns, postgresql_where=condition, sqlite_where=condition, **options)


def _job(op: Operations) -> None:
    op.create_table(
        "resilient_job",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("kind", NAME, nullable=False),
        sa.Column("resource_key", KEY, nullable=False),
        sa.Column("payload", DOCUMENT),
        sa.Column("payload_version", sa.Integer, nullable=False, server_default="1"),
        sa.Column("state", NAME, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("run_at", TIME, nullable=False),
        sa.Column("expires_at", TIME),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("max_attempts", sa.Integer),
        sa.Column("executions", sa.Integer, nullable=False, server_default="0"),
        sa.Column("deferrals", sa.Integer, nullable=False, server_default="0"),
        sa.Column("rescues", sa.Integer, nullable=False, server_default="0"),
        sa.Column("version", sa.Integer, nullable=False, server_default="1"),
        sa.Column("locked_by", NAME),
        sa.Column("lease_until", TIME),
        sa.Column("started_at", TIME),
        sa.Column("unique_key", NAME),
        sa.Column("unique_until", NAME),
        sa.Column("unique_lock", NAME),
        sa.Column("once_more", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("idempotency_key", NAME),
        sa.Column("sent", DOCUMENT),
        sa.Column("tags", SEARCHED),
        sa.Column("progress", DOCUMENT),
        sa.Column("result", DOCUMENT),
        sa.Column("last_error", sa.Text),
        sa.Column("last_error_kind", NAME),
        sa.Column("last_error_code", NAME),
        sa.Column("waiting_for", KEY),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("trace", DOCUMENT),
        sa.Column("ordering_key", KEY),
        sa.Column("order_no", sa.BigInteger),
        sa.Column("ordering_policy", NAME),
        sa.Column("waits", sa.Integer, nullable=False, server_default="0"),
        sa.Column("followed", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
    )
    _store(op, "resilient_job", JOB)
    _job_indexes(op)


def _job_indexes(op: Operations) -> None:
    _index(op, "resilient_job", "due", ["run_at", "id"], where="state = 'scheduled'")
    _index(op, "resilient_job", "expires", ["expires_at"], where="expires_at IS NOT NULL AND finished_at IS NULL")
    _index(op, "resilient_job", "finished", ["state", "finished_at"], where="finished_at IS NOT NULL")
    _index(op, "resilient_job", "waiting", ["id"], where="state = 'blocked' AND ordering_key IS NULL")
    _index(op, "resilient_job", "lane", ["resource_key", "ordering_key", "order_no"], where="state = 'blocked'")
    _index(
        op,
        "resilient_job",
        "ready",
        ["resource_key", sa.text("priority DESC"), "run_at", "id"],
        where="state = 'ready'",
    )
    _index(op, "resilient_job", "running", ["resource_key", "lease_until"], where="state = 'running'")
    _index(
        op,
        "resilient_job",
        "tags",
        ["tags"],
        where="tags IS NOT NULL",
        postgresql_using="gin",
        postgresql_ops={"tags": "jsonb_path_ops"},
    )
    _index(op, "resilient_job", "unique", ["kind", "unique_lock"], where="unique_lock IS NOT NULL", unique=True)
    elsewhere = "state = 'scheduled' AND waiting_for IS NOT NULL"
    _index(op, "resilient_job", "elsewhere", ["waiting_for", "run_at"], where=elsewhere)


def _order(op: Operations) -> None:
    op.create_table(
        "resilient_order",
        sa.Column("resource_key", KEY, primary_key=True),
        sa.Column("ordering_key", KEY, primary_key=True),
        sa.Column("last_no", sa.BigInteger, nullable=False),
        sa.Column("head_id", sa.Uuid),
        sa.Column("seek_no", sa.BigInteger, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _store(op, "resilient_order", HOT)


def _dependency(op: Operations) -> None:
    op.create_table(
        "resilient_dependency",
        sa.Column("job_id", sa.Uuid, primary_key=True),
        sa.Column("blocker_id", sa.Uuid, primary_key=True),
        sa.Column("on_dead", NAME, nullable=False),
        sa.Column("resolved", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    _store(op, "resilient_dependency", QUEUE)
    _index(op, "resilient_dependency", "blocker", ["blocker_id"])
    _index(op, "resilient_dependency", "open", ["job_id"], where="NOT resolved")


def _workflow(op: Operations) -> None:
    op.create_table(
        "resilient_workflow",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("state", NAME, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("attention", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
    )
    _index(op, "resilient_workflow", "attention", ["id"], where="attention")
    _index(op, "resilient_workflow", "state", ["state", "id"])
    _index(op, "resilient_workflow", "finished", ["finished_at"], where="finished_at IS NOT NULL")
    op.create_table(
        "resilient_step",
        sa.Column("workflow_id", sa.Uuid, primary_key=True),
        sa.Column("name", NAME, primary_key=True),
        sa.Column("no", sa.Integer, nullable=False),
        sa.Column("job_id", sa.Uuid, nullable=False),
        sa.Column("kind", NAME, nullable=False),
        sa.Column("resource_key", KEY, nullable=False),
        sa.Column("after_names", DOCUMENT),
        sa.Column("undo_kind", NAME),
        sa.Column("undo_payload", DOCUMENT),
        sa.Column("undo_version", sa.Integer),
        sa.Column("undo_max_attempts", sa.Integer),
        sa.Column("undo_job_id", sa.Uuid),
    )
    _index(op, "resilient_step", "job", ["job_id"])
    _index(op, "resilient_step", "undo", ["undo_job_id"], where="undo_job_id IS NOT NULL")


def _resource(op: Operations) -> None:
    op.create_table(
        "resilient_resource",
        sa.Column("key", KEY, primary_key=True),
        sa.Column("breaker", NAME, nullable=False, server_default="closed"),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("open_until", TIME),
        sa.Column("opened_at", TIME),
        sa.Column("closed_at", TIME),
        sa.Column("reopens", sa.Integer, nullable=False, server_default="0"),
        sa.Column("probe_owner", NAME),
        sa.Column("probe_until", TIME),
        sa.Column("streak", sa.Integer, nullable=False, server_default="0"),
        sa.Column("window_at", TIME),
        sa.Column("window", DOCUMENT),
        sa.Column("blocked_until", TIME),
        sa.Column("blocked_since", TIME),
        sa.Column("blocked_code", NAME),
        sa.Column("paused_at", TIME),
        sa.Column("paused_until", TIME),
        sa.Column("paused_reason", sa.Text),
        sa.Column("auth", NAME, nullable=False, server_default="ok"),
        sa.Column("auth_since", TIME),
        sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("policy", DOCUMENT),
        sa.Column("last_error", sa.Text),
        sa.Column("last_error_kind", NAME),
        sa.Column("last_error_code", NAME),
        sa.Column("last_error_at", TIME),
        sa.Column("last_success_at", TIME),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _store(op, "resilient_resource", HOT)


def _rate_limit(op: Operations) -> None:
    op.create_table(
        "resilient_rate_limit",
        sa.Column("resource_key", KEY, primary_key=True),
        sa.Column("name", NAME, primary_key=True),
        sa.Column("tat", sa.Float(53), nullable=False, server_default="0"),
        sa.Column("remaining", sa.Float(53)),
        sa.Column("reset_at", sa.Float(53)),
        sa.Column("observed_at", sa.Float(53)),
    )
    _store(op, "resilient_rate_limit", HOT)


def _turn(op: Operations) -> None:
    op.create_table(
        "resilient_turn",
        sa.Column("id", BIG_ID, primary_key=True, autoincrement=True),
        sa.Column("resource_key", KEY, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("parked_on", KEY),
        sa.Column("recheck_at", TIME),
        sqlite_autoincrement=True,
    )
    _store(op, "resilient_turn", QUEUE)
    _index(op, "resilient_turn", "key", ["resource_key", "id"], where="parked_on IS NULL")
    _index(op, "resilient_turn", "order", [sa.text("priority DESC"), "id"], where="parked_on IS NULL")
    _index(op, "resilient_turn", "parked", ["resource_key"], where="parked_on IS NOT NULL", unique=True)
    _index(op, "resilient_turn", "recheck", ["recheck_at"], where="parked_on IS NOT NULL")
    _index(op, "resilient_turn", "release", ["parked_on", "id"], where="parked_on IS NOT NULL")


def _attempt(op: Operations) -> None:
    op.create_table(
        "resilient_attempt",
        sa.Column("id", BIG_ID, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.Uuid, nullable=False),
        sa.Column("execution", sa.Integer, nullable=False),
        sa.Column("worker_id", NAME),
        sa.Column("started_at", TIME),
        sa.Column("finished_at", TIME, nullable=False),
        sa.Column("duration", sa.Float(53)),
        sa.Column("decision", NAME, nullable=False),
        sa.Column("charged", sa.Boolean, nullable=False),
        sa.Column("kind", NAME),
        sa.Column("code", NAME),
        sa.Column("status", sa.Integer),
        sa.Column("resource_key", KEY),
        sa.Column("next_at", TIME),
        sa.Column("message", sa.Text),
        sa.Column("traceback", sa.Text),
    )
    _index(op, "resilient_attempt", "job", ["job_id"])


def _worker(op: Operations) -> None:
    op.create_table(
        "resilient_worker",
        sa.Column("id", NAME, primary_key=True),
        sa.Column("host", NAME, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("kinds", DOCUMENT),
        sa.Column("concurrency", sa.Integer, nullable=False),
        sa.Column("running", sa.Integer, nullable=False, server_default="0"),
        sa.Column("code_version", NAME, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("stopping", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    _store(op, "resilient_worker", HOT)


def _schedule(op: Operations) -> None:
    op.create_table(
        "resilient_schedule",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("kind", NAME),
        sa.Column("spec", DOCUMENT),
        sa.Column("next_at", TIME, nullable=False),
        sa.Column("accounts_at", TIME),
        sa.Column("last_at", TIME),
        sa.Column("last_job", sa.Uuid),
        sa.Column("active_since", TIME),
        sa.Column("succeeded_at", TIME),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("removed", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _store(op, "resilient_schedule", HOT)
    due = "kind IS NOT NULL AND NOT paused AND NOT removed"
    _index(op, "resilient_schedule", "due", ["next_at"], where=due)
    op.create_table(
        "resilient_schedule_account",
        sa.Column("schedule", NAME, primary_key=True),
        sa.Column("resource_key", KEY, primary_key=True),
        sa.Column("next_at", TIME, nullable=False),
        sa.Column("last_at", TIME),
        sa.Column("last_job", sa.Uuid),
        sa.Column("active_since", TIME, nullable=False),
        sa.Column("succeeded_at", TIME),
    )
    _index(op, "resilient_schedule_account", "due", ["schedule", "next_at"])


def _alert(op: Operations) -> None:
    op.create_table(
        "resilient_alert",
        sa.Column("fingerprint", NAME, primary_key=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("subject", NAME, nullable=False),
        sa.Column("cause", NAME, nullable=False),
        sa.Column("detail", DOCUMENT),
        sa.Column("count", sa.Integer, nullable=False, server_default="1"),
        sa.Column("first_at", TIME, nullable=False),
        sa.Column("last_at", TIME, nullable=False),
        sa.Column("told_at", TIME),
        sa.Column("resolved_at", TIME),
    )


def _grant(op: Operations) -> None:
    op.create_table(
        "resilient_grant",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("provider", KEY, nullable=False),
        sa.Column("kind", NAME, nullable=False),
        sa.Column("flow", NAME),
        sa.Column("state", NAME, nullable=False, server_default="active"),
        sa.Column("state_since", TIME, nullable=False),
        sa.Column("secrets", sa.Text),
        sa.Column("key_id", NAME),
        sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("expires_at", TIME),
        sa.Column("refresh_at", TIME),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lease_until", TIME),
        sa.Column("sent_at", TIME),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("retry_at", TIME),
        sa.Column("last_code", NAME),
        sa.Column("refreshed_at", TIME),
        sa.Column("died_at", TIME),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _index(op, "resilient_grant", "died", ["provider", "died_at"], where="died_at IS NOT NULL")
    _store(op, "resilient_grant", HOT)


def _connection(op: Operations) -> None:
    op.create_table(
        "resilient_connection",
        sa.Column("resource_key", KEY, primary_key=True),
        sa.Column("grant_id", sa.Uuid, nullable=False),
        sa.Column("details", DOCUMENT),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _index(op, "resilient_connection", "grant", ["grant_id"])
    op.create_table(
        "resilient_authorization",
        sa.Column("id", NAME, primary_key=True),
        sa.Column("resource_key", KEY, nullable=False),
        sa.Column("secrets", sa.Text, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
    )


def _cursor(op: Operations) -> None:
    op.create_table(
        "resilient_cursor",
        sa.Column("resource_key", KEY, primary_key=True),
        sa.Column("stream", KEY, primary_key=True),
        sa.Column("part", KEY, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("pass_id", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("is_full", sa.Boolean, nullable=False, server_default=sa.text("true")),
        sa.Column("full_pass", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("swept_pass", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("position", DOCUMENT),
        sa.Column("pages", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("records", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rejected", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("full_at", TIME),
        sa.Column("completed_at", TIME),
        sa.Column("error", sa.Text),
        sa.Column("expected", sa.Float(53)),
        sa.Column("job_id", sa.Uuid),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _store(op, "resilient_cursor", HOT)


def _inbox(op: Operations) -> None:
    op.create_table(
        "resilient_inbox",
        sa.Column("consumer", KEY, primary_key=True),
        sa.Column("message_id", KEY, primary_key=True),
        sa.Column("seen_at", TIME, nullable=False),
    )
    _index(op, "resilient_inbox", "seen", ["seen_at"])
    _store(op, "resilient_inbox", QUEUE)
    op.create_table(
        "resilient_inbox_key",
        sa.Column("consumer", KEY, primary_key=True),
        sa.Column("ordering_key", KEY, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    _index(op, "resilient_inbox_key", "old", ["updated_at"])
    _store(op, "resilient_inbox_key", HOT)


def upgrade(op: Operations) -> None:
    """Create them."""
    _job(op)
    _order(op)
    _dependency(op)
    _workflow(op)
    _resource(op)
    _rate_limit(op)
    _turn(op)
    _attempt(op)
    _worker(op)
    _schedule(op)
    _alert(op)
    _grant(op)
    _connection(op)
    _cursor(op)
    _inbox(op)


def downgrade(op: Operations) -> None:
    """Drop them, with everything in them."""
    op.drop_table("resilient_inbox_key")
    op.drop_table("resilient_inbox")
    op.drop_table("resilient_cursor")
    op.drop_table("resilient_authorization")
    op.drop_table("resilient_connection")
    op.drop_table("resilient_grant")
    op.drop_table("resilient_alert")
    op.drop_table("resilient_schedule_account")
    op.drop_table("resilient_schedule")
    op.drop_table("resilient_worker")
    op.drop_table("resilient_attempt")
    op.drop_table("resilient_turn")
    op.drop_table("resilient_rate_limit")
    op.drop_table("resilient_resource")
    op.drop_table("resilient_step")
    op.drop_table("resilient_workflow")
    op.drop_table("resilient_dependency")
    op.drop_table("resilient_order")
    op.drop_table("resilient_job")
