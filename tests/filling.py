"""Rows that are nobody's business, so that PostgreSQL plans as it does on a database in use.

What stands there breaks no invariant and never comes into anybody's way: jobs that are over or far ahead, jobs that
wait for those, paused resources with their parked turns, workflows that ended, empty lanes, alerts that are closed.
All keys begin with ``filler``. Times stand around the test clock's (`conftest.FakeClock`).
"""

from __future__ import annotations

import psycopg

SIZES = {"empty": 0, "small": 40, "large": 6_000}
_PAST, _FAR = "timestamptz '2030-01-01 11:59:00+00'", "timestamptz '2099-01-01 00:00:00+00'"
_SERIES = "generate_series(1, %(n)s) AS n"


def _id(what: str) -> str:
    """The id of the n-th row of a kind: many tables name it."""
    return f"md5('{what}' || n)::uuid"


def _jobs(what: str, state: str, key: str, **over: str) -> str:
    row = {
        "id": _id(what), "kind": "'filler'", "resource_key": key, "payload": "'null'", "state": f"'{state}'",
        "run_at": _PAST, "created_at": _PAST, "updated_at": _PAST, "version": "3",
    } | over  # fmt: skip
    return f"INSERT INTO resilient_job ({', '.join(row)}) SELECT {', '.join(row.values())} FROM {_SERIES}"


_KEY = "'filler/' || n"
_STATEMENTS = (
    _jobs("done", "succeeded", _KEY, finished_at=_PAST, executions="1"),
    _jobs("step", "succeeded", _KEY, finished_at=_PAST, executions="1", followed="true"),
    _jobs("ready", "ready", _KEY),
    _jobs("ahead", "scheduled", _KEY, run_at=_FAR, followed="true"),
    _jobs("waits", "blocked", _KEY, waits="1", followed="true"),
    _jobs("head", "scheduled", _KEY, run_at=_FAR, ordering_key="'o'", ordering_policy="'block'", order_no="1"),
    _jobs("next", "blocked", _KEY, waits="1", ordering_key="'o'", ordering_policy="'block'", order_no="2"),
    f"INSERT INTO resilient_dependency SELECT {_id('waits')}, {_id('ahead')}, 'cancel', true FROM {_SERIES}",
    f"INSERT INTO resilient_order SELECT {_KEY}, 'o', 2, {_id('head')}, 1, {_PAST} FROM {_SERIES}",
    f"INSERT INTO resilient_order SELECT {_KEY}, 'e', 2, NULL, 3, {_PAST} FROM {_SERIES}",
    (
        "INSERT INTO resilient_resource (key, created_at, updated_at, paused_at)"
        f" SELECT {_KEY}, {_PAST}, {_PAST}, {_PAST} FROM {_SERIES}"
    ),
    f"INSERT INTO resilient_turn (resource_key, parked_on, recheck_at) SELECT {_KEY}, {_KEY}, {_FAR} FROM {_SERIES}",
    f"INSERT INTO resilient_rate_limit (resource_key, name) SELECT {_KEY}, 'm' FROM {_SERIES}",
    (
        "INSERT INTO resilient_workflow (id, name, state, created_at, updated_at, finished_at)"
        f" SELECT {_id('workflow')}, 'filler', 'succeeded', {_PAST}, {_PAST}, {_PAST} FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_step (workflow_id, name, no, job_id, kind, resource_key)"
        f" SELECT {_id('workflow')}, 's0', 0, {_id('step')}, 'filler', {_KEY} FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_attempt (job_id, execution, started_at, finished_at, decision, charged)"
        f" SELECT {_id('done')}, 1, {_PAST}, {_PAST}, 'retry', true FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_alert (fingerprint, name, subject, cause, first_at, last_at, told_at, resolved_at)"
        f" SELECT 'filler' || n, 'filler', {_KEY}, 'filler', {_PAST}, {_PAST}, {_PAST}, {_PAST} FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_grant (id, provider, kind, state_since, created_at, updated_at)"
        f" SELECT {_id('grant')}, 'filler', 'bearer', {_PAST}, {_PAST}, {_PAST} FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_connection (resource_key, grant_id, created_at, updated_at)"
        f" SELECT {_KEY}, {_id('grant')}, {_PAST}, {_PAST} FROM {_SERIES}"
    ),
    (
        "INSERT INTO resilient_schedule (name, kind, spec, next_at, updated_at, paused)"
        f" SELECT 'filler' || n, 'filler', 'null', {_FAR}, {_PAST}, true FROM generate_series(1, %(n)s / 20) AS n"
    ),
    f"INSERT INTO resilient_inbox SELECT 'filler', 'm' || n, {_PAST} FROM {_SERIES}",
    f"INSERT INTO resilient_inbox_key SELECT 'filler', 'k' || n, n, {_PAST} FROM {_SERIES}",
)


def fill(connection: psycopg.Connection, n: int) -> None:
    """``n`` rows of each kind, and statistics of them; 0: nothing, and no statistics."""
    if n:
        for statement in _STATEMENTS:
            connection.execute(statement.encode(), {"n": n})
        connection.execute("VACUUM ANALYZE")
