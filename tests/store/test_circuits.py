"""What requests came to, on both databases."""

from datetime import timedelta

import pytest

from resilient import BreakerPolicy, Failure, FailureKind
from resilient.core.gates.breaker import Report
from resilient.core.gates.policy import Policies
from resilient.store.gates import circuits, resources, turns
from resilient.store.gates import controls as gates
from resilient.store.gates.circuits import Evidence

POLICIES = Policies(breakers={"q/*": BreakerPolicy(streak=2)})
DOWN = Failure(FailureKind.TRANSIENT, status=503, code="http_503", provider_wide=True)
OWN = frozenset(["."])


@pytest.fixture(autouse=True)
def rows(database):
    database.transaction_sync(resources.ensure, ["p", "p/a", "p/b", "q/a"])


def report(database, *evidence):
    return database.transaction_sync(circuits.report_if_current, evidence, POLICIES, lambda: 0.5)


def failed(key="p/a", count=5, generation=0, **more):
    more.setdefault("children_failed", OWN)
    return Evidence(key, Report(generation, failed=count, trailing=count, **more), DOWN)


def worked(key="p/a", count=1, generation=0, **more):
    more.setdefault("children_ok", OWN)
    return Evidence(key, Report(generation, ok=count, **more))


def facts(database, key="p/a"):
    return database.transaction_sync(circuits.lock, [key])[key]


def elect(database, key="p/a", owner="w"):
    """A probe, as the claim elects it."""
    from resilient.core.gates import breaker

    def fn(c, d):
        b = breaker.elect(circuits.lock(c, d, [key])[key].breaker, owner, BreakerPolicy(), d.now(c))
        circuits.write_breakers(c, d, [(key, b)], d.now(c))
        return b.generation

    return database.transaction_sync(fn)


def park(database, keys, on="p/a"):
    def fn(c, d):
        later = d.now(c) + timedelta(seconds=60)
        parkings = [turns.Parking(k, 0, on, later, later) for k in keys]
        turns.park(c, d, parkings, {})

    database.transaction_sync(fn)


def parked(read_all):
    return {r["resource_key"] for r in read_all("SELECT resource_key FROM {turn} WHERE parked_on IS NOT NULL")}


def test_counting_changes_no_revision(database, read_all):
    assert report(database, failed(count=2), worked("p")) == []
    found = facts(database)
    assert (found.breaker.streak, found.breaker.window.failed, found.revision) == (2, 2, 0)
    assert set(found.breaker.window.ill) == {"."}
    (row,) = read_all("SELECT * FROM {resource} WHERE key = 'p/a'")
    assert (row["last_error"], row["last_error_kind"], row["last_error_code"]) == (
        "HTTP 503",
        "transient",
        "http_503",
    )
    assert row["last_error_at"] is not None
    assert row["last_success_at"] is None
    (row,) = read_all("SELECT * FROM {resource} WHERE key = 'p'")
    assert row["last_success_at"] is not None
    assert row["last_error"] is None


def test_counts_add_up_over_reports_and_workers(database):
    for _ in range(2):
        report(database, failed(count=2))
    (change,) = report(database, failed(count=1))
    assert (change.before.breaker.state, change.after.breaker.state) == ("closed", "open")
    assert change.failure is DOWN
    assert change.after.key == "p/a"
    assert change.after.revision == 1


def test_one_report_of_many_keys(clock, database):
    changes = report(database, failed("q/a", 2), failed("p/b", 5), failed("p", 5, children_failed=frozenset("abc")))
    assert [c.after.key for c in changes] == ["p/b", "q/a", "p"]  # deepest first
    found = facts(database, "q/a")
    assert (found.breaker.state, found.breaker.generation, found.revision) == ("open", 1, 1)
    assert found.breaker.open_until == clock.now() + timedelta(seconds=18.75)
    assert found == next(c.after for c in changes if c.after.key == "q/a")


def test_overtaken_generations_change_nothing(database):
    report(database, failed())
    before = facts(database)
    assert report(database, worked(), failed(count=50), worked(generation=9)) == []
    assert facts(database).breaker == before.breaker
    assert facts(database).revision == before.revision
    database.transaction_sync(gates.close, "p/a")
    assert report(database, failed(count=50), failed(count=50, generation=1)) == []  # sent before it was well again
    assert (facts(database).breaker.state, facts(database).breaker.streak) == ("closed", 0)


def test_missing_rows_are_passed_over(database):
    assert report(database, failed("nobody/x"), failed(count=5))[0].after.key == "p/a"


def test_an_override_of_the_row_counts(database):
    database.transaction_sync(gates.set_policy, "p/b", {"breaker": {"streak": 1}})
    assert report(database, failed("p/b", 1))[0].after.breaker.state == "open"


def test_a_closing_circuit_releases_a_few_and_a_reopening_arms(clock, database, read_all):
    report(database, failed())
    park(database, [f"p/a/{n}" for n in range(9)])
    clock.advance(20)
    generation = elect(database)
    (change,) = report(database, failed(generation=generation, count=1, probe=True))
    assert change.after.breaker.reopens == 1
    assert len(parked(read_all)) == 9
    (first,) = read_all("SELECT min(recheck_at) AS at FROM {turn}")
    assert str(first["at"])[:19] == str(change.after.breaker.open_until)[:19]
    clock.advance(60)
    (change,) = report(database, worked(generation=elect(database), probe=True))
    assert change.after.breaker.state == "closed"
    assert len(parked(read_all)) == 7  # as many as the ramp begins with
    assert len(read_all("SELECT 1 AS x FROM {turn} WHERE parked_on IS NULL")) == 2


def test_a_throttled_probe_waits_for_the_cooldown(clock, database):
    report(database, failed())
    clock.advance(20)
    generation = elect(database)
    until = clock.now() + timedelta(seconds=90)
    database.transaction_sync(gates.cool_down, "p/a", until, "http_429", 0.0)
    report(database, Evidence("p/a", Report(generation, probe=True)))
    found = facts(database)
    assert (found.breaker.state, found.breaker.reopens) == ("open", 0)
    assert found.breaker.open_until == found.blocked_until == until + timedelta(seconds=1)


def test_a_settled_circuit_is_calm_again(clock, database):
    report(database, failed())
    clock.advance(20)
    report(database, worked(generation=elect(database), probe=True))
    assert not database.transaction_sync(resources.read, ["p/a"])["p/a"].calm
    clock.advance(61)
    report(database, worked(generation=3))
    found = database.transaction_sync(resources.read, ["p/a"])["p/a"]
    assert found.calm
    assert found.breaker.generation == 3
