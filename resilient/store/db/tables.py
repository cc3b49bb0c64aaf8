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

from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, SmallInteger, Table, Uuid, text

from resilient.store.db.types import DOCUMENT, KEY, NAME, SEARCHED, TEXT, UtcDateTime

metadata = MetaData()
_BIG_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only for INTEGER


def _index(name: str, *columns: Any, where: str | None = None, **words: Any) -> Index:
    """An index; ``where``: of these rows alone, on both databases."""
    if where is not None:
        words |= {"postgresql_where": text(where), "sqlite_where": text(where)}
    return Index(name, *columns, **words)


# One row of work.
Job: Final = Table(
    "resilient_job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("kind", NAME, nullable=False),
    Column("resource_key", KEY, nullable=False),
    Column("payload", DOCUMENT),
    Column("payload_version", Integer, nullable=False, server_default="1"),
    Column("state", NAME, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    Column("run_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer),  # null: no end
    Column("executions", Integer, nullable=False, server_default="0"),
    Column("deferrals", Integer, nullable=False, server_default="0"),
    Column("rescues", Integer, nullable=False, server_default="0"),
    Column("version", Integer, nullable=False, server_default="1"),  # the fence
    Column("locked_by", NAME),
    Column("lease_until", UtcDateTime),
    Column("started_at", UtcDateTime),  # of the latest execution
    Column("unique_key", NAME),
    Column("unique_until", NAME),  # "start" or "finish"
    Column("unique_lock", NAME),  # unique_key while it is held
    Column("once_more", Boolean, nullable=False, server_default=text("false")),
    Column("idempotency_key", NAME),  # null: derived from the id
    Column("sent", DOCUMENT),  # mark of an unanswered non-idempotent request
    Column("tags", SEARCHED),
    Column("progress", DOCUMENT),
    Column("result", DOCUMENT),
    Column("last_error", TEXT),
    Column("last_error_kind", NAME),
    Column("last_error_code", NAME),
    Column("waiting_for", KEY),  # the resource that sent it back
    Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
    Column("trace", DOCUMENT),
    Column("ordering_key", KEY),
    Column("order_no", BigInteger),  # its number, for good
    Column("ordering_policy", NAME),  # dead, it may "block" or "skip"
    Column("waits", Integer, nullable=False, server_default="0"),  # > 0: blocked
    Column("followed", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    _index("resilient_job_ready", "resource_key", text("priority DESC"), "run_at", "id", where="state = 'ready'"),
    _index("resilient_job_due", "run_at", "id", where="state = 'scheduled'"),
    # One index for two questions: how many run below a key, and whose lease is over.
    _index("resilient_job_running", "resource_key", "lease_until", where="state = 'running'"),
    _index("resilient_job_finished", "state", "finished_at", where="finished_at IS NOT NULL"),
    _index("resilient_job_unique", "kind", "unique_lock", unique=True, where="unique_lock IS NOT NULL"),
    _index("resilient_job_elsewhere", "waiting_for", "run_at", where="state = 'scheduled' AND waiting_for IS NOT NULL"),
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

# One ordering key of a resource, and its head. Columns that change are unindexed (HOT).
Order: Final = Table(
    "resilient_order",
    metadata,
    Column("resource_key", KEY, primary_key=True),
    Column("ordering_key", KEY, primary_key=True),
    Column("last_no", BigInteger, nullable=False),  # the number given last
    Column("head_id", Uuid),  # null: every job of this key is over
    Column("seek_no", BigInteger, nullable=False),  # no job with a smaller number is blocked
    Column("updated_at", UtcDateTime, nullable=False),
)

# One job waits for another, its blocker.
Dependency: Final = Table(
    "resilient_dependency",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("blocker_id", Uuid, primary_key=True),
    Column("on_dead", NAME, nullable=False),  # "cancel", "wait" or "run"
    Column("resolved", Boolean, nullable=False, server_default=text("false")),
    _index("resilient_dependency_blocker", "blocker_id"),
    _index("resilient_dependency_open", "job_id", where="NOT resolved"),
)

# Jobs that belong together, and are undone together.
Workflow: Final = Table(
    "resilient_workflow",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", NAME, nullable=False),
    Column("state", NAME, nullable=False),
    Column("reason", TEXT),  # why it turned around
    Column("attention", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    _index("resilient_workflow_attention", "id", where="attention"),
    _index("resilient_workflow_state", "state", "id"),
    _index("resilient_workflow_finished", "finished_at", where="finished_at IS NOT NULL"),
)

# One step of a workflow: its job, and the one that undoes it.
Step: Final = Table(
    "resilient_step",
    metadata,
    Column("workflow_id", Uuid, primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("no", Integer, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("kind", NAME, nullable=False),
    Column("resource_key", KEY, nullable=False),
    Column("after_names", DOCUMENT),
    Column("undo_kind", NAME),
    Column("undo_payload", DOCUMENT),
    Column("undo_version", Integer),
    Column("undo_max_attempts", Integer),
    Column("undo_job_id", Uuid),  # null: not begun
    _index("resilient_step_job", "job_id"),
    _index("resilient_step_undo", "undo_job_id", where="undo_job_id IS NOT NULL"),
)

# What a job goes through: breaker, cooldown, pause and overrides of one key. Columns are unindexed (HOT).
Resource: Final = Table(
    "resilient_resource",
    metadata,
    Column("key", KEY, primary_key=True),
    Column("breaker", NAME, nullable=False, server_default="closed"),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    Column("open_until", UtcDateTime),
    Column("opened_at", UtcDateTime),
    Column("closed_at", UtcDateTime),  # the ramp starts here
    Column("reopens", Integer, nullable=False, server_default="0"),
    Column("probe_owner", NAME),
    Column("probe_until", UtcDateTime),
    Column("streak", Integer, nullable=False, server_default="0"),
    Column("window_at", UtcDateTime),
    Column("window", DOCUMENT),  # two buckets of ok and failed, the children that reported
    Column("blocked_until", UtcDateTime),  # cooldown
    Column("blocked_since", UtcDateTime),
    Column("blocked_code", NAME),
    Column("paused_at", UtcDateTime),
    Column("paused_until", UtcDateTime),  # null with paused_at: no end
    Column("paused_reason", TEXT),
    Column("auth", NAME, nullable=False, server_default="ok"),
    Column("auth_since", UtcDateTime),
    Column("revision", BigInteger, nullable=False, server_default="0"),  # of the gates
    Column("policy", DOCUMENT),  # runtime overrides: limits, concurrency, breaker
    Column("learnt", DOCUMENT),  # what throttles taught about its limit
    Column("last_error", TEXT),
    Column("last_error_kind", NAME),
    Column("last_error_code", NAME),
    Column("last_error_at", UtcDateTime),
    Column("last_success_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# One named limit of one resource: the state of its GCRA, and what the server last reported.
RateLimit: Final = Table(
    "resilient_rate_limit",
    metadata,
    Column("resource_key", KEY, primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("tat", Float(53), nullable=False, server_default="0"),  # epoch seconds
    Column("remaining", Float(53)),  # as the server reported it
    Column("reset_at", Float(53)),  # epoch seconds
    Column("observed_at", Float(53)),  # start of the observed request
)

# This resource may be served now and has ready work; with `parked_on`, it waits for that resource instead.
Turn: Final = Table(
    "resilient_turn",
    metadata,
    Column("id", _BIG_ID, primary_key=True, autoincrement=True),
    Column("resource_key", KEY, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    Column("parked_on", KEY),
    Column("recheck_at", UtcDateTime),
    _index("resilient_turn_order", text("priority DESC"), "id", where="parked_on IS NULL"),
    _index("resilient_turn_key", "resource_key", "id", where="parked_on IS NULL"),
    _index("resilient_turn_parked", "resource_key", unique=True, where="parked_on IS NOT NULL"),
    _index("resilient_turn_release", "parked_on", "id", where="parked_on IS NOT NULL"),
    _index("resilient_turn_recheck", "recheck_at", where="parked_on IS NOT NULL"),
    sqlite_autoincrement=True,  # ids must only grow (`store/gates/turns.py`); rowids are used again
)

# History: one execution that did not simply succeed.
Attempt: Final = Table(
    "resilient_attempt",
    metadata,
    Column("id", _BIG_ID, primary_key=True, autoincrement=True),
    Column("job_id", Uuid, nullable=False),
    Column("execution", Integer, nullable=False),
    Column("worker_id", NAME),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime, nullable=False),
    Column("duration", Float(53)),  # seconds
    Column("decision", NAME, nullable=False),  # retry, defer, snooze, dead, cancelled, rescued ...
    Column("charged", Boolean, nullable=False),
    Column("kind", NAME),  # FailureKind
    Column("code", NAME),
    Column("status", Integer),
    Column("resource_key", KEY),  # the resource the failure named
    Column("next_at", UtcDateTime),
    Column("message", TEXT),
    Column("traceback", TEXT),
    _index("resilient_attempt_job", "job_id"),
)

# One worker process, by its heartbeat.
Worker: Final = Table(
    "resilient_worker",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("host", NAME, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("kinds", DOCUMENT),
    Column("resources", DOCUMENT),  # patterns of what it serves; NULL: everything
    Column("concurrency", Integer, nullable=False),
    Column("running", Integer, nullable=False, server_default="0"),
    Column("code_version", NAME, nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("seen_at", UtcDateTime, nullable=False),
    Column("stopping", Boolean, nullable=False, server_default=text("false")),
)

# How many executions ended how in one minute. Each worker adds to rows of its own; older ones are put together.
Throughput: Final = Table(
    "resilient_throughput",
    metadata,
    # Minutes since 1970: a number, so that one statement sums up any span on both databases.
    Column("minute", BigInteger, primary_key=True, autoincrement=False),
    Column("worker", NAME, primary_key=True),  # "": of all workers together
    Column("kind", NAME, primary_key=True),
    Column("provider", NAME, primary_key=True),
    Column("outcome", NAME, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

# A recurring job, or a chore of the engine: the worker that moves `next_at` forward does it.
Schedule: Final = Table(
    "resilient_schedule",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("kind", NAME),  # null: housekeeping
    Column("spec", DOCUMENT),  # cron/every, tz, catch-up, as last declared
    Column("next_at", UtcDateTime, nullable=False),
    Column("accounts_at", UtcDateTime),  # next look at who belongs to it
    Column("last_at", UtcDateTime),
    Column("last_job", Uuid),
    Column("active_since", UtcDateTime),  # declared, changed or resumed
    Column("succeeded_at", UtcDateTime),  # when one of its jobs last did
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("removed", Boolean, nullable=False, server_default=text("false")),
    Column("updated_at", UtcDateTime, nullable=False),
    _index("resilient_schedule_due", "next_at", where="kind IS NOT NULL AND NOT paused AND NOT removed"),
)

# One account of a schedule `for_each` account: its own ticks. Written under the lock of the schedule's row.
ScheduleAccount: Final = Table(
    "resilient_schedule_account",
    metadata,
    Column("schedule", NAME, primary_key=True),
    Column("resource_key", KEY, primary_key=True),
    Column("next_at", UtcDateTime, nullable=False),
    Column("last_at", UtcDateTime),
    Column("last_job", Uuid),
    Column("active_since", UtcDateTime, nullable=False),
    Column("succeeded_at", UtcDateTime),
    _index("resilient_schedule_account_due", "schedule", "next_at"),
)

# Alerts, grouped by fingerprint.
Alert: Final = Table(
    "resilient_alert",
    metadata,
    Column("fingerprint", NAME, primary_key=True),
    Column("name", NAME, nullable=False),
    Column("subject", NAME, nullable=False),
    Column("cause", NAME, nullable=False),  # alerts of one cause are sent together
    Column("detail", DOCUMENT),
    Column("count", Integer, nullable=False, server_default="1"),
    Column("first_at", UtcDateTime, nullable=False),
    Column("last_at", UtcDateTime, nullable=False),
    Column("told_at", UtcDateTime),
    Column("resolved_at", UtcDateTime),
)

# Somebody changed something: who, what, why, when, and what it brought (null: nobody knows).
Audit: Final = Table(
    "resilient_audit",
    metadata,
    Column("id", _BIG_ID, primary_key=True, autoincrement=True),
    Column("at", UtcDateTime, nullable=False),
    Column("who", TEXT, nullable=False),
    Column("via", TEXT, nullable=False),  # dashboard, command line, program
    Column("action", TEXT, nullable=False),
    Column("subject", TEXT, nullable=False),
    Column("why", TEXT),
    Column("outcome", DOCUMENT),
)

# The credentials of one grant, encrypted, and who refreshes them. Columns that change are unindexed (HOT).
Grant: Final = Table(
    "resilient_grant",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("provider", KEY, nullable=False),
    Column("kind", NAME, nullable=False),  # oauth2, bearer, api_key, basic
    Column("flow", NAME),
    Column("state", NAME, nullable=False, server_default="active"),
    Column("state_since", UtcDateTime, nullable=False),
    Column("secrets", TEXT),  # null: the program's own table holds them
    Column("key_id", NAME),  # what they are encrypted with
    Column("version", BigInteger, nullable=False, server_default="1"),  # of the secrets
    Column("expires_at", UtcDateTime),
    Column("refresh_at", UtcDateTime),
    Column("fence", BigInteger, nullable=False, server_default="0"),  # of the lease
    Column("lease_until", UtcDateTime),
    Column("sent_at", UtcDateTime),  # mark of an unanswered refresh
    Column("failures", Integer, nullable=False, server_default="0"),  # in a row
    Column("retry_at", UtcDateTime),
    Column("last_code", NAME),
    Column("refreshed_at", UtcDateTime),
    Column("died_at", UtcDateTime),  # while the fuse counts it
    Column("worked_at", UtcDateTime),  # when it last did, to the hour
    Column("doubted_at", UtcDateTime),  # it died with too many others
    Column("client_refused_at", UtcDateTime),  # when the application was
    Column("refused_since", UtcDateTime),  # first of `refusals`
    Column("refusals", Integer, nullable=False, server_default="0"),  # unexplained ones
    Column("authorised_at", UtcDateTime),  # by a person, last
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    _index("resilient_grant_died", "provider", "died_at", where="died_at IS NOT NULL"),
)

# Which grant a resource uses; one grant may serve several.
Connection: Final = Table(
    "resilient_connection",
    metadata,
    Column("resource_key", KEY, primary_key=True),
    Column("grant_id", Uuid, nullable=False),
    Column("details", DOCUMENT),  # what fills the provider's placeholders
    Column("seal", TEXT),  # key, grant and details, signed by the key ring
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    _index("resilient_connection_grant", "grant_id"),
)

# Somebody was sent to a provider to grant access; used up by the callback.
Authorization: Final = Table(
    "resilient_authorization",
    metadata,
    Column("id", NAME, primary_key=True),  # SHA-256 of the state parameter
    Column("resource_key", KEY, nullable=False),
    Column("secrets", TEXT, nullable=False),  # PKCE verifier and redirect URI
    Column("expires_at", UtcDateTime, nullable=False),
)

# Where one sync stream of one resource stands, saved in the transaction of each page's rows.
Cursor: Final = Table(
    "resilient_cursor",
    metadata,
    Column("resource_key", KEY, primary_key=True),
    Column("stream", KEY, primary_key=True),
    Column("part", KEY, primary_key=True),  # the stream's parameters, as text
    Column("version", BigInteger, nullable=False, server_default="1"),
    Column("pass_id", BigInteger, nullable=False, server_default="0"),
    Column("is_full", Boolean, nullable=False, server_default=text("true")),
    Column("full_pass", BigInteger, nullable=False, server_default="0"),
    Column("swept_pass", BigInteger, nullable=False, server_default="0"),
    Column("position", DOCUMENT),  # of `core.sync.stream.Cursor`
    Column("pages", BigInteger, nullable=False, server_default="0"),  # of this pass
    Column("records", BigInteger, nullable=False, server_default="0"),
    Column("rejected", BigInteger, nullable=False, server_default="0"),
    Column("full_at", UtcDateTime),
    Column("completed_at", UtcDateTime),
    Column("error", TEXT),  # why it began anew
    Column("expected", Float(53)),  # seconds within which a pass shall end
    Column("job_id", Uuid),  # of the job that moved it last
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# A message that a consumer took, in the transaction of what it did with it.
Inbox: Final = Table(
    "resilient_inbox",
    metadata,
    Column("consumer", KEY, primary_key=True),
    Column("message_id", KEY, primary_key=True),
    Column("seen_at", UtcDateTime, nullable=False),
    _index("resilient_inbox_seen", "seen_at"),
)

# The highest number of an ordering key that a consumer took.
InboxKey: Final = Table(
    "resilient_inbox_key",
    metadata,
    Column("consumer", KEY, primary_key=True),
    Column("ordering_key", KEY, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),  # to the hour, so that updates are HOT
    _index("resilient_inbox_key_old", "updated_at"),
)
