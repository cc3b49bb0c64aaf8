"""Sealed payloads: nothing of them is anywhere but with their handler."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import timedelta
from uuid import uuid4

import pytest
from pydantic import BaseModel, field_validator

from resilient import (
    BadPayload,
    Batch,
    InvalidInput,
    Item,
    Job,
    Kind,
    Permanent,
    Resilient,
    Retry,
    Schedule,
    SetupError,
    SyncJob,
    handler,
)
from resilient.engine.ground.sealing import seal, unseal
from resilient.store.accounts.secrets import KeyRing, new_key
from resilient.surface.cli import main
from tests.dump import dump
from tests.helpers import drain

OLD, KEY = new_key(), new_key()


class Card(BaseModel):
    number: str
    amounts: dict[str, int] = {}

    @field_validator("number")
    @classmethod
    def _check(cls, value):
        if value.startswith("bad"):
            raise ValueError(f"{value} is no card")
        return value


SEEN: list[str] = []


@handler("pay", sealed=True)
async def pay(job: Job[Card]) -> None:
    SEEN.append(job.payload.number)


@handler("refund", sealed=True)
def refund(job: SyncJob[Card]) -> None:
    SEEN.append(f"refund {job.payload.number}")


@handler("many", sealed=True, batch=10)
async def many(batch: Batch[Card]) -> None:
    SEEN.extend(job.payload.number for job in batch)


@handler("fail", sealed=True, retry=Retry(max_attempts=1))
async def fail(job: Job[Card]) -> None:
    try:
        int(job.payload.number)
    except ValueError as error:
        raise RuntimeError(f"cannot charge {job.payload.number}") from error


@handler("refuse", sealed=True)
async def refuse(job: Job[Card]) -> None:
    raise Permanent(f"no such card: {job.payload.number}", code="no_card")


@handler("follow", sealed=True)
async def follow(job: Job[Card]) -> None:
    async with job.complete():
        job.then(pay, job.payload)


@handler("plain")
async def plain(job: Job[dict]) -> None:
    SEEN.append(job.payload["number"])


HANDLERS = [pay, refund, many, fail, refuse, follow, plain]


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


@pytest.fixture
async def make(database_url):
    apps = []

    def make_(*keys, handlers=HANDLERS, **options):
        apps.append(Resilient(database_url, handlers=handlers, secrets=list(keys), **options))
        return apps[-1]

    yield make_
    for app in apps:
        await app.close()


@pytest.fixture
def card():
    """Each test's own: the log of changes of a server is shared."""
    return f"card-{uuid4().hex}"


async def test_nothing_of_it_is_in_the_database_the_log_and_the_views(make, card, database_url, caplog, capsys):
    caplog.set_level(logging.DEBUG, logger="resilient")
    payload = Card(number=card, amounts={card: 1})
    every = Schedule(pay, payload, every="1h", name="tick", resource_key="bank/1")
    app = make(KEY, schedules=[every])
    job = await app.enqueue(pay, payload, resource_key="bank/1")
    for kind in (fail, refuse, follow):
        await app.enqueue(kind, payload, resource_key="bank/1")
    await app.enqueue_many(many, [payload, Item(payload, priority=3)], resource_key="bank/1")
    later = await app.enqueue(pay, payload, resource_key="bank/1", delay=9_000)
    await app.jobs.edit(later.id, payload=Card(number=card, amounts={"x": 2}))
    async with app.workflow("flow", resource_key="bank/1") as flow:
        first = flow.step(pay, payload, undo=refund)
        flow.step(refuse, payload, name="last", after=first)
    await app.schedules.run("tick")
    await drain(app)
    assert sorted(SEEN) == sorted([card] * 6 + [f"refund {card}"])
    exported = [row async for row in app.accounts.export("bank/1")]
    assert {row["payload"]["sealed"] for row in exported if row["table"] == "job"} != set()
    for words in (["jobs", "list"], ["jobs", "show", str(job.id)], ["jobs", "show", str(later.id)]):
        for option in ([], ["--json"]):
            assert await asyncio.to_thread(main, ["--database", database_url, *option, *words]) == 0
    screen = "".join(capsys.readouterr())
    assert '"sealed": "with key' in screen
    texts = (*await asyncio.to_thread(dump, database_url), caplog.text, json.dumps(exported, default=str), screen)
    assert [n for n, text in enumerate(texts) if card in text] == []


async def test_of_an_error_its_kind_code_and_place_are_kept(make, card):
    app = make(KEY)
    failed = await app.enqueue(fail, Card(number=card), resource_key="bank/1")
    refused = await app.enqueue(refuse, Card(number=card), resource_key="bank/1")
    await drain(app)
    info, (attempt,) = await app.jobs.get(failed.id), await app.jobs.attempts(failed.id)
    assert (info.last_error_kind, info.last_error_code) == ("bug", "RuntimeError")
    assert info.last_error == "RuntimeError (its text is not kept, because its payload is sealed) (attempt 1 of 1)"
    assert attempt.traceback.rstrip().endswith("in fail")
    assert (await app.jobs.get(refused.id)).last_error_code == "no_card"


async def test_a_worker_without_the_key_puts_it_off_and_says_why(make, card):
    job = await make(KEY).enqueue(pay, Card(number=card), resource_key="bank/1")
    for keys in ([], [OLD]):
        poor = make(*keys)
        beside = await poor.enqueue(plain, {"number": "7"}, resource_key="bank/1")
        await drain(poor)
        info = await poor.jobs.get(job.id)
        assert (info.state, info.attempts, (await poor.jobs.get(beside.id)).state) == ("scheduled", 0, "succeeded")
        text = (await poor.jobs.why(job.id)).text
        assert "which this worker does not have: add it to RESILIENT_SECRETS" in text
        assert "(new keys: last everywhere, then first, then rotate)" in text
        await poor.jobs.edit(job.id, delay=0)
    await drain(make(OLD, KEY))
    assert ["7", "7", card] == SEEN


async def test_a_new_key_for_what_is_stored(make, card):
    old = make(OLD)
    payload = Card(number=card)
    ids = [(await old.enqueue(pay, payload, resource_key="bank/1", delay=wait)).id for wait in (0, 9_000)]
    async with old.workflow("flow", resource_key="bank/1") as flow:
        first = flow.step(pay, payload, undo=refund)
        flow.step(refuse, payload, name="last", after=first)
    both = make(KEY, OLD)
    assert await both.connections.rotate_secrets() == len(ids) + 3
    assert await both.connections.rotate_secrets() == 0
    new = make(KEY)
    await new.jobs.edit(ids[1], delay=0)
    await drain(new)
    assert sorted(SEEN) == sorted([card, card, card, f"refund {card}"])


async def test_rotation_leaves_what_no_key_opens_and_finds_what_is_behind_it(make, card, monkeypatch):
    monkeypatch.setattr("resilient.store.accounts.secrets.WINDOW", 2)
    stranger, old = make(new_key()), make(OLD)
    for app in (old, stranger, old, old, stranger):
        await app.enqueue(pay, Card(number=card), resource_key="bank/1")
    assert await make(KEY, OLD).connections.rotate_secrets() == 3
    await drain(make(KEY))
    assert len(SEEN) == 3


@pytest.mark.parametrize("of", ["another kind", "a changed one", "nothing"])
async def test_one_that_was_changed_is_dead(make, card, of, database):
    app = make(KEY)
    job = await app.enqueue(pay, Card(number=card), resource_key="bank/1")
    text = seal(KeyRing([KEY]), "refund" if of == "another kind" else "pay", json.dumps({"number": card}))
    text = {"another kind": text, "a changed one": text[:-6] + 'AA"}', "nothing": '{"resilient:sealed": 7}'}[of]
    column = "CAST(:text AS json)" if "postgresql" in str(database.url) else ":text"

    def put(c, d):
        d.run(c, f"UPDATE {{job}} SET payload = {column} WHERE id = :id", {"text": text, "id": d.id(job.id)})

    await app.database.transaction(put)
    await drain(app)
    info = await app.jobs.get(job.id)
    if of != "nothing":
        assert (info.state, info.last_error_kind) == ("dead", "undecodable")
    assert SEEN == []


def test_one_that_is_nested_too_deeply_was_changed():
    with pytest.raises(BadPayload, match="was changed"):
        unseal(KeyRing([KEY]), "pay", "[" * 200_000)


async def test_what_cannot_be_enqueued(make, card):
    with pytest.raises(SetupError, match="there is no key"):
        await make().enqueue(pay, Card(number=card), resource_key="bank/1")
    app = make(KEY)
    with pytest.raises(BadPayload, match=r"value_error \(its text is not kept") as error:
        await app.enqueue(pay, {"number": f"bad {card}"}, resource_key="bank/1")
    assert card not in str(error.value)
    with pytest.raises(BadPayload, match="int_parsing"):
        await app.enqueue(pay, {"number": "1", "amounts": {card: "x"}}, resource_key="bank/1")
    with pytest.raises(BadPayload, match="the engine's own"):
        await app.enqueue(plain, {"resilient:sealed": "x"}, resource_key="bank/1")
    with pytest.raises(InvalidInput, match="its undo 'plain' gets the same payload"):
        async with app.workflow("flow", resource_key="bank/1") as flow:
            flow.step(pay, Card(number=card), undo=plain)


async def test_a_kind_may_be_sealed_later_and_no_more(make, card):
    @handler("pay")
    async def bare(job: Job[Card]) -> None:
        SEEN.append(f"bare {job.payload.number}")

    before = make(KEY, handlers=[bare])
    await before.enqueue(bare, Card(number=card), resource_key="bank/1")
    app = make(KEY)
    await drain(app)
    await app.enqueue(pay, Card(number=card), resource_key="bank/1")
    await drain(before)
    assert [card, f"bare {card}"] == SEEN


async def test_a_program_that_only_enqueues_seals_too(make, card, database_url):
    web = make(KEY, handlers=[], kinds=[Kind("pay", Card, sealed=True)])
    await web.enqueue("pay", Card(number=card), resource_key="bank/1", expires_in=timedelta(hours=1))
    assert card not in (await asyncio.to_thread(dump, database_url))[0]
    await drain(make(KEY))
    assert [card] == SEEN
