"""``bench growth``: what a job costs with more workers, more resources, and more finished jobs that are kept.

Each figure is the CPU time a job of workers and server together, divided by that of the smallest case: 1.0 is flat. For
a case that costs more, the statement is named whose share of the workers' time grew most, with its own ratio: what the
rounds of a worker take, from sending to the answer, by the last statement before the commit. Sixteen workers need a
server that takes 200 connections.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from resilient.store.db.pipeline import Line
from resilient.surface.bench.crew import Load, Server, build, noop, run_measured, work
from resilient.surface.bench.jobs import fill
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
_KEPT: Final = (0, 1_000_000)
_GROWN: Final = 1.1  # times: less is the machine's
_NAME: Final = 70  # characters of a statement


def growth(url: str, *, scale: float) -> dict[str, Any]:
    """Drain by turns; the ratios of each row of cases."""
    figures: dict[str, Any] = {}
    for what, cases, jobs in (
        ("workers", [{"workers": n} for n in _WORKERS], 80_000),
        ("resources", [{"resources": max(10, round(n * scale))} for n in _RESOURCES], 100_000),
        ("kept", [{"kept": round(n * scale)} for n in _KEPT], 20_000),
    ):
        most = max(1_000, round(jobs * scale))
        measured = [_case(url, jobs=most, **case) for case in cases]
        for case, (cost, spent) in zip(cases, measured, strict=True):
            name = f"{what}_{case[what]}"
            figures[name] = round(cost / measured[0][0], 2)
            if figures[name] >= _GROWN:
                figures[f"{name}_grows_by"] = grown(measured[0][1], spent)
    return figures


def grown(before: dict[str, float], after: dict[str, float]) -> str:
    """The statement that takes most time more, with its ratio."""
    if not after:
        return "no statement was seen"
    name = max(after, key=lambda one: after[one] - before.get(one, 0.0))
    if name not in before:
        return f"{name} (not there before)"
    return f"{name} ({after[name] / before[name]:.1f} times)"


def _case(
    url: str, *, jobs: int, workers: int = 1, resources: int = 1_000, kept: int = 0
) -> tuple[float, dict[str, float]]:
    """CPU microseconds a job, and the seconds a job of each statement."""
    with scratch(url, "bench") as place:
        app = build(place)
        try:
            _keep(app, kept)
            fill(app, place, jobs=jobs, resources=resources, blocked=0)
            done = multiprocessing.get_context("spawn").Array("q", workers, lock=False)
            server = Server(place)
            crew, cpu = run_measured(server, _watched, workers, done, Load(place, jobs, 100))
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
        app.database.transaction_sync(_copied, kept)


def _copied(c: Connection, d: Dialect, kept: int) -> None:
    d.run(
        c,
        "UPDATE {job} SET state = 'succeeded', executions = 1, attempts = 1, version = 2,"
        " finished_at = clock_timestamp()",
    )
    d.run(c, "DELETE FROM {turn}")
    d.run(
        c,
        "INSERT INTO {job} SELECT (jsonb_populate_record(j, jsonb_build_object('id', gen_random_uuid(),"
        " 'resource_key', 'bench/kept-' || (n % 1000),"
        " 'finished_at', clock_timestamp() - random() * interval '7 days'))).*"
        " FROM {job} AS j, generate_series(2, CAST(:kept AS integer)) AS n",
        {"kept": kept},
    )


def _watched(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    """`work`, with the seconds that each statement took (a task of `run_crew`)."""
    with watched() as spent:

        def begin() -> None:
            start()
            spent.clear()  # what warmed up

        return work(begin, number, done, load) | {"spent": spent}


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
        sent[id(exchange)] = " ".join(names[-1].split())[:_NAME] if names else "", began
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
