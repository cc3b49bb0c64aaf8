"""The event loop has a clock of its own, which may be far from `time.monotonic`."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Job, Resilient, handler
from tests.helpers import LIMIT

WAITED = []


@handler("work")
async def work(job: Job[None]) -> None:
    WAITED.append(job._backend._execution.waited)


class Ahead(asyncio.SelectorEventLoop):
    offset = 1e6

    def time(self):
        return super().time() + self.offset


class Behind(Ahead):
    offset = -1e3


@pytest.mark.parametrize("loop", [Ahead, Behind])
def test_how_long_a_job_waited_for_its_slot_is_told_by_one_clock(tmp_path, loop):
    WAITED.clear()

    async def main():
        async with Resilient(f"sqlite:///{tmp_path}/jobs.db", handlers=[work]) as app:
            for n in range(2):
                await app.enqueue(work, resource_key=f"p/{n}")
            worker = app.worker()
            submit = worker.executor.submit

            def submit_late(execution, since):
                submit(execution, since)
                execution.since -= 2.0 * (execution.resource_key == "p/1")

            worker.executor.submit = submit_late
            await worker.drain(timeout=LIMIT)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert sorted(WAITED) == [False, True]
