"""Infinity and NaN on every way into the database: refused, or said in their place, and never stored as null.

So is what a writer of JSON takes and no reader does: numbers of thousands of digits, lists that are nested too deeply.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field, field_serializer
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


class Sets(BaseModel):
    """Secrets and numbers in what is written as a list, and as keys."""

    words: set[SecretStr] = set()
    recent: deque[SecretStr] = deque()
    by_word: dict[SecretStr, int] = {}
    prices: deque[float] = deque()


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"words": {"one"}}, "words.0 is a secret"),
        ({"recent": ["one"]}, "recent.0 is a secret"),
        ({"by_word": {"one": 1}}, "by_word.a key is a secret"),
        ({"prices": [1.0, NAN]}, "prices.1 is nan"),
    ],
)
def test_what_is_written_as_a_list_or_a_key_is_looked_at_too(payload, place):
    with pytest.raises(BadPayload, match=re.escape(place)):
        Kind("sets", Sets).encode(payload)


class Open(BaseModel):
    """A secret that its program writes as it is."""

    token: SecretStr
    note: str

    @field_serializer("token", when_used="json")
    def write(self, token: SecretStr) -> str:
        return token.get_secret_value()


def test_a_text_of_stars_beside_a_secret_that_is_written_is_a_text():
    kind = Kind("open", Open)
    text = kind.encode({"token": "one", "note": "*" * 10})
    assert kind.decode(text, 1) == Open(token="one", note="*" * 10)


class Swapped(BaseModel):
    """One field's alias is another one's name."""

    name: str = Field("", alias="title")
    title: str = Field("", alias="label")


@dataclass
class SwappedToo:
    name: Annotated[str, Field(alias="title")] = ""
    title: Annotated[str, Field(alias="label")] = ""


@pytest.mark.parametrize("model", [Swapped, SwappedToo, list[Swapped]])
@pytest.mark.parametrize("version", [1, 2], ids=["older", "same"])
def test_fields_keep_their_values_though_one_has_the_alias_of_another(model, version):
    kind = Kind("swapped", model, version=2, upgrade=lambda payload, _version: payload)
    one = {"title": "N", "label": "T"}
    value = kind.decode(kind.encode([one] if model == list[Swapped] else one), version)
    read = value[0] if isinstance(value, list) else value
    assert (read.name, read.title) == ("N", "T")


def test_what_a_program_without_the_model_stored_by_aliases_is_read():
    text = Kind("account").encode({"theOwner": "Ada", "since": "2030-01-01T00:00:00Z"})
    assert Kind("account", Account).decode(text, 1) == ACCOUNT


def test_an_upgrade_may_leave_one_time_as_text_and_make_another():
    class Times(BaseModel):
        model_config = ConfigDict(strict=True)
        first: datetime
        last: datetime

    at = datetime(2030, 1, 1, tzinfo=UTC)
    kind = Kind("times", Times, version=2, upgrade=lambda payload, _version: {**payload, "last": at})
    assert kind.decode('{"first": "2030-01-01T00:00:00Z"}', 1) == Times(first=at, last=at)


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


def test_an_error_quotes_no_tag():
    with pytest.raises(BadPayload, match="its tag is none of those that are expected") as error:
        Kind("pet", Annotated[Cat | Dog, Field(discriminator="kind")]).encode({"kind": "hunter2"})
    assert "hunter2" not in str(error.value)
