"""The bare limit of a PostgreSQL database: the least code that could pass for a durable queue.

One table with one partial index, psycopg 3, prepared statements, autocommit; two connections in a worker,
so that one batch commits while the other is claimed. No states but a number, no limits, no retries: nothing
real can be faster.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg

from resilient.surface.bench.crew import BenchFailed
from resilient.surface.loop import run

if TYPE_CHECKING:
    from resilient.surface.bench.crew import Start
    from resilient.surface.scratch import Scratch

_TABLE: Final = """
CREATE TABLE floor_job (
    id bigserial PRIMARY KEY, resource_key text NOT NULL, payload jsonb, status smallint NOT NULL DEFAULT 0,
    run_at timestamptz NOT NULL DEFAULT now(), locked_at timestamptz, done_at timestamptz
);
CREATE INDEX floor_job_ready ON floor_job (run_at, id) WHERE status = 0;
"""
_CLAIM: Final = """
WITH c AS (
    SELECT id FROM floor_job WHERE status = 0 AND run_at <= now()
    ORDER BY run_at, id LIMIT %s FOR UPDATE SKIP LOCKED
)
UPDATE floor_job j SET status = 1, locked_at = now() FROM c WHERE j.id = c.id
RETURNING j.id, j.resource_key, j.payload
"""
_COMPLETE: Final = "UPDATE floor_job SET status = 2, done_at = now() WHERE id = ANY(%s) AND status = 1"
_INSERT: Final = "INSERT INTO floor_job (resource_key, payload) VALUES (%s, %s)"
_BATCH: Final = 100
_CONNECTIONS: Final = 2


def connect(place: Scratch) -> psycopg.Connection:
    """An autocommit connection that sees only the scratch schema."""
    return psycopg.connect(place.conninfo, autocommit=True, options=f"-c search_path={place.schema}")


def create(place: Scratch) -> None:
    """Make the table."""
    with connect(place) as c:
        c.execute(_TABLE)


def fill(place: Scratch, jobs: int, resources: int) -> float:
    """Insert ``jobs`` in one COPY; the seconds it took. Settling it is outside the clock."""
    with connect(place) as c:
        began = time.perf_counter()
        with c.cursor().copy("COPY floor_job (resource_key, payload) FROM STDIN") as copy:
            for n in range(jobs):
                copy.write_row((f"bench/{n % resources}", '{"n": 1}'))
        seconds = time.perf_counter() - began
        settle(c, "floor_job")
    return seconds


def settle(c: psycopg.Connection, *tables: LiteralString) -> None:
    """Vacuum, and write out what filling left behind: else its checkpoint falls into what is measured."""
    for table in tables:
        c.execute("VACUUM ANALYZE " + table)
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
        c.execute("CHECKPOINT")


def drain(start: Start, place: Scratch) -> dict[str, Any]:
    """Claim 100, complete 100, until nothing is left (a task of `run_crew`)."""
    connections = [connect(place) for _ in range(_CONNECTIONS)]
    done = [0] * _CONNECTIONS

    def loop(n: int) -> None:
        c = connections[n]
        while ids := [row[0] for row in c.execute(_CLAIM, (_BATCH,), prepare=True)]:
            c.execute(_COMPLETE, ("{" + ",".join(map(str, ids)) + "}",), prepare=True)
            done[n] += len(ids)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(_CONNECTIONS)]
    start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for c in connections:
        c.close()
    return {"done": sum(done)}


def single(place: Scratch, jobs: int) -> list[float]:
    """Insert and commit one row at a time on one connection: the seconds of each."""
    took = []
    with connect(place) as c:
        for n in range(jobs):
            began = time.perf_counter()
            c.execute(_INSERT, (f"bench/{n}", '{"n": 1}'), prepare=True)
            took.append(time.perf_counter() - began)
        _empty(c)
    return took


def single_async(place: Scratch, jobs: int) -> list[float]:
    """The same with the asynchronous driver."""
    return run(_single_async(place, jobs))


async def _single_async(place: Scratch, jobs: int) -> list[float]:
    took = []
    options = f"-c search_path={place.schema}"
    async with await psycopg.AsyncConnection.connect(place.conninfo, autocommit=True, options=options) as c:
        for n in range(jobs):
            began = time.perf_counter()
            await c.execute(_INSERT, (f"bench/{n}", '{"n": 1}'), prepare=True)
            took.append(time.perf_counter() - began)
        await c.execute("TRUNCATE floor_job")
    return took


def pickup(place: Scratch, jobs: int) -> list[float]:
    """LISTEN, claim one, on an idle connection: seconds from the committed insert to the claimed row."""
    claimed: list[float] = []
    ready, receipt = threading.Event(), threading.Event()

    def listen() -> None:
        with connect(place) as listener, connect(place) as c:
            listener.execute("LISTEN floor")
            ready.set()
            for _ in listener.notifies(timeout=30):
                if c.execute(_CLAIM, (1,), prepare=True).fetchall():
                    claimed.append(time.perf_counter())
                    receipt.set()
                    if len(claimed) == jobs:
                        return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    ready.wait(10)
    committed = []
    with connect(place) as c:
        for n in range(jobs):
            committed.append(_insert_and_notify(c, n))
            if not receipt.wait(10):
                raise BenchFailed("a notified worker did not wake up within 10 s")
            receipt.clear()
            time.sleep(0.01)  # idle between two jobs
        listener.join(10)
        _empty(c)
    return [after - before for before, after in zip(committed, claimed, strict=True)]


def _insert_and_notify(c: psycopg.Connection, n: int) -> float:
    c.execute(_INSERT, (f"bench/{n}", '{"n": 1}'), prepare=True)
    committed = time.perf_counter()
    c.execute("NOTIFY floor", prepare=True)
    return committed


def _empty(c: psycopg.Connection) -> None:
    statement: LiteralString = "TRUNCATE floor_job"
    c.execute(statement)
