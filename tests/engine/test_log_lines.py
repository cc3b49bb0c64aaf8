"""One line for each change of state, none for each job that waits."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from resilient import DatabaseUnreachable, Fixed, Job, Provider, Resilient, Retry, handler
from tests.helpers import drain

JOBS, SLOTS = 1_000, 10
MOST = 12  # lines of gates, alerts and the worker itself


class Api:
    status = 200
    headers = ()
    count = 0

    async def __call__(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.count += 1
        headers = [(b"content-length", b"2"), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


@handler("contact.push", retry=Retry(max_attempts=5, delay=Fixed(600)))
async def push(job: Job[int]) -> None:
    (await job.client.put(f"/contacts/{job.payload}")).raise_for_status()


@pytest.fixture
async def app(database, clock, api):
    provider = Provider(name="api", base_url=api.url)
    app = Resilient(database, handlers=[push], providers=[provider], upgrade=False)
    yield app
    await app.close()


async def fill(app):
    for n in range(10):
        payloads = range(n * 100, n * 100 + 100)
        await app.enqueue_many("contact.push", payloads, resource_key=f"api/acct-{n}")


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("resilient")]


async def rounds(app, clock, caplog, times, seconds):
    """Workers look again and again while the gate is shut: the records of all rounds, and how often handlers ran."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    executions = 0
    for _ in range(times):
        executions += await drain(app, concurrency=SLOTS)
        clock.advance(seconds)
    return lines(caplog), executions


async def test_a_cooldown_of_the_provider(app, api, clock, caplog):
    await fill(app)
    api.status, api.headers = 429, [(b"retry-after", b"3600")]
    said, _ = await rounds(app, clock, caplog, 4, 60)
    about_workers = [one for one in said if one.startswith("worker ")]
    assert sum("is throttled until" in one for one in said) >= 1
    accounts = 10  # each is told by its own answers
    assert len(said) - len(about_workers) <= accounts + MOST
    assert api.count < JOBS / 10


async def test_an_outage_of_the_provider(app, api, clock, caplog):
    await fill(app)
    api.status = 500
    said, _ = await rounds(app, clock, caplog, 4, 60)
    tries = sum(" (contact.push on " in one for one in said)  # attempts that were charged, each a change of its job
    assert any("circuit" in one for one in said)
    assert tries <= api.count
    assert len(said) - tries - sum(one.startswith("worker ") for one in said) <= 2 * 10 + MOST
    assert tries < JOBS / 5


async def test_a_pause_and_a_missing_connection(app, api, clock, caplog):
    await fill(app)
    await app.resources.pause("api", reason="they asked")
    said, executions = await rounds(app, clock, caplog, 4, 60)
    assert (executions, api.count) == (0, 0)
    assert [one for one in said if not one.startswith("worker ")] == []


async def test_a_success_is_no_line(database_url, api, caplog):
    app = Resilient(database_url, handlers=[push], providers=[Provider(name="api", base_url=api.url)], upgrade=False)
    await fill(app)
    caplog.set_level(logging.INFO)
    assert await drain(app, concurrency=SLOTS) == JOBS
    await app.close()
    assert len(lines(caplog)) <= MOST, "a success is no line"


async def test_a_database_that_stays_away_is_a_line_of_each_part_and_not_of_each_try(app, caplog, monkeypatch):
    await app.ready()
    gate, away = app.worker().gate, True

    async def transaction(*args, **kwargs):
        if away:
            raise DatabaseUnreachable("nobody answers")
        return {}, app.now()

    async def write():
        await transaction()

    monkeypatch.setattr(gate._snapshot, "_database", SimpleNamespace(transaction=transaction))
    monkeypatch.setattr(gate._reporter, "_write", write)
    monkeypatch.setattr(gate._reporter, "wake", lambda _: None)
    monkeypatch.setattr(gate._snapshot, "_insert", lambda _: asyncio.sleep(0))
    for away in (True, False, True):  # noqa: B007 - what `transaction` reads
        for _ in range(20):
            gate._snapshot._round, gate._snapshot._requested = asyncio.get_running_loop().create_future(), {"api/a"}
            await gate._snapshot._read()
            await gate._reporter._write_due()
    said = lines(caplog)
    assert sum("cannot read resources" in one for one in said) == 2
    assert sum("cannot save what requests came to" in one for one in said) == 2
    assert sum("again" in one and "trying" not in one for one in said) == 2, "and its end"
    assert len(said) == 6
