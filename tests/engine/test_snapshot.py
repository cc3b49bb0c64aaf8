"""What a worker knows: older facts never win, the clock is the database's."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.gates.admission import ResourceFacts
from resilient.engine.gates import snapshot
from resilient.engine.gates.snapshot import Snapshot
from tests.helpers import LIMIT

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Time:
    at = 1000.0


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def known(sqlite_database, time):
    return Snapshot(sqlite_database, lambda: time.at, 0.25)


def facts(revision, key="a"):
    return {key: ResourceFacts(key, revision=revision)}


async def test_an_outage_is_one_line_and_its_end_another(sqlite_database, known, time, caplog):
    def rename(before, after):
        sqlite_database.transaction_sync(lambda c, _d: c.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}"))

    await known.refresh(["a"])
    for _ in range(2):
        rename("resilient_resource", "away")
        for _ in range(3):
            time.at += 1
            await known.refresh(["a"])
        rename("away", "resilient_resource")
        for _ in range(2):
            time.at += 1
            await known.refresh(["a"])
    said = [record.getMessage().partition(" (")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["cannot read resources", "resources can be read again"] * 2


@pytest.mark.parametrize("began", [False, True])
async def test_whoever_waits_goes_on_although_the_task_that_reads_is_cancelled(
    sqlite_database, known, monkeypatch, began
):
    reading, real = asyncio.Event(), sqlite_database.transaction

    async def transaction(fn, *args, **kwargs):
        if not reading.is_set():
            reading.set()
            await asyncio.Event().wait()
        return await real(fn, *args, **kwargs)

    monkeypatch.setattr(sqlite_database, "transaction", transaction)
    waiting = [asyncio.create_task(known.refresh(["a"]))]
    if began:
        await reading.wait()
        waiting.append(asyncio.create_task(known.refresh(["b"])))
    else:
        reading.set()
    await asyncio.sleep(0)
    known._task.cancel()
    async with asyncio.timeout(LIMIT / 5):
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(one, "gate", None) for one in answers] == (["database", None] if began else [None])


def test_an_older_revision_is_not_believed_for_a_while(known, time):
    known.learn(facts(5), NOW)
    known.learn(facts(4), NOW)
    assert known.facts["a"].revision == 5
    known.learn(facts(6), NOW)
    assert known.facts["a"].revision == 6
    time.at += 6
    known.learn(facts(0), NOW)  # the row was pruned and made anew
    assert known.facts["a"].revision == 0


def test_a_key_that_is_read_all_the_time_believes_a_row_made_anew_after_the_same_while(known, time):
    known.learn(facts(5), NOW)
    for _ in range(4):
        time.at += 1
        known.learn(facts(0), NOW)
        assert known.facts["a"].revision == 5
    time.at += 1.5
    known.learn(facts(0), NOW)
    assert known.facts["a"].revision == 0


def test_own_writes_win_over_reads_that_began_before(known):
    known.put(ResourceFacts("a", revision=7))
    known.learn(facts(6), NOW)
    assert known.facts["a"].revision == 7


def test_the_clock_is_the_databases_carried_forward(known, time):
    hour_ahead = datetime.now(UTC) + timedelta(hours=1)
    known.learn({}, hour_ahead)
    time.at += 2.5
    assert known.now() == hour_ahead + timedelta(seconds=2.5)


async def test_memory_is_bounded(known, time, monkeypatch):
    monkeypatch.setattr(snapshot, "_MOST", 50)
    known.learn({f"k{n}": ResourceFacts(f"k{n}") for n in range(50)}, NOW)
    time.at += 100
    known.learn(facts(1), NOW)
    assert set(known.facts) == {"a"}


def test_what_others_change_and_nobody_uses_here_takes_no_memory(known):
    known.learn(facts(1), NOW)
    known.forget(["a", *(f"k{n}" for n in range(1000))])
    assert len(known._read_at) == 1


async def test_a_fresh_key_is_not_read_again(known, time):
    await known.refresh(["a", "b"])
    assert set(known.facts) == {"a", "b"}
    before = known._task
    await known.refresh(["a"])
    assert known._task is before
    time.at += 0.3
    await known.refresh(["a"])
    assert known._task is not before
