"""The claim where a provider names budgets: jobs of kinds that count for one wait for it, the others pass them."""

from datetime import timedelta

import pytest

from resilient import Limit
from resilient.core.gates.learnt import Refusal
from resilient.store.gates import controls, limits, resources
from tests.store.test_claim import new, ordinary, put, take

KEY, SEARCH, MAIL = "p/a", "p/a/budget:search", "p/a/budget:mail"
BUDGETS = {KEY: {"find": SEARCH}}
BOTH = {KEY: {"find": SEARCH, "send": MAIL}}
KINDS = ["find", "read", "send"]


@pytest.fixture
def throttle(database, clock):
    """A throttle of a budget, which teaches three in a second; it rests for a minute."""

    def throttle(accepted=3, budget=SEARCH, seconds=60):
        database.transaction_sync(resources.ensure, [KEY, "p"])
        refusal = Refusal(0, 1.0, accepted, 0.2, 3)
        until = clock.now() + timedelta(seconds=seconds)
        database.transaction_sync(controls.cool_down, budget, until, "429", 0.0, exact=True, refusal=refusal)

    return throttle


def claimed_kinds(database, **over):
    claimed = take(database, **{"kinds": KINDS, "budgets": BUDGETS, **over})
    return [row.kind for row in claimed.jobs], claimed


def parked(database):
    rows = database.transaction_sync(
        lambda c, d: d.run(c, "SELECT resource_key, parked_on FROM {turn} WHERE parked_on IS NOT NULL").all()
    )
    return [tuple(row) for row in rows]


def test_others_pass_the_jobs_of_a_budget_that_rests(database, throttle):
    throttle()
    put(database, *(new(KEY, kind="find") for _ in range(3)), *(new(KEY, kind="read") for _ in range(3)))
    assert claimed_kinds(database)[0] == ["read"] * 3
    kinds, claimed = claimed_kinds(database)
    assert (kinds, claimed.stops[KEY].resource, claimed.stops[KEY].gate) == ([], SEARCH, "cooldown")
    assert (ordinary(database), parked(database)) == ([], [(KEY, SEARCH)]), (
        "it waits there until the budget's rest ends"
    )


def test_others_pass_more_of_them_than_are_looked_at(database, clock, throttle):
    throttle()
    put(database, *(new(KEY, kind="find") for _ in range(30)))
    clock.advance(1)
    put(database, *(new(KEY, kind="read") for _ in range(6)))
    assert [claimed_kinds(database, per_key=4)[0] for _ in range(3)] == [["read"] * 4, ["read"] * 2, []]


def test_a_job_that_comes_later_is_claimed_although_its_key_is_parked_there(database, throttle):
    throttle()
    put(database, new(KEY, kind="find"))
    assert claimed_kinds(database)[0] == []
    put(database, new(KEY, kind="read"))
    assert claimed_kinds(database)[0] == ["read"]
    assert claimed_kinds(database)[0] == []
    assert (ordinary(database), parked(database)) == ([], [(KEY, SEARCH)])


def test_when_the_rest_is_over_they_are_claimed_step_by_step_and_at_the_budgets_rate(database, clock, throttle):
    throttle()
    put(database, *(new(KEY, kind="find") for _ in range(9)), new(KEY, kind="read"))
    clock.advance(61)
    kinds, claimed = claimed_kinds(database)
    assert sorted(kinds) == ["find", "read"], "one, as after every rest"
    assert claimed_kinds(database)[0] == [], "as long as that one runs"
    clock.advance(60)
    assert database.transaction_sync(limits.read, [SEARCH]) == {}
    assert claimed.facts[SEARCH].learnt.rate == pytest.approx(2.88)
    put(database, new(KEY, kind="read"))
    assert sorted(claimed_kinds(database)[0]) == ["find"] * 3 + ["read"], "as many as may be sent within a second"
    pace = limits.Ask(((SEARCH, Limit.learnt(2.88, 1.0, 1.0)),), cost=2.0, patience=1.0)
    assert database.transaction_sync(limits.draw, [pace])[0].draw.granted
    assert claimed_kinds(database)[0] == ["find"], "two of them were drawn just now"


def test_what_is_forgotten_releases_those_that_wait_there(database, throttle):
    throttle()
    put(database, new(KEY, kind="find"))
    assert claimed_kinds(database)[0] == []
    database.transaction_sync(controls.warm_up, SEARCH)
    assert ordinary(database) == [KEY]
    assert claimed_kinds(database)[0] == ["find"]


def test_a_budget_that_somebody_changes_is_not_waited_for(database, throttle):
    """Its row is below the leaf that a claim has locked, and everybody else locks deeper rows first."""
    throttle()
    put(database, new(KEY, kind="find"), new(KEY, kind="read"))
    assert claimed_kinds(database)[0] == ["read"]
    if not database.dialect.is_postgresql:
        return  # one writer at a time
    put(database, new(KEY, kind="find"))
    with database.sync_engine.connect() as c, c.begin():
        resources.lock_waiting(c, database.dialect, [SEARCH])
        kinds, claimed = claimed_kinds(database)
        assert (kinds, claimed.conflicts) == ([], [KEY])
        assert (ordinary(database), parked(database)) == ([KEY], [])
    assert claimed_kinds(database)[0] == []
    assert (ordinary(database), parked(database)) == ([], [(KEY, SEARCH)])


def test_a_budget_without_a_row_stops_nobody(database):
    put(database, *(new(KEY, kind="find") for _ in range(3)))
    assert claimed_kinds(database)[0] == ["find"] * 3


def test_behind_the_jobs_of_a_spent_budget_another_budget_has_room_for_as_many_as_ever(database, clock, throttle):
    throttle(seconds=600)
    throttle(budget=MAIL)
    put(database, *(new(KEY, kind="find") for _ in range(6)))
    clock.advance(61)
    put(database, *(new(KEY, kind="send") for _ in range(3)))
    assert claimed_kinds(database, budgets=BOTH, per_key=4)[0] == ["send"], "one, as after every rest"
    assert claimed_kinds(database, budgets=BOTH, per_key=4)[0] == [], "as long as that one runs"


@pytest.mark.parametrize("kinds", [["find", "send"], ["send", "find"], ["find"] * 6 + ["send"]])
def test_a_key_whose_jobs_wait_for_two_budgets_waits_for_the_first_that_has_room(database, clock, throttle, kinds):
    throttle(seconds=600)
    throttle(budget=MAIL, seconds=9)
    for kind in kinds:
        put(database, new(KEY, kind=kind))
        clock.advance(0.001)
    assert claimed_kinds(database, budgets=BOTH, per_key=4)[0] == []
    assert parked(database) == [(KEY, MAIL)]
