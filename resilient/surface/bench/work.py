"""What a worker process of a bench does: an ordinary `worker.run()`, stopped when the jobs of all are done.

How many are done stands in memory shared by the processes, one slot each, read a hundred times a second;
asking the database would be part of the load.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.app import build

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from resilient.engine.worker import Worker
    from resilient.surface.bench.crew import Start
    from resilient.surface.scratch import Scratch

_LOOK: Final = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be worked off: ``jobs`` in ``place``, ``concurrency`` at once in each process."""

    place: Scratch
    jobs: int
    concurrency: int
    limits: bool = False


def work(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    """Run until all results are written (a task of `run_crew`); ``done[number]`` is this process's share."""
    return asyncio.run(_work(start, number, done, load))


async def _work(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    async with build(load.place, limits=load.limits) as app:
        worker = app.worker(concurrency=load.concurrency)
        start()
        watching = asyncio.create_task(_watch(worker, number, done, load.jobs))
        await worker.run()
        return {"finished_at": await watching, "executions": worker.executions}


async def _watch(worker: Worker, number: int, done: MutableSequence[int], jobs: int) -> float:
    """Stop the worker when all is done; when that was."""
    while True:
        done[number] = worker.completer.written
        if sum(done) >= jobs:
            break
        await asyncio.sleep(_LOOK)
    finished = time.perf_counter()
    worker.stop()
    return finished
