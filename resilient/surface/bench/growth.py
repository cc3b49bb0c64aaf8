"""``bench growth``: what a job costs with more workers, more resources, and more finished jobs that are kept.

``resources`` are those that had jobs before, ``new_resources`` those that nobody has used yet. A figure is the CPU time
of a job, of workers and server together, divided by that of the first case of its row: 1.0 is flat. From 1.1 on the
statement is named whose seconds a job grew most: the seconds of a round, from sending to the answer, count for its last
statement before the commit. Sixteen workers need a server that takes 200 connections.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db.pipeline import Line
from resilient.store.gates import resources
from resilient.surface.bench.crew import ROOT, Load, Server, account, build, noop, run_measured, work
from resilient.surface.bench.jobs import fill, useless_executions
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableSequence, Sequence

    from sqlalchemy import Connection

    from resilient.engine.app.app import Resilient
    from resilient.store.db.dialect import Dialect
    from resilient.store.db.pipeline import Exchange, Query
    from resilient.surface.bench.crew import Start

_WORKERS: Final = (1, 4, 16)
_RESOURCES: Final = (1_000, 100_000, 1_000_000)
_KEPT: Final = (0, 1_000_000, 10_000_000)
_CHUNK: Final = 10_000
_GROWN: Final = 1.1  # times: less is the machine's
_NAME: Final = 70  # characters of a statement


class Case(NamedTuple):
    """What is drained. ``with_rows``: resources have their rows, as after a first job; ``kept``: finished jobs."""

    workers: int = 1
    resources: int = 1_000
    with_rows: bool = False
    kept: int = 0


def growth(url: str, *, scale: float) -> dict[str, Any]:
    """Drain each case once; how much more than the first of its row a job costs."""
    figures: dict[str, Any] = {}
    sizes = [max(10, round(n * scale)) for n in _RESOURCES]
    for what, jobs, cases in (
        ("workers", 320_000, {n: Case(workers=n) for n in _WORKERS}),
        ("resources", 100_000, {n: Case(resources=n, with_rows=True) for n in sizes}),
        ("new_resources", 100_000, {n: Case(resources=n) for n in sizes[:2]}),
        ("kept", 20_000, {n: Case(kept=n) for n in (round(n * scale) for n in _KEPT)}),
    ):
        measured = {n: _measure(url, max(1_000, round(jobs * scale)), case) for n, case in cases.items()}
        first_cost, first_spent = next(iter(measured.values()))
        for n, (cost, spent) in measured.items():
            name = f"{what}_{n}"
            figures[name] = round(cost / first_cost, 2)
            if figures[name] >= _GROWN:
                figures[f"{name}_grows_by"] = grown(first_spent, spent)
    return figures


def grown(before: dict[str, float], after: dict[str, float]) -> str:
    """The statement that takes most time more, with its ratio."""
    if not after:
        return "no statement was seen"
    name = max(after, key=lambda one: after[one] - before.get(one, 0.0))
    if name not in before:
        return f"{name} (not there before)"
    return f"{name} ({after[name] / before[name]:.1f} times)"


def _measure(url: str, jobs: int, case: Case) -> tuple[float, dict[str, float]]:
    """CPU microseconds a job, and the seconds a job of each statement."""
    with scratch(url, "bench") as place:
        app = build(place)
        try:
            _keep(app, case.kept)
            if case.with_rows:
                _ensure(app, case.resources)
            fill(app, place, jobs=jobs, resources=case.resources, blocked=0)
            done = multiprocessing.get_context("spawn").Array("q", case.workers, lock=False)
            server = Server(place)
            crew, cpu = run_measured(server, _watched, case.workers, done, Load(place, jobs, 100))
            useless_executions(app, jobs + case.kept)
        finally:
            app.database.close_sync()
    spent: dict[str, float] = {}
    for answer in crew.answers:
        for name, seconds in answer["spent"].items():
            spent[name] = spent.get(name, 0.0) + seconds / jobs
    return cpu * 1e6 / jobs, spent


def _keep(app: Resilient, kept: int) -> None:
    """Finished jobs, as a worker leaves them: copies of one that was run."""
    if kept:
        app.ready_sync()
        app.enqueue_sync(noop, 0, resource_key="bench/kept")
        app.database.transaction_sync(_insert_kept, kept)


def _ensure(app: Resilient, count: int) -> None:
    """Make the rows of so many accounts, as they are after their first job."""
    app.ready_sync()
    for first in range(0, count, _CHUNK):
        keys = [account(n, count) for n in range(first, min(count, first + _CHUNK))]
        app.database.transaction_sync(resources.ensure, [ROOT, *keys])


def _insert_kept(c: Connection, d: Dialect, kept: int) -> None:
    d.run(
        c,
        "UPDATE {job} SET state = 'succeeded', executions = 1, attempts = 1, version = 2,"
        " finished_at = clock_timestamp()",
    )
    d.run(c, "DELETE FROM {turn}")
    d.run(
        c,
        "INSERT INTO {job} SELECT copy.* FROM {job} AS j, generate_series(2, CAST(:kept AS integer)) AS n,"
        " jsonb_populate_record(j, jsonb_build_object('id', gen_random_uuid(),"
        " 'resource_key', 'bench/kept-' || (n % 1000),"
        " 'finished_at', clock_timestamp() - random() * interval '7 days')) AS copy",
        {"kept": kept},
    )


def _watched(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    """`work`, with the seconds that each statement took (a task of `run_crew`)."""
    with watched() as spent:

        def begin() -> None:
            start()
            spent.clear()  # what warmed up

        return work(begin, number, done, load) | {"spent": spent}


def _named(statement: str) -> str:
    """The beginning of a statement, without the schema: each case has its own."""
    return " ".join(re.sub(r'"\w+"\.', "", statement).split())[:_NAME]


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Measure the rounds of this process, by their last statement that is no COMMIT."""
    spent: dict[str, float] = {}
    sent: dict[int, tuple[str, float]] = {}
    send, answers = Line.send, Line.answers

    def timed_send(self: Line, queries: Sequence[tuple[Query, Any]]) -> Exchange:
        names = [query.named for query, _ in queries if not query.is_command]
        began = time.perf_counter()
        exchange = send(self, queries)
        sent[id(exchange)] = _named(names[-1]) if names else "", began
        return exchange

    async def timed_answers(self: Line, exchange: Exchange) -> list[Any]:
        name, began = sent.pop(id(exchange))
        try:
            return await answers(self, exchange)
        finally:
            if name:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    Line.send, Line.answers = timed_send, timed_answers  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Line.send, Line.answers = send, answers  # type: ignore[method-assign]
