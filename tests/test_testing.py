"""The test kit: handlers run without a database, and with one under a clock that moves when told."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from resilient import (
    Job,
    NoResult,
    OnePage,
    PageRequest,
    Resilient,
    SetupError,
    Snooze,
    Stream,
    SyncJob,
    handler,
    testing,
)


@handler("fetch")
async def fetch(job: Job[dict]) -> str:
    await job.progress({"at": 1})
    response = await job.client.get("https://api.example.com/" + job.payload["path"])
    return response.text


@handler("plain")
def plain(job: SyncJob[int]) -> int:
    job.progress("half")
    with job.call("POST", "https://api.example.com/x", op="charge") as call:
        call.report(201, {}, b"{}")
    return job.payload * 2


async def test_an_async_handler_without_a_database():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=request.url.path))
    job = testing.job({"path": "a"}, client=httpx.AsyncClient(transport=transport))
    assert await fetch(job) == "/a"
    assert testing.bench_of(job).progress_saved == [{"at": 1}]


def test_a_plain_handler_without_a_database():
    job = testing.sync_job(21, attempt=3)
    assert (plain(job), job.attempt) == (42, 3)
    (call,) = testing.bench_of(job).calls
    assert (call.method, call.words["op"], call.reported) == ("POST", "charge", (201, {}, b"{}"))


def test_time_moves_when_told(sqlite_url):
    clock, seen = testing.FakeClock(), []

    @handler("later")
    async def later(job: Job[None]) -> Snooze | None:
        seen.append(clock.now())
        return Snooze(3600) if len(seen) == 1 else None

    async def run():
        app = Resilient(sqlite_url, handlers=[later], clock=clock.now)
        await app.enqueue(later, resource_key="a", delay=60)
        assert await app.worker().drain() == 0
        clock.advance(61)
        assert await app.worker().drain() == 1
        clock.advance(hours=1, seconds=1)
        assert await app.worker().drain() == 1
        await app.close()

    asyncio.run(run())
    assert (seen[1] - seen[0]).total_seconds() == pytest.approx(3601)


async def test_a_job_without_a_client_says_so():
    @handler("push")
    async def push(job: Job[None]) -> None:
        await job.client.post("/contacts")

    @handler("push.plain")
    def plainly(job: SyncJob[None]) -> None:
        job.client.post("/contacts")

    says = r"POST /contacts: this job was made without a client, .* client=httpx\.{}\(transport"
    with pytest.raises(SetupError, match=says.format("AsyncClient")):
        await push(testing.job(None))
    with pytest.raises(SetupError, match=says.format("Client")):
        plainly(testing.sync_job(None))


async def test_what_a_job_was_made_without_is_named():
    issues, job = Stream("issues", request=lambda: PageRequest("/x"), paginator=OnePage()), testing.job(None)
    with pytest.raises(AttributeError, match="made has no pages: run the handler by a worker"):
        [page async for page in job.pages(issues)]
    with pytest.raises(AttributeError, match=r"without an app: .* or results="):
        await job.result_of(fetch)
    with pytest.raises(AttributeError, match=r"without a session: testing\.job\(\.\.\., session="):
        async with job.complete() as session:
            session.add(object())
    with pytest.raises(AttributeError, match="made has no sweep: run the handler by a worker"):
        async with job.sweep(issues):
            pass
    assert not job.app
    with pytest.raises(NoResult, match="given no result of 'fetch'"):  # as of a step that did not succeed
        await testing.job(None, results={}).result_of(fetch)
