"""Cooldowns, pauses, credentials, policies and circuits by hand, on both databases."""

from datetime import timedelta

import pytest

from resilient.core.accounts.tokens import REFRESHING
from resilient.core.gates.admission import stop_of
from resilient.core.gates.breaker import Report
from resilient.core.gates.policy import Policies
from resilient.store.db.dialect import TIME
from resilient.store.gates import circuits, resources, turns
from resilient.store.gates import controls as gates
from resilient.store.gates.circuits import Evidence
from resilient.store.inspect import resources as resource_queries

KEY = "p/a"


@pytest.fixture
def do(database):
    return database.transaction_sync


@pytest.fixture
def facts(do):
    return lambda key=KEY: do(resources.read, [key])[key]


@pytest.fixture
def park(do):
    def park(count, on=KEY):
        def fn(c, d):
            later = d.now(c) + timedelta(seconds=60)
            turns.park(c, d, [turns.Parking(f"{on}/{n}", 0, on, later, later) for n in range(count)], {})

        do(fn)

    return park


def ahead(clock, seconds):
    return clock.now() + timedelta(seconds=seconds)


def test_a_told_cooldown(clock, do, facts):
    found, news = do(gates.cool_down, KEY, ahead(clock, 60), "http_429", 0.0)
    assert news
    assert (found.blocked_until, found.blocked_since, found.revision) == (ahead(clock, 61), clock.now(), 1)
    assert facts() == found
    assert stop_of(facts(), clock.now()).code == "http_429"


def test_a_rest_for_a_refresh_takes_the_place_of_nothing_told(clock, do, facts):
    """It ends with the refresh, and would end the other with it."""
    do(gates.cool_down, KEY, ahead(clock, 10), "http_429", 0.0)
    assert not do(gates.cool_down, KEY, ahead(clock, 25), REFRESHING, 0.0, exact=True)[1]
    do(gates.warm_up_from, KEY, REFRESHING)
    assert (facts().blocked_until, facts().blocked_code) == (ahead(clock, 11), "http_429")
    clock.advance(12)
    assert do(gates.cool_down, KEY, ahead(clock, 25), REFRESHING, 0.0, exact=True)[1]


def test_a_rest_for_a_refresh_gives_way_to_what_is_told(clock, do, facts, park):
    do(gates.cool_down, KEY, ahead(clock, 25), REFRESHING, 0.0, exact=True)
    park(1)
    assert do(gates.cool_down, KEY, ahead(clock, 10), "http_429", 0.0)[1]
    do(gates.warm_up_from, KEY, REFRESHING)
    assert (facts().blocked_until, facts().blocked_code) == (ahead(clock, 11), "http_429")
    assert do(lambda c, d: d.run(c, "SELECT recheck_at FROM {turn}", recheck_at=TIME).scalar()) <= ahead(clock, 11)


def test_many_throttles_are_one(clock, do, facts):
    do(gates.cool_down, KEY, ahead(clock, 60), "first", 0.0)
    for told in (ahead(clock, 60), ahead(clock, 5), None):
        found, news = do(gates.cool_down, KEY, told, "again", 0.0)
        assert not news
        assert (found.blocked_until, found.blocked_code, found.revision) == (ahead(clock, 61), "first", 1)
    since = clock.now()
    clock.advance(10)
    found, news = do(gates.cool_down, KEY, ahead(clock, 600), "longer", 0.0)
    assert news
    assert (found.blocked_since, found.blocked_until) == (since, ahead(clock, 601))


def test_an_untold_cooldown_grows_while_it_repeats(clock, do):
    rests = []
    for _ in range(10):
        found, _ = do(gates.cool_down, KEY, None, None, 0.999999, sent_at=clock.now())
        rests.append(round((found.blocked_until - clock.now()).total_seconds()))
        clock.set(found.blocked_until)
        clock.advance(1)
    assert rests == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    found, news = do(gates.cool_down, KEY, None, None, 0.9, sent_at=ahead(clock, -400))
    assert not news  # was in flight when the last rest began
    clock.advance(120)
    found, _ = do(gates.cool_down, KEY, None, None, 0.0, sent_at=clock.now())
    assert found.blocked_until == ahead(clock, 1)


def test_an_exact_cooldown_adds_nothing(clock, do):
    found, news = do(gates.cool_down, KEY, ahead(clock, 60), "budget:core", 0.9, exact=True)
    assert (found.blocked_until, news) == (ahead(clock, 60), True)
    assert not do(gates.cool_down, KEY, ahead(clock, 60), "budget:core", 0.9, exact=True)[1]
    assert not do(gates.cool_down, "p/b", ahead(clock, -1), "budget:core", 0.9, exact=True)[1]


def test_warming_up_releases(clock, do, facts, park, read_all):
    do(gates.cool_down, KEY, ahead(clock, 60), "x", 0.0)
    park(3)
    assert do(gates.warm_up, KEY) == 1
    assert stop_of(facts(), clock.now()) is None
    assert len(read_all("SELECT 1 AS x FROM {turn} WHERE parked_on IS NOT NULL")) == 2, "they follow step by step"
    assert do(gates.warm_up, "p/b") == 0, "it did not rest"


def test_pause_and_resume(clock, do, facts, park):
    do(gates.pause, KEY, reason="unpaid")
    started = clock.now()
    assert stop_of(facts(), ahead(clock, 1e6)).gate == "pause"
    clock.advance(5)
    do(gates.pause, KEY, until=ahead(clock, 60), reason="soon")
    found = facts()
    assert (found.paused_at, found.paused_until, found.paused_reason) == (started, ahead(clock, 60), "soon")
    assert stop_of(found, ahead(clock, 61)) is None
    park(2)
    assert do(gates.resume, KEY) == 1
    assert stop_of(facts(), clock.now()) is None


def test_a_timed_pause_arms_a_parked_turn(clock, do, park, read_all):
    park(2)
    do(gates.pause, KEY, until=ahead(clock, 7))
    (row,) = read_all("SELECT min(recheck_at) AS at FROM {turn}")
    assert str(row["at"])[:19] == str(ahead(clock, 7))[:19]


def test_open_and_close_by_hand(clock, do, facts, park):
    do(gates.open_, KEY, reason="maintenance")
    found = facts()
    assert (found.breaker.state, found.breaker.generation, found.paused_reason) == (
        "isolated",
        1,
        "maintenance",
    )
    policies = Policies()
    evidence = [Evidence(KEY, Report(1, ok=1, probe=True))]
    assert do(circuits.report_if_current, evidence, policies, lambda: 0.0) == []
    park(5)
    assert do(gates.close, KEY) == 1  # staging and the ramp go on
    found = facts()
    assert (found.breaker.state, found.breaker.generation, found.breaker.closed_at) == (
        "closed",
        2,
        clock.now(),
    )


def test_closing_forgets_the_counts(do):
    do(circuits.report_if_current, [], Policies(), lambda: 0.0)
    do(resources.ensure, [KEY])
    bad = Evidence(KEY, Report(0, failed=4, trailing=4, children_failed=frozenset(".")))
    do(circuits.report_if_current, [bad], Policies(), lambda: 0.0)
    do(gates.close, KEY)
    found = do(circuits.lock, [KEY])[KEY].breaker
    assert (found.streak, found.window.failed, found.window_at) == (0, 0, None)


def test_credentials(clock, do, facts, park):
    assert do(gates.set_auth, KEY, "needs_reauth") == 0
    stop = stop_of(facts(), clock.now())
    assert (stop.gate, stop.code, stop.since) == ("auth", "needs_reauth", clock.now())
    revision = facts().revision
    do(gates.set_auth, KEY, "needs_reauth")
    assert facts().revision == revision
    park(2)
    assert do(gates.set_auth, KEY, "ok") == 1
    assert stop_of(facts(), clock.now()) is None


def test_policy_override(do, facts, park):
    override = {"concurrency": 3, "limits": ["10/s"]}
    park(1)
    assert do(gates.set_policy, KEY, override) == 1
    assert (facts().policy_override, facts().calm) == (override, False)
    do(gates.set_policy, KEY, None)
    assert facts().calm


def test_every_gate_bumps_the_revision(clock, do, facts):
    steps = [
        (gates.cool_down, (ahead(clock, 60), "x", 0.0)), (gates.warm_up, ()), (gates.pause, ()), (gates.resume, ()),
        (gates.open_, ()), (gates.close, ()), (gates.set_auth, ("dead",)), (gates.set_auth, ("ok",)),
        (gates.set_policy, ({"concurrency": 1},)), (gates.set_policy, (None,)),
    ]  # fmt: skip
    last = -1
    for fn, arguments in steps:
        do(fn, KEY, *arguments)
        assert facts().revision > last
        last = facts().revision


def test_a_pause_and_an_isolation_each_end_with_their_own_reason(do):
    """They share a column: what is still shut keeps its reason, and what is open again has none."""

    def reason():
        return do(resource_queries.get, KEY).paused_reason

    do(gates.pause, KEY, reason="maintenance")
    do(gates.open_, KEY)
    assert reason() == "maintenance"
    do(gates.close, KEY)
    assert reason() == "maintenance"
    do(gates.resume, KEY)
    assert reason() is None
    do(gates.open_, KEY, reason="wrong answers")
    do(gates.pause, KEY, reason="wrong answers")
    do(gates.resume, KEY)
    assert reason() == "wrong answers"
    do(gates.close, KEY)
    assert reason() is None
