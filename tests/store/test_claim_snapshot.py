"""The first look of a claim finds in one statement what turns, resources and jobs say when asked one by one."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from resilient.core.base.resource_key import path
from resilient.store.gates import resources, turns
from resilient.store.jobs import claim, claim_snapshot
from resilient.store.jobs import insert as jobs

KEYS = ["p", "p/a", "p/b", "p/b/x", "p/b/x/y", "q", "q/a", "pa", "pa/b", "r/a/s", "r/b"]


def scatter(database, dice):
    """Jobs on some keys, and gates of every sort."""
    rows = []
    for n in range(60):
        options = dice.choice([{}, {"priority": dice.randrange(-2, 3)}, {"delay": 60.0}])
        rows.append(jobs.NewJob(uuid4(), dice.choice(["k", "l"]), dice.choice(KEYS), f'{{"n": {n}}}', **options))
    database.transaction_sync(jobs.insert, rows)
    known = {k for key in KEYS if dice.random() < 0.9 for k in path(key)}
    database.transaction_sync(resources.ensure, known)
    for key in sorted(known):
        if dice.random() < 0.3:
            sets = dice.choice(["paused_at = :now", "breaker = 'open'", "streak = 1", "auth = 'needs_reauth'",
                                "blocked_until = :now", "policy = '{{}}'"])  # fmt: skip
            database.transaction_sync(shut, key, sets, timedelta(hours=dice.choice([-1, 1])))


def shut(c, d, key, sets, shift):
    params = {"now": d.now(c) + shift} if ":now" in sets else {}
    d.run(c, f"UPDATE {{resource}} SET {sets} WHERE key = :key", {"key": key, **params})


def count_ready(c, d, key):
    return d.run(c, "SELECT count(*) FROM {job} WHERE state = 'ready' AND resource_key = :key", {"key": key}).scalar()


def seen(database, ask, wanted, per_key):
    """What a look says, undone afterwards."""
    found = None

    def run(c, d):
        nonlocal found
        found = ask(c, d, wanted, per_key)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.transaction_sync(run)
    return found


def test_times_do_not_depend_on_the_servers_time_zone(postgres_url, open_database):
    """In the night when summer time ends, 02:20 comes before the 02:10 of an hour later."""
    database = open_database(in_zone(postgres_url, "Europe/Berlin"), clock=None)
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "p/a", "{}")])
    database.transaction_sync(resources.ensure, ["p", "p/a"])
    since, until = datetime(2030, 10, 27, 0, 20, tzinfo=UTC), datetime(2030, 10, 27, 1, 10, tzinfo=UTC)

    def throttle(c, d):
        d.run(
            c,
            "UPDATE {resource} SET blocked_since = :from_at, blocked_until = :blocked_until WHERE key = 'p/a'",
            {"from_at": since, "blocked_until": until},
        )

    database.transaction_sync(throttle)
    found = seen(database, claim.take_snapshot, turns.Selection(1), 2)
    facts = found.facts["p/a"]
    assert facts.blocked_until - facts.blocked_since == timedelta(minutes=50)
    assert {found.now.tzinfo, facts.blocked_until.tzinfo} == {UTC}
    now, _, _ = database.transaction_sync(resources.lock_leaves, ["p/a"], [])
    assert now.tzinfo is UTC


def in_zone(url, zone):
    with psycopg.connect(url, autocommit=True) as c:
        c.execute(f"ALTER DATABASE {c.info.dbname} SET TimeZone = '{zone}'")
    return url


@pytest.mark.parametrize("seed", range(12))
def test_one_statement_sees_what_three_see(postgres_database, seed):
    dice = random.Random(seed)
    scatter(postgres_database, dice)
    for wanted in (
        turns.Selection(100),
        turns.Selection(3),
        turns.Selection(4, oldest_first=True),
        turns.Selection(5, priority=0, low=2),
        turns.Selection(6, skip=["p/a", "q"]),
    ):
        one = seen(postgres_database, claim.take_snapshot, wanted, 3)
        other = seen(postgres_database, claim_snapshot._one_by_one, wanted, 3)
        assert one is not None
        assert replace(one, now=other.now) == other
        assert abs(one.now - other.now) < timedelta(seconds=10)
        for key in one.locked:  # `is_calm` says whose jobs were read: all of them, and no others'
            ready = postgres_database.transaction_sync(count_ready, key)
            assert len(one.jobs.get(key, ())) == (min(3, ready) if claim.is_calm(key, one.facts) else 0)


def test_without_turns_there_is_nothing_to_see(database):
    assert database.transaction_sync(claim.take_snapshot, turns.Selection(5), 3) is None


async def test_a_leaf_somebody_holds_is_seen_but_not_locked(postgres_database):
    database = postgres_database
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", key, "1") for key in ("p/a", "p/b")])
    database.transaction_sync(resources.ensure, ["p", "p/a", "p/b"])
    with database.sync_engine.begin() as other:
        other.exec_driver_sql("SELECT 1 FROM resilient_resource WHERE key = 'p/a' FOR UPDATE")
        found = seen(database, claim.take_snapshot, turns.Selection(5), 3)
    assert [t.resource_key for t in found.turns] == ["p/a", "p/b"]
    assert found.locked == {"p/b"}
    assert set(found.facts) == {"p", "p/b"}
    assert set(found.jobs) == {"p/b"}


def test_what_was_committed_after_the_snapshot_keeps_its_turn(postgres_database):
    """A job made ready while a look runs has a turn the look cannot take."""
    database = postgres_database
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "p/a", "1")])
    database.transaction_sync(resources.ensure, ["p", "p/a"])
    with database.sync_engine.begin() as c:
        found = claim.take_snapshot(c, database.dialect, turns.Selection(5), 3)
        database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "p/a", "2")])
    assert len(found.jobs["p/a"]) == 1
    assert len(database.transaction_sync(turns.take, turns.Selection(5))) == 1
