"""The event loop of a worker's command, and what a worker does on uvloop."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest

from resilient import Job, MissingExtra, Provider, Resilient, Retry, SetupError, handler
from resilient.surface import loop as loops
from resilient.testing import FakeProvider, Reply
from tests.helpers import LIMIT


@handler("ask", retry=Retry(delay=0))
async def ask(job: Job[str]) -> tuple[str, list[int]]:
    """Ask once alone and many times at once; returns the loop's package, and the statuses."""
    answers = await asyncio.gather(*(job.client.get(f"{job.payload}/things?page={n}") for n in range(20)))
    return await name(), [one.status_code for one in answers]


async def name() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize(
    ("asked", "variable", "name_of_loop"),
    [
        (None, "", "uvloop"), ("auto", "asyncio", "uvloop"), ("asyncio", "uvloop", "asyncio"),
        (None, "asyncio", "asyncio"), ("uvloop", "asyncio", "uvloop"), (None, "uvloop", "uvloop"),
    ],
)  # fmt: skip
def test_the_option_comes_before_the_environment(monkeypatch, asked, variable, name_of_loop):
    monkeypatch.setenv("RESILIENT_LOOP", variable)
    assert loops.run(name(), asked) == name_of_loop


def test_without_uvloop(monkeypatch):
    monkeypatch.delenv("RESILIENT_LOOP", raising=False)
    monkeypatch.setattr(loops, "find_spec", lambda _: None)
    assert loops.run(name()) == "asyncio"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(MissingExtra, match=r"pip install 'resilient-engine\[uvloop\]'"):
        loops.run(name(), "uvloop")


def test_a_loop_that_nobody_has(monkeypatch):
    monkeypatch.setenv("RESILIENT_LOOP", "trio")
    with pytest.raises(SetupError, match="'trio': auto, asyncio or uvloop"):
        loops.run(name())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_worker_through_a_day_on_each(loop, database_url):
    """A host with two addresses, a server that fails, breaks off and is slow: the same jobs end the same way."""

    async def day(fake):
        address = fake.provider.base_url.replace("127.0.0.1", "localhost")
        async with Resilient(database_url, handlers=[ask], providers=[replace(fake.provider, base_url=address)]) as app:
            fake.on("GET /things*", {"a": 1})
            fake.fail_next(503)
            fake.fail_next("dropped", times=2)
            fake.fail_next(Reply(200, {"a": 1}, fault="slow", pace=0.01))
            jobs = [await app.enqueue(ask, address, resource_key=f"{fake.provider.name}/{n}") for n in range(5)]
            worker = app.worker(concurrency=5)
            running = asyncio.create_task(worker.run(signals=False))
            try:
                return [(await app.jobs.wait(job.id, timeout=LIMIT)) for job in jobs]
            finally:
                worker.stop()
                await running

    with FakeProvider(Provider(name="api", base_url="https://api.example", auth=()), anonymous=True) as fake:
        ended = loops.run(day(fake), loop)
    assert [job.state for job in ended] == ["succeeded"] * 5
    assert [job.result for job in ended] == [[loop, [200] * 20]] * 5
