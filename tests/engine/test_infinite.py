"""Infinity and NaN on every way into the database: refused, or said in their place, and never stored as null."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from resilient import (
    BadPayload,
    Event,
    InvalidInput,
    Item,
    Job,
    OnePage,
    PageRequest,
    Resilient,
    Schedule,
    Stream,
    handler,
)
from tests.helpers import drain

INF, NAN = float("inf"), float("nan")


class Priced(Event, type="item.priced"):
    price: float | None = None


@handler("count")
async def count(job: Job[dict]) -> None: ...


@handler("follow")
async def follow(job: Job[None]) -> None:
    with pytest.raises(BadPayload, match=r"payload of 'count' is not JSON: n is inf"):
        job.then(count, {"n": INF})


@handler("weigh")
async def weigh(job: Job[None]) -> dict:
    with pytest.raises(Exception, match=r"progress of job .* is not JSON: share is nan"):
        await job.progress({"share": NAN})
    return {"total": None, "mean": NAN}


items = Stream("items", request=lambda least: PageRequest(f"/items?least={least}"), paginator=OnePage(), key="id")


@handler("read")
async def read(job: Job[None]) -> None:
    with pytest.raises(InvalidInput, match=r"stream 'items': parameter least is inf"):
        await anext(job.pages(items, least=INF))


@pytest.fixture
async def app(database):
    async def keep(_message): ...

    app = Resilient(
        database, handlers=[count, follow, weigh, read], destinations={"shop": keep}, routes={Priced: ["shop"]}
    )
    await app.ready()
    yield app
    await app.close()


async def test_no_way_to_enqueue_takes_one(app, database):
    options = {"resource_key": "p/1"}
    with pytest.raises(BadPayload, match=r"'count' is not JSON: n is inf"):
        await app.enqueue(count, {"n": INF}, **options)
    with pytest.raises(BadPayload, match=r"'count' is not JSON: n is nan"):
        await app.enqueue_many(count, [{"n": 1}, Item({"n": NAN})], **options)
    with pytest.raises(BadPayload, match=r"'count' is not JSON: n is inf"):
        async with app.workflow("w", resource_key="p/1") as wf:
            wf.step(count, {"n": INF})
    with pytest.raises(BadPayload, match=r"'count' is not JSON: n is inf"):
        Resilient(database, handlers=[count], schedules=[Schedule(count, {"n": INF}, every="1h", **options)])
    refused = pytest.raises(BadPayload, match=r"event 'item\.priced' is not JSON: price is inf")
    with Session(database.sync_engine) as session, session.begin(), refused:
        app.outbox.publish(session, Priced(price=INF))
    job = await app.enqueue(count, {"n": 1}, **options, delay=timedelta(hours=1))
    with pytest.raises(BadPayload, match=r"'count' is not JSON: n is nan"):
        await app.jobs.edit(job.id, payload={"n": NAN})
    assert [one.payload for one in await app.jobs.list()] == [{"n": 1}]


async def test_within_a_handler_too(app):
    for kind in (follow, read):
        await app.enqueue(kind, resource_key="p/1")
    done = await app.enqueue(weigh, resource_key="p/1")
    await drain(app)
    assert {one.state for one in await app.jobs.list()} == {"succeeded"}
    job = await app.jobs.get(done.id)
    assert job.progress is None
    assert job.result["result_not_kept"].startswith("it is not JSON: mean is nan; ")
