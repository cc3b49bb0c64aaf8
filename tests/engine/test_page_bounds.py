"""Pages that are too large, and pages that are large: the event loop serves other accounts meanwhile."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from pydantic import BaseModel, field_validator

from resilient import (
    Job,
    JobState,
    NextCursor,
    OnePage,
    PageRequest,
    Provider,
    Resilient,
    Retry,
    Stream,
    SyncJob,
    handler,
)
from resilient.core.base.bounds import LIST_RECORDS, PAGE_PARTS, PAGE_RECORDS
from resilient.core.sync.stream import SLICE
from resilient.engine.run import stream_reader
from tests.helpers import LIMIT
from tests.serving import Server

MOST = PAGE_RECORDS.value
VALIDATED, PAGES = [0], []


class Item(BaseModel):
    id: int
    name: str = "-"

    @field_validator("id", mode="before")
    @classmethod
    def _count(cls, value):
        VALIDATED[0] += 1
        return value


def stream(name, url="/items", paginator=NextCursor, **facts):
    facts = facts if paginator is OnePage else {"cursor": "next", "query": "after", **facts}
    return Stream(
        name, request=lambda: PageRequest(url), paginator=paginator(items="items", **facts), model=Item,
        deleted="keys", deleted_key="keys",
    )  # fmt: skip


STREAMS = {
    "paged": stream("paged"),
    "asked": stream("asked", f"/items?limit={MOST + 1}", size="limit"),
    "told": stream("told", most=MOST + 1),
    "greedy": stream("greedy", "/items?limit=99999999999999999999", size="limit"),
    "whole": stream("whole", paginator=OnePage),
}


@handler("read", retry=Retry(max_attempts=3))
async def read(job: Job[str]) -> None:
    async for page in job.pages(STREAMS[job.payload]):
        PAGES.append((len(page.items), len(page.rejected)))
        async with job.checkpoint(page):
            pass


@handler("read.plain", retry=Retry(max_attempts=3))
def read_plain(job: SyncJob[str]) -> None:
    for page in job.pages(STREAMS[job.payload]):
        PAGES.append((len(page.items), len(page.rejected)))
        with job.checkpoint(page):
            pass


class Feed:
    body = b""

    async def __call__(self, scope, _receive, send):
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self.body})


@pytest.fixture
def feed():
    feed = Feed()
    PAGES.clear()
    with Server(feed) as feed.url:
        yield feed


@pytest.fixture
async def app(database_url, feed):
    app = Resilient(
        database_url, handlers=[read, read_plain], providers=[Provider(name="p", base_url=feed.url)], upgrade=False
    )
    yield app
    await app.close()


async def run(app, name, kind="read"):
    done = await app.enqueue(kind, name, resource_key="p/evil")
    await app.worker(concurrency=2).drain(timeout=LIMIT)
    return await app.jobs.get(done.id)


def records(count, **more):
    return json.dumps({"items": [{"id": n, **more} for n in range(count)]}).encode()


@pytest.mark.parametrize("kind", ["read", "read.plain"])
@pytest.mark.parametrize("name", ["paged", "greedy"])
async def test_a_page_of_too_many_records_ends_the_job_and_says_whose_it_is(app, feed, kind, name):
    feed.body = records((MOST if name == "paged" else LIST_RECORDS.value) + 1)
    job = await run(app, name, kind)
    assert (job.state, job.executions, PAGES) == (JobState.DEAD, 1, [])
    assert f"stream {name!r} of p/evil cannot be read: a page holds" in job.last_error
    assert "are the most: ask for smaller pages" in job.last_error
    assert await app.streams.list() == []  # where it stands is as before


@pytest.mark.parametrize("name", ["asked", "told", "whole"])
async def test_a_page_of_as_many_as_were_asked_for_is_read(app, feed, name):
    feed.body = records(MOST + 1)
    assert (await run(app, name)).state is JobState.SUCCEEDED
    assert PAGES == [(MOST + 1, 0)]


async def test_a_page_that_takes_long_to_decode_is_not_decoded(app, feed, monkeypatch):
    decoded = []
    inner = stream_reader._json
    monkeypatch.setattr(stream_reader, "_json", lambda response: decoded.append(1) or inner(response))
    feed.body = b'{"items":[{"id":1,"tags":[' + b",".join([b"{}"] * PAGE_PARTS.value) + b"]}]}"
    job = await run(app, "paged")
    assert (job.state, decoded) == (JobState.DEAD, [])
    assert "500,004 JSON objects and lists, and 500,000 are the most" in job.last_error
    feed.body = feed.body.replace(b"{},", b"", 4)
    assert ((await run(app, "paged")).state, decoded) == (JobState.SUCCEEDED, [1])


async def test_deletions_that_one_record_tells_of_count_too(app, feed):
    feed.body = json.dumps({"items": [{"id": 1, "keys": list(range(MOST + 1))}]}).encode()
    job = await run(app, "paged")
    assert job.state is JobState.DEAD
    assert "a page tells of more than 10,000 deletions" in job.last_error


@pytest.mark.parametrize("name", [None, 7])
async def test_between_slices_of_a_page_the_loop_serves_others(app, feed, name):
    feed.body = records(20 * SLICE + 1, **({} if name is None else {"name": name}))
    seen, end = [], asyncio.Event()

    async def other():
        while not end.is_set():
            seen.append(VALIDATED[0])
            await asyncio.sleep(0)

    VALIDATED[0] = 0
    watch = asyncio.create_task(other())
    job = await run(app, "paged")
    end.set()
    await watch
    assert (job.state, VALIDATED[0]) == (JobState.SUCCEEDED, 20 * SLICE + 1)
    assert [(20 * SLICE + 1, 0) if name is None else (0, 20 * SLICE + 1)] == PAGES
    assert max(after - before for before, after in pairwise(seen)) <= SLICE
