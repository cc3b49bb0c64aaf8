"""Patience: how long the engine waits for rows that somebody else holds.

A program's transaction may hold a job, a lane or a workflow for as long as it likes (`jobs.cancel(session=)`, say).
Whoever works for many at once, a claim or a batch of results, waits for `PATIENCE`, and then goes on without what is
held (`engine/dispatcher.py`, `engine/completer.py`). SQLite has one writer and no rows to hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from resilient.store.dialect import ID
from resilient.store.direct import direct

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

PATIENCE: Final = "1s"
SHORT: Final = "100ms"  # where it is known that somebody holds something
_HELD_UP: Final = "55P03"


def was_held_up(error: BaseException) -> bool:
    """Whether a transaction gave up waiting for a lock: it did nothing, and is to be made again carefully."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == _HELD_UP


def limit(c: Connection, d: Dialect, how_long: str) -> None:
    """This transaction of our own waits no longer than so for each lock; see also `Dialect.steer`."""
    if d.is_postgresql:
        d.run(c, f"SELECT set_config('lock_timeout', '{how_long}', true)")


@direct
def held(c: Connection, d: Dialect, ids: Sequence[UUID]) -> set[UUID]:
    """Those of these jobs that somebody holds at the moment: one statement, which waits for nobody."""
    rows = d.run(
        c,
        "WITH free AS MATERIALIZED"
        f" (SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} ORDER BY id {{leaf_lock}})"
        f" SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} AND id NOT IN (SELECT id FROM free)",
        {"ids": d.pack_ids(ids)},
        id=ID,
    )
    return {r[0] for r in rows}
