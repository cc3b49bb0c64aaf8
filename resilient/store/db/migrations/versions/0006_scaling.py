"""A view for autoscalers: how many jobs could run now, by provider and kind.

PostgreSQL only: a SQLite file has no autoscaler. It looks at no more than 1,000 accounts that may be served, 1,000
whose wait is over, 100 jobs of each, and 10,000 jobs that have come due, whatever else there is; beyond that it counts
less than there is, which is enough to start workers. It says `now()`, because no index is searched by
`clock_timestamp()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0006"
down_revision = "0005"

SHUT: Final = """(r.auth <> 'ok' OR r.blocked_until > now()
    OR (r.paused_at IS NOT NULL AND (r.paused_until IS NULL OR r.paused_until > now()))
    OR (r.breaker = 'isolated' AND (r.open_until IS NULL OR r.open_until > now()))
    OR (r.breaker = 'open' AND r.open_until > now()))"""
VIEW: Final = """
CREATE VIEW {schema}resilient_scaling AS
WITH served AS MATERIALIZED (
    (SELECT resource_key FROM {schema}resilient_turn WHERE parked_on IS NULL ORDER BY priority DESC, id LIMIT 1000)
    UNION
    (SELECT resource_key FROM {schema}resilient_turn WHERE parked_on IS NOT NULL AND recheck_at <= now()
     ORDER BY recheck_at LIMIT 1000)
), open_keys AS MATERIALIZED (
    SELECT s.resource_key FROM served s WHERE NOT EXISTS (
        SELECT 1 FROM {schema}resilient_resource r
        WHERE r.key = ANY (ARRAY[
            split_part(s.resource_key, '/', 1),
            split_part(s.resource_key, '/', 1) || '/' || split_part(s.resource_key, '/', 2),
            split_part(s.resource_key, '/', 1) || '/' || split_part(s.resource_key, '/', 2) || '/'
                || split_part(s.resource_key, '/', 3),
            s.resource_key])
        AND {shut}
    )
), runnable AS (
    SELECT j.resource_key, j.kind, j.run_at FROM open_keys k CROSS JOIN LATERAL (
        SELECT resource_key, kind, run_at FROM {schema}resilient_job
        WHERE state = 'ready' AND resource_key = k.resource_key ORDER BY priority DESC, run_at, id LIMIT 100) j
    UNION ALL
    SELECT due.resource_key, due.kind, due.run_at FROM (
        SELECT resource_key, kind, run_at, waiting_for FROM {schema}resilient_job
        WHERE state = 'scheduled' AND run_at <= now() ORDER BY run_at, id LIMIT 10000) due
    WHERE due.waiting_for IS NULL
    OR NOT EXISTS (SELECT 1 FROM {schema}resilient_resource r WHERE r.key = due.waiting_for AND {shut})
)
SELECT CAST(split_part(resource_key, '/', 1) AS text) COLLATE "C" AS provider, CAST(kind AS text) AS kind,
    count(*) AS runnable, min(run_at) AS oldest_at
FROM runnable GROUP BY 1, 2
"""


def upgrade(op: Operations) -> None:
    """Make it."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(VIEW.format(schema=_prefix(op), shut=SHUT))


def downgrade(op: Operations) -> None:
    """Drop it."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"DROP VIEW {_prefix(op)}resilient_scaling")


def _prefix(op: Operations) -> str:
    schema = op.get_context().opts["version_table_schema"]
    return f'"{schema}".' if schema else ""
