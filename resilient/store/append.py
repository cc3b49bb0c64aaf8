"""One job at the end of its lane, in one statement: what publishing an event costs a business transaction.

PostgreSQL only, with its own clock. Everything else takes the general way (`order.draw`, then `jobs.insert`), which
says the same in two statements for any number of jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect
    from resilient.store.jobs import NewJob

_APPEND: Final = (
    "WITH lane AS (INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
    " VALUES (:key, :ordering_key, 1, CAST(:id AS uuid), 1, clock_timestamp())"
    " ON CONFLICT (resource_key, ordering_key) DO UPDATE SET last_no = {order}.last_no + 1,"
    " head_id = coalesce({order}.head_id, excluded.head_id), updated_at = excluded.updated_at"
    " RETURNING last_no, head_id = CAST(:id AS uuid) AS is_head),"
    " new AS (INSERT INTO {job} (id, kind, resource_key, payload, payload_version, state, waits, followed, priority,"
    " run_at, max_attempts, idempotency_key, tags, trace, ordering_key, ordering_policy, order_no, created_at,"
    " updated_at) SELECT CAST(:id AS uuid), :kind, :key, CAST(:payload AS json), CAST(:version AS int),"
    " CASE WHEN is_head THEN 'ready' ELSE 'blocked' END, CASE WHEN is_head THEN 0 ELSE 1 END, false, 0,"
    " clock_timestamp(), CAST(:max_attempts AS int), :idempotency_key, CAST(:tags AS jsonb), CAST(:trace AS json),"
    " :ordering_key, :ordering_policy, last_no, clock_timestamp(), clock_timestamp() FROM lane)"
    " INSERT INTO {turn} (resource_key, priority) SELECT :key, 0 FROM lane WHERE is_head"
)


def fits(d: Dialect, j: NewJob) -> bool:
    """Whether `append` can write it."""
    return (
        d.is_postgresql
        and d.clock is None
        and j.ordering_key is not None
        and j.unique_key is None
        and not j.waits
        and not j.priority
        and j.at_any_time
    )


def append(c: Connection, d: Dialect, j: NewJob) -> None:
    """Number it, insert it, and say so to the workers if it is its turn. Holds its lane until the commit."""
    d.run(
        c,
        _APPEND,
        {
            "id": j.id.hex, "kind": j.kind, "key": j.resource_key, "payload": j.payload, "version": j.payload_version,
            "max_attempts": j.max_attempts, "idempotency_key": j.idempotency_key, "tags": j.tags, "trace": j.trace,
            "ordering_key": j.ordering_key, "ordering_policy": j.ordering_policy,
        },
    )  # fmt: skip
