"""Every table on one page.

The story of a job: `Job` is inserted (`ready`, or `scheduled` for later) together with a `Turn`, which records that its
resource has ready work. A worker takes turns, locks the `Resource` rows, reads the gates and `RateLimit` rows, claims
jobs under a lease and writes new turns for what is left, or parks one turn on the resource that stops it. Every
execution that did not simply succeed leaves an `Attempt`. `Worker` rows are heartbeats, `Throughput` rows count by the
minute what ended how, `Schedule` rows tick, `Alert` rows group what people are alerted to, `Audit` rows record who
changed what, `Cursor` rows hold the positions of sync streams. A job with an ordering key is `blocked` until the
`Order` row of that key names it as the head; one that waits for others, until its `Dependency` rows are gone.
`Workflow` and `Step` rows say which jobs belong together. A `Connection` names the `Grant` (tokens, encrypted) that a
resource uses. `Inbox` and `InboxKey` rows are what a consumer of messages has taken already.

The tables live in their own MetaData, so an application's Alembic never sees them (`resilient.alembic.include_name`).
No foreign key points at a resource: it comes and goes with the keys in use.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, SmallInteger, Uuid, text
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from resilient.store.db.types import DOCUMENT, KEY, NAME, SEARCHED, TEXT, UtcDateTime

metadata = MetaData()
_BIG_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only for INTEGER


def _index(name: str, *columns: Any, where: str | None = None, **words: Any) -> Index:
    """An index; ``where``: of these rows alone, on both databases."""
    if where is not None:
        words |= {"postgresql_where": text(where), "sqlite_where": text(where)}
    return Index(name, *columns, **words)


class Base(SQLModel, registry=registry(metadata=metadata)):
    """Root of the engine's tables."""

    metadata: ClassVar[MetaData] = metadata


class Job(Base, table=True):
    """One row of work."""

    __tablename__ = "resilient_job"

    id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    kind: str = Field(sa_column=Column(NAME, nullable=False))
    resource_key: str = Field(sa_column=Column(KEY, nullable=False))
    payload: Any = Field(default=None, sa_column=Column(DOCUMENT))
    payload_version: int = Field(default=1, sa_column=Column(Integer, nullable=False, server_default="1"))
    state: str = Field(sa_column=Column(NAME, nullable=False))
    priority: int = Field(default=0, sa_column=Column(SmallInteger, nullable=False, server_default="0"))
    run_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    expires_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    attempts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    max_attempts: int | None = Field(default=None, sa_column=Column(Integer))  # null: no end
    executions: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    deferrals: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    rescues: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    version: int = Field(default=1, sa_column=Column(Integer, nullable=False, server_default="1"))  # the fence
    locked_by: str | None = Field(default=None, sa_column=Column(NAME))
    lease_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    started_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # of the latest execution
    unique_key: str | None = Field(default=None, sa_column=Column(NAME))
    unique_until: str | None = Field(default=None, sa_column=Column(NAME))  # "start" or "finish"
    unique_lock: str | None = Field(default=None, sa_column=Column(NAME))  # unique_key while it is held
    once_more: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    wish: Any = Field(default=None, sa_column=Column(DOCUMENT))  # what it is to be then; null: what it is
    idempotency_key: str | None = Field(default=None, sa_column=Column(NAME))  # null: derived from the id
    sent: Any = Field(default=None, sa_column=Column(DOCUMENT))  # mark of an unanswered non-idempotent request
    tags: Any = Field(default=None, sa_column=Column(SEARCHED))
    progress: Any = Field(default=None, sa_column=Column(DOCUMENT))
    result: Any = Field(default=None, sa_column=Column(DOCUMENT))
    last_error: str | None = Field(default=None, sa_column=Column(TEXT))
    last_error_kind: str | None = Field(default=None, sa_column=Column(NAME))
    last_error_code: str | None = Field(default=None, sa_column=Column(NAME))
    waiting_for: str | None = Field(default=None, sa_column=Column(KEY))  # the resource that sent it back
    cancel_requested: bool = Field(
        default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false"))
    )
    trace: Any = Field(default=None, sa_column=Column(DOCUMENT))
    ordering_key: str | None = Field(default=None, sa_column=Column(KEY))
    order_no: int | None = Field(default=None, sa_column=Column(BigInteger))  # its number, for good
    ordering_policy: str | None = Field(default=None, sa_column=Column(NAME))  # dead, it may "block" or "skip"
    waits: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))  # > 0: blocked
    followed: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    finished_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    __table_args__ = (
        _index("resilient_job_ready", "resource_key", text("priority DESC"), "run_at", "id", where="state = 'ready'"),
        _index("resilient_job_due", "run_at", "id", where="state = 'scheduled'"),
        # One index for two questions: how many run below a key, and whose lease is over.
        _index("resilient_job_running", "resource_key", "lease_until", where="state = 'running'"),
        _index("resilient_job_finished", "state", "finished_at", where="finished_at IS NOT NULL"),
        _index("resilient_job_unique", "kind", "unique_lock", unique=True, where="unique_lock IS NOT NULL"),
        _index(
            "resilient_job_elsewhere", "waiting_for", "run_at", where="state = 'scheduled' AND waiting_for IS NOT NULL"
        ),
        _index("resilient_job_expires", "expires_at", where="expires_at IS NOT NULL AND finished_at IS NULL"),
        _index("resilient_job_waiting", "id", where="state = 'blocked' AND ordering_key IS NULL"),
        _index("resilient_job_lane", "resource_key", "ordering_key", "order_no", where="state = 'blocked'"),
        _index(
            "resilient_job_tags",
            "tags",
            postgresql_using="gin",
            postgresql_ops={"tags": "jsonb_path_ops"},
            where="tags IS NOT NULL",
        ),
    )


class Order(Base, table=True):
    """One ordering key of a resource, and its head. Columns that change are unindexed (HOT)."""

    __tablename__ = "resilient_order"

    resource_key: str = Field(sa_column=Column(KEY, primary_key=True))
    ordering_key: str = Field(sa_column=Column(KEY, primary_key=True))
    last_no: int = Field(sa_column=Column(BigInteger, nullable=False))  # the number given last
    head_id: UUID | None = Field(default=None, sa_column=Column(Uuid))  # null: every job of this key is over
    seek_no: int = Field(sa_column=Column(BigInteger, nullable=False))  # no job with a smaller number is blocked
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


class Dependency(Base, table=True):
    """One job waits for another, its blocker."""

    __tablename__ = "resilient_dependency"

    job_id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    blocker_id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    on_dead: str = Field(sa_column=Column(NAME, nullable=False))  # "cancel", "wait" or "run"
    resolved: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))

    __table_args__ = (
        _index("resilient_dependency_blocker", "blocker_id"),
        _index("resilient_dependency_open", "job_id", where="NOT resolved"),
    )


class Workflow(Base, table=True):
    """Jobs that belong together, and are undone together."""

    __tablename__ = "resilient_workflow"

    id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    name: str = Field(sa_column=Column(NAME, nullable=False))
    state: str = Field(sa_column=Column(NAME, nullable=False))
    reason: str | None = Field(default=None, sa_column=Column(TEXT))  # why it turned around
    attention: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    finished_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    __table_args__ = (
        _index("resilient_workflow_attention", "id", where="attention"),
        _index("resilient_workflow_state", "state", "id"),
        _index("resilient_workflow_finished", "finished_at", where="finished_at IS NOT NULL"),
    )


class Step(Base, table=True):
    """One step of a workflow: its job, and the one that undoes it."""

    __tablename__ = "resilient_step"

    workflow_id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    name: str = Field(sa_column=Column(NAME, primary_key=True))
    no: int = Field(sa_column=Column(Integer, nullable=False))
    job_id: UUID = Field(sa_column=Column(Uuid, nullable=False))
    kind: str = Field(sa_column=Column(NAME, nullable=False))
    resource_key: str = Field(sa_column=Column(KEY, nullable=False))
    after_names: Any = Field(default=None, sa_column=Column(DOCUMENT))
    undo_kind: str | None = Field(default=None, sa_column=Column(NAME))
    undo_payload: Any = Field(default=None, sa_column=Column(DOCUMENT))
    undo_version: int | None = Field(default=None, sa_column=Column(Integer))
    undo_max_attempts: int | None = Field(default=None, sa_column=Column(Integer))
    undo_job_id: UUID | None = Field(default=None, sa_column=Column(Uuid))  # null: not begun

    __table_args__ = (
        _index("resilient_step_job", "job_id"),
        _index("resilient_step_undo", "undo_job_id", where="undo_job_id IS NOT NULL"),
    )


class Resource(Base, table=True):
    """What a job goes through: breaker, cooldown, pause and overrides of one key. Columns are unindexed (HOT)."""

    __tablename__ = "resilient_resource"

    key: str = Field(sa_column=Column(KEY, primary_key=True))
    breaker: str = Field(default="closed", sa_column=Column(NAME, nullable=False, server_default="closed"))
    generation: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    open_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    opened_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    closed_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # the ramp starts here
    reopens: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    probe_owner: str | None = Field(default=None, sa_column=Column(NAME))
    probe_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    streak: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    window_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    window: Any = Field(
        default=None, sa_column=Column(DOCUMENT)
    )  # two buckets of ok and failed, the children that reported
    blocked_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # cooldown
    blocked_since: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    blocked_code: str | None = Field(default=None, sa_column=Column(NAME))
    paused_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    paused_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # null with paused_at: no end
    paused_reason: str | None = Field(default=None, sa_column=Column(TEXT))
    auth: str = Field(default="ok", sa_column=Column(NAME, nullable=False, server_default="ok"))
    auth_since: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    revision: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))  # of the gates
    policy: Any = Field(default=None, sa_column=Column(DOCUMENT))  # runtime overrides: limits, concurrency, breaker
    learnt: Any = Field(default=None, sa_column=Column(DOCUMENT))  # what throttles taught about its limit
    last_error: str | None = Field(default=None, sa_column=Column(TEXT))
    last_error_kind: str | None = Field(default=None, sa_column=Column(NAME))
    last_error_code: str | None = Field(default=None, sa_column=Column(NAME))
    last_error_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    last_success_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


class RateLimit(Base, table=True):
    """One named limit of one resource: the state of its GCRA, and what the server last reported."""

    __tablename__ = "resilient_rate_limit"

    resource_key: str = Field(sa_column=Column(KEY, primary_key=True))
    name: str = Field(sa_column=Column(NAME, primary_key=True))
    tat: float = Field(default=0.0, sa_column=Column(Float(53), nullable=False, server_default="0"))  # epoch seconds
    remaining: float | None = Field(default=None, sa_column=Column(Float(53)))  # as the server reported it
    reset_at: float | None = Field(default=None, sa_column=Column(Float(53)))  # epoch seconds
    observed_at: float | None = Field(default=None, sa_column=Column(Float(53)))  # start of the observed request
    # The limit as it was declared at the last draw: what one unit took, and when that was. NULL: nobody declared it.
    unit_seconds: float | None = Field(default=None, sa_column=Column(Float(53)))
    drawn_at: float | None = Field(default=None, sa_column=Column(Float(53)))  # epoch seconds


class Turn(Base, table=True):
    """This resource may be served now and has ready work; with `parked_on`, it waits for that resource instead."""

    __tablename__ = "resilient_turn"

    id: int | None = Field(default=None, sa_column=Column(_BIG_ID, primary_key=True, autoincrement=True))
    resource_key: str = Field(sa_column=Column(KEY, nullable=False))
    priority: int = Field(default=0, sa_column=Column(SmallInteger, nullable=False, server_default="0"))
    parked_on: str | None = Field(default=None, sa_column=Column(KEY))
    recheck_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    __table_args__ = (
        _index("resilient_turn_order", text("priority DESC"), "id", where="parked_on IS NULL"),
        _index("resilient_turn_key", "resource_key", "id", where="parked_on IS NULL"),
        _index("resilient_turn_parked", "resource_key", unique=True, where="parked_on IS NOT NULL"),
        _index("resilient_turn_release", "parked_on", "id", where="parked_on IS NOT NULL"),
        _index("resilient_turn_recheck", "recheck_at", where="parked_on IS NOT NULL"),
        {"sqlite_autoincrement": True},  # ids must only grow (`store/gates/turns.py`); rowids are used again
    )


class Attempt(Base, table=True):
    """History: one execution that did not simply succeed."""

    __tablename__ = "resilient_attempt"

    id: int | None = Field(default=None, sa_column=Column(_BIG_ID, primary_key=True, autoincrement=True))
    job_id: UUID = Field(sa_column=Column(Uuid, nullable=False))
    execution: int = Field(sa_column=Column(Integer, nullable=False))
    worker_id: str | None = Field(default=None, sa_column=Column(NAME))
    started_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    finished_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    duration: float | None = Field(default=None, sa_column=Column(Float(53)))  # seconds
    decision: str = Field(sa_column=Column(NAME, nullable=False))  # retry, defer, snooze, dead, cancelled, rescued ...
    charged: bool = Field(sa_column=Column(Boolean, nullable=False))
    kind: str | None = Field(default=None, sa_column=Column(NAME))  # FailureKind
    code: str | None = Field(default=None, sa_column=Column(NAME))
    status: int | None = Field(default=None, sa_column=Column(Integer))
    resource_key: str | None = Field(default=None, sa_column=Column(KEY))  # the resource the failure named
    next_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    message: str | None = Field(default=None, sa_column=Column(TEXT))
    traceback: str | None = Field(default=None, sa_column=Column(TEXT))

    __table_args__ = (_index("resilient_attempt_job", "job_id"),)


class Worker(Base, table=True):
    """One worker process, by its heartbeat."""

    __tablename__ = "resilient_worker"

    id: str = Field(sa_column=Column(NAME, primary_key=True))
    host: str = Field(sa_column=Column(NAME, nullable=False))
    pid: int = Field(sa_column=Column(Integer, nullable=False))
    kinds: Any = Field(default=None, sa_column=Column(DOCUMENT))
    resources: Any = Field(default=None, sa_column=Column(DOCUMENT))  # patterns of what it serves; NULL: everything
    concurrency: int = Field(sa_column=Column(Integer, nullable=False))
    running: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    code_version: str = Field(sa_column=Column(NAME, nullable=False))
    started_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    seen_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    stopping: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    # Seconds: the longest that its event loop stood still between the last two heartbeats; NULL: it does not say.
    loop_lag: float | None = Field(default=None, sa_column=Column(Float(53)))


class Throughput(Base, table=True):
    """How many executions ended how in one minute. Each worker adds to rows of its own; older ones are put together."""

    __tablename__ = "resilient_throughput"

    # Minutes since 1970: a number, so that one statement sums up any span on both databases.
    minute: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    worker: str = Field(sa_column=Column(NAME, primary_key=True))  # "": of all workers together
    kind: str = Field(sa_column=Column(NAME, primary_key=True))
    provider: str = Field(sa_column=Column(NAME, primary_key=True))
    outcome: str = Field(sa_column=Column(NAME, primary_key=True))
    count: int = Field(sa_column=Column(BigInteger, nullable=False))


class Schedule(Base, table=True):
    """A recurring job, or a chore of the engine: the worker that moves `next_at` forward does it."""

    __tablename__ = "resilient_schedule"

    name: str = Field(sa_column=Column(NAME, primary_key=True))
    kind: str | None = Field(default=None, sa_column=Column(NAME))  # null: housekeeping
    spec: Any = Field(default=None, sa_column=Column(DOCUMENT))  # cron/every, tz, catch-up, as last declared
    next_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    accounts_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # next look at who belongs to it
    last_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    last_job: UUID | None = Field(default=None, sa_column=Column(Uuid))
    active_since: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # declared, changed or resumed
    succeeded_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # when one of its jobs last did
    paused: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    removed: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=text("false")))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))

    __table_args__ = (
        _index("resilient_schedule_due", "next_at", where="kind IS NOT NULL AND NOT paused AND NOT removed"),
    )


class ScheduleAccount(Base, table=True):
    """One account of a schedule `for_each` account: its own ticks. Written under the lock of the schedule's row."""

    __tablename__ = "resilient_schedule_account"

    schedule: str = Field(sa_column=Column(NAME, primary_key=True))
    resource_key: str = Field(sa_column=Column(KEY, primary_key=True))
    next_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    last_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    last_job: UUID | None = Field(default=None, sa_column=Column(Uuid))
    active_since: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    succeeded_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    __table_args__ = (_index("resilient_schedule_account_due", "schedule", "next_at"),)


class Alert(Base, table=True):
    """Alerts, grouped by fingerprint."""

    __tablename__ = "resilient_alert"

    fingerprint: str = Field(sa_column=Column(NAME, primary_key=True))
    name: str = Field(sa_column=Column(NAME, nullable=False))
    subject: str = Field(sa_column=Column(NAME, nullable=False))
    cause: str = Field(sa_column=Column(NAME, nullable=False))  # alerts of one cause are sent together
    detail: Any = Field(default=None, sa_column=Column(DOCUMENT))
    count: int = Field(default=1, sa_column=Column(Integer, nullable=False, server_default="1"))
    first_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    last_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    told_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    resolved_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))


class Audit(Base, table=True):
    """Somebody changed something: who, what, why, when, and what it brought (null: nobody knows)."""

    __tablename__ = "resilient_audit"
    __table_args__ = (_index("resilient_audit_erased", "at", where="action = 'erase'"),)

    id: int | None = Field(default=None, sa_column=Column(_BIG_ID, primary_key=True, autoincrement=True))
    at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    who: str = Field(sa_column=Column(TEXT, nullable=False))
    via: str = Field(sa_column=Column(TEXT, nullable=False))  # dashboard, command line, program
    action: str = Field(sa_column=Column(TEXT, nullable=False))
    subject: str = Field(sa_column=Column(TEXT, nullable=False))
    why: str | None = Field(default=None, sa_column=Column(TEXT))
    outcome: Any = Field(default=None, sa_column=Column(DOCUMENT))


class Grant(Base, table=True):
    """The credentials of one grant, encrypted, and who refreshes them. Columns that change are unindexed (HOT)."""

    __tablename__ = "resilient_grant"

    id: UUID = Field(sa_column=Column(Uuid, primary_key=True))
    provider: str = Field(sa_column=Column(KEY, nullable=False))
    kind: str = Field(sa_column=Column(NAME, nullable=False))  # oauth2, bearer, api_key, basic
    flow: str | None = Field(default=None, sa_column=Column(NAME))
    state: str = Field(default="active", sa_column=Column(NAME, nullable=False, server_default="active"))
    state_since: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    secrets: str | None = Field(default=None, sa_column=Column(TEXT))  # null: the program's own table holds them
    key_id: str | None = Field(default=None, sa_column=Column(NAME))  # what they are encrypted with
    version: int = Field(default=1, sa_column=Column(BigInteger, nullable=False, server_default="1"))  # of the secrets
    expires_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    refresh_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    fence: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))  # of the lease
    lease_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    sent_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # mark of an unanswered refresh
    failures: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))  # in a row
    retry_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    last_code: str | None = Field(default=None, sa_column=Column(NAME))
    refreshed_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    died_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # while the fuse counts it
    worked_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # when it last did, to the hour
    doubted_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # it died with too many others
    client_refused_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # when the application was
    refused_since: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # first of `refusals`
    refusals: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))  # unexplained ones
    authorised_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))  # by a person, last
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))

    __table_args__ = (_index("resilient_grant_died", "provider", "died_at", where="died_at IS NOT NULL"),)


class Connection(Base, table=True):
    """Which grant a resource uses; one grant may serve several."""

    __tablename__ = "resilient_connection"

    resource_key: str = Field(sa_column=Column(KEY, primary_key=True))
    grant_id: UUID = Field(sa_column=Column(Uuid, nullable=False))
    details: Any = Field(default=None, sa_column=Column(DOCUMENT))  # what fills the provider's placeholders
    seal: str | None = Field(default=None, sa_column=Column(TEXT))  # key, grant and details, signed by the key ring
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))

    __table_args__ = (_index("resilient_connection_grant", "grant_id"),)


class Authorization(Base, table=True):
    """Somebody was sent to a provider to grant access; used up by the callback."""

    __tablename__ = "resilient_authorization"

    id: str = Field(sa_column=Column(NAME, primary_key=True))  # SHA-256 of the state parameter
    resource_key: str = Field(sa_column=Column(KEY, nullable=False))
    secrets: str = Field(sa_column=Column(TEXT, nullable=False))  # PKCE verifier and redirect URI
    expires_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


class Cursor(Base, table=True):
    """Where one sync stream of one resource stands, saved in the transaction of each page's rows."""

    __tablename__ = "resilient_cursor"

    resource_key: str = Field(sa_column=Column(KEY, primary_key=True))
    stream: str = Field(sa_column=Column(KEY, primary_key=True))
    part: str = Field(sa_column=Column(KEY, primary_key=True))  # the stream's parameters, as text
    version: int = Field(default=1, sa_column=Column(BigInteger, nullable=False, server_default="1"))
    pass_id: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    is_full: bool = Field(default=True, sa_column=Column(Boolean, nullable=False, server_default=text("true")))
    full_pass: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    swept_pass: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    position: Any = Field(default=None, sa_column=Column(DOCUMENT))  # of `core.sync.stream.Cursor`
    pages: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))  # of this pass
    records: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    rejected: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    full_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    completed_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    error: str | None = Field(default=None, sa_column=Column(TEXT))  # why it began anew
    expected: float | None = Field(default=None, sa_column=Column(Float(53)))  # seconds within which a pass shall end
    job_id: UUID | None = Field(default=None, sa_column=Column(Uuid))  # of the job that moved it last
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


class Inbox(Base, table=True):
    """A message that a consumer took, in the transaction of what it did with it."""

    __tablename__ = "resilient_inbox"

    consumer: str = Field(sa_column=Column(KEY, primary_key=True))
    message_id: str = Field(sa_column=Column(KEY, primary_key=True))
    seen_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))

    __table_args__ = (_index("resilient_inbox_seen", "seen_at"),)


class InboxKey(Base, table=True):
    """The highest number of an ordering key that a consumer took."""

    __tablename__ = "resilient_inbox_key"

    consumer: str = Field(sa_column=Column(KEY, primary_key=True))
    ordering_key: str = Field(sa_column=Column(KEY, primary_key=True))
    number: int = Field(sa_column=Column(BigInteger, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))  # to the hour, so that updates are HOT

    __table_args__ = (_index("resilient_inbox_key_old", "updated_at"),)
