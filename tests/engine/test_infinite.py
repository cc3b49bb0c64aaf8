"""Infinity and NaN on every way into the database: refused, or said in their place, and never stored as null.

So is what a writer of JSON takes and no reader does: numbers of thousands of digits, lists that are nested too deeply.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field
from sqlalchemy.orm import Session

from resilient import (
    BadPayload,
    Event,
    InvalidInput,
    Item,
    Job,
    Kind,
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


class Noted(Event, type="item.noted"):
    note: Any = None


@handler("count")
async def count(job: Job[dict]) -> None: ...


class Account(BaseModel):
    """Read by aliases, stored by names; the time of a strict model is text in JSON alone."""

    model_config = ConfigDict(strict=True, extra="forbid")
    owner: str = Field(alias="theOwner")
    since: datetime

    @computed_field
    def label(self) -> str:
        return f"of {self.owner}"


ACCOUNT = Account(theOwner="Ada", since=datetime(2030, 1, 1, tzinfo=UTC))


@handler("account")
async def account(job: Job[Account]) -> Account:
    return job.payload


@handler("upgraded", version=2, upgrade=lambda payload, _version: payload)
async def upgraded(job: Job[Account]) -> str:
    return job.payload.owner


class Login(BaseModel):
    name: str = "Ada"
    words: list[SecretStr]


@handler("echo")
async def echo(job: Job[Any]) -> Any:
    return job.payload


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
        database,
        handlers=[account, count, echo, follow, weigh, read, give, upgraded],
        destinations={"shop": keep},
        routes={Priced: ["shop"], Noted: ["shop"]},
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


UNREADABLE = [{"n": 10**4_300}, [10**5_000], reduce(lambda inner, _: [inner], range(201), 1)]


@handler("give")
async def give(job: Job[int]) -> Any:
    return UNREADABLE[job.payload]


@pytest.mark.parametrize("value", UNREADABLE, ids=["large", "larger", "deep"])
async def test_what_no_reader_takes_is_refused(app, database, value):
    with pytest.raises(BadPayload, match=r"payload of 'anything' is not JSON: it could not be read again \("):
        await app.enqueue(Kind("anything"), value, resource_key="p/1")
    refused = pytest.raises(BadPayload, match=r"event 'item\.noted' is not JSON: it could not be read again \(")
    with Session(database.sync_engine) as session, session.begin(), refused:
        app.outbox.publish(session, Noted(note=value))
    assert await app.jobs.list() == []


async def test_a_result_that_no_reader_takes_is_not_kept(app):
    jobs = await app.enqueue_many(give, range(len(UNREADABLE)), resource_key="p/1")
    await drain(app)
    results = [(await app.jobs.get(job.id)).result["result_not_kept"] for job in jobs]
    assert {one.partition("(")[0] for one in results} == {"it is not JSON: it could not be read again "}


async def test_what_a_reader_just_takes_is_kept(app):
    values = [{"n": 10**4_299}, reduce(lambda inner, _: [inner], range(200), 1)]
    jobs = await app.enqueue_many(echo, values, resource_key="p/1")
    await drain(app)
    assert [(await app.jobs.get(job.id)).result for job in jobs] == values


async def test_a_payload_arrives_as_it_was_enqueued_whatever_its_model(app, database):
    plain = await app.enqueue(account, ACCOUNT, resource_key="p/1")
    older = await app.enqueue(Kind("upgraded", Account), ACCOUNT, resource_key="p/1")
    edited = await app.enqueue(upgraded, ACCOUNT, resource_key="p/1", delay=timedelta(hours=1))
    await app.jobs.edit(edited.id, payload={"owner": "Bob", "since": ACCOUNT.since}, run_at=datetime.now(UTC))
    await drain(app)
    assert (await app.jobs.get(plain.id)).state == "succeeded"
    assert [(await app.jobs.get(one.id)).result for one in (older, edited)] == ["Ada", "Bob"]


def test_a_secret_that_would_be_stored_as_stars_is_refused():
    kind, login = Kind("login", Login), Login(words=["one", "two"])
    with pytest.raises(BadPayload, match=r"payload of 'login' is not JSON: words\.0 is a secret, of which") as error:
        kind.encode(login)
    assert "one" not in str(error.value)
    assert kind.encode(Login(name="*" * 10, words=[])) == '{"name":"**********","words":[]}'
