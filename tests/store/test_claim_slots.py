"""What a claim makes of a worker's slots: shares of accounts, batches, what is left for the turns it gives back."""

from datetime import timedelta

import pytest

from resilient import Limit
from resilient.core.gates.policy import Policies
from resilient.store.gates import controls, limits, resources
from tests.store.test_claim import NONE, keys, new, ordinary, put, take


@pytest.fixture
def put_in_order(database, clock):
    """Puts jobs one after the other, each a moment later than the one before: (key, kind, priority)."""

    def put_in_order(*jobs):
        for key, kind, priority in jobs:
            put(database, new(key, kind=kind, priority=priority))
            clock.advance(0.001)
        database.transaction_sync(resources.ensure, sorted({"a", *(key for key, _, _ in jobs)}))

    return put_in_order


def turns(database):
    """Of each key, the priority of its turn and what it is parked on."""
    rows = database.transaction_sync(
        lambda c, d: d.run(c, "SELECT resource_key, priority, parked_on FROM {turn} ORDER BY resource_key").all()
    )
    return [tuple(row) for row in rows]


# -- shares of accounts ----------------------------------------------------------------------------------------------


def test_the_accounts_that_have_work_are_asked_about(database):
    put(database, *[new(key) for key in ("a/1", "a/1/x", "a/2", "b/1")])
    calls = []
    take(database, rooms=lambda names: calls.append(names) or {})
    assert calls == [{"a/1", "a/2", "b/1"}]


def test_an_account_gets_no_more_than_its_room(database):
    """All of its keys together; what it may not have keeps its turn, and costs nobody else a slot."""
    put(database, *[new("a/1") for _ in range(3)], *[new("a/1/x") for _ in range(3)], *[new("a/2") for _ in range(3)])
    claimed = take(database, rooms=lambda _: {"a/1": 4, "a/2": 9})
    assert sorted(keys(claimed)) == ["a/1"] * 3 + ["a/1/x"] + ["a/2"] * 3
    assert (claimed.full, ordinary(database)) == ([], ["a/1/x"])
    claimed = take(database, rooms=lambda _: {"a/1": 0, "a/2": 9})
    assert (keys(claimed), claimed.full, ordinary(database)) == ([], ["a/1/x"], ["a/1/x"])
    claimed = take(database, rooms=lambda _: {"a/1": 1})
    assert (keys(claimed), claimed.full, ordinary(database)) == (["a/1/x"], [], ["a/1/x"])


def test_an_accounts_room_goes_to_its_keys_in_turn(database):
    """Whoever got nothing stands before whoever got a job: one key of an account never waits for the end of another."""
    put(database, *[new(key) for key in ("a/1", "a/1/x", "a/1/y") for _ in range(3)])
    rounds = [keys(take(database, rooms=lambda _: {"a/1": 1})) for _ in range(6)]
    assert rounds == [["a/1"], ["a/1/x"], ["a/1/y"]] * 2


def test_a_batch_takes_one_slot_of_an_accounts_room(database):
    put(database, *[new("a/1", kind="b") for _ in range(4)], *[new("a/1/x", kind="b") for _ in range(4)])
    claimed = take(database, kinds=["b"], batches={"b": 10}, rooms=lambda _: {"a/1": 1})
    assert (len(claimed.jobs), claimed.slots, len(claimed.full), len(ordinary(database))) == (4, 1, 1, 1)


@pytest.mark.parametrize(
    ("slots", "rooms", "full", "unserved"),
    [
        (1, {"a/1": 0, "a/2": 0}, ["a/1", "a/2"], 2),
        (1, {"a/1": 9, "a/2": 0}, [], 1),  # no slot is left: the account is not what stops it
        (2, {"a/1": 9, "a/2": 0}, ["a/2"], 1),
        (9, {"a/1": 9, "a/2": 1}, [], 0),
        (9, {}, [], 0),
    ],
)
def test_an_account_is_full_if_it_and_not_the_worker_has_no_room(database, put_in_order, slots, rooms, full, unserved):
    put_in_order(("a/1", "k", 0), ("a/2", "k", 0))
    claimed = take(database, slots=slots, rooms=lambda _: dict(rooms))
    assert (claimed.full, claimed.unserved) == (full, unserved)


# -- slots and batches -----------------------------------------------------------------------------------------------

JOBS = [("a/1", "k", 0)] * 3 + [("a/2", "k", 0)] * 2 + [("a/3", "b", 0)] * 4 + [("a/3", "k", 0)] * 2


@pytest.mark.parametrize(
    ("options", "numbers", "slots", "again"),
    [
        ({}, [3, 2, 6], 11, []),
        ({"slots": 4}, [3, 1, 0], 4, ["a/2", "a/3"]),
        ({"batches": {"b": 9}}, [3, 2, 4], 6, ["a/3"]),  # of one kind
        ({"batches": {"b": 2}}, [3, 2, 2], 6, ["a/3"]),
        ({"batches": {"b": 9}, "slots": 6}, [3, 2, 4], 6, ["a/3"]),
        ({"batches": {"b": 9}, "slots": 5}, [3, 2, 0], 5, ["a/3"]),
        ({"batches": {"b": 9}, "per_key": 1}, [1, 1, 4], 3, ["a/1", "a/2", "a/3"]),
    ],
)
def test_how_many_slots_are_used(database, put_in_order, options, numbers, slots, again):
    put_in_order(*JOBS)
    claimed = take(database, **{"kinds": ["k", "b"], **options})
    assert [keys(claimed).count(key) for key in ("a/1", "a/2", "a/3")] == numbers
    assert (claimed.slots, ordinary(database)) == (slots, again)


@pytest.mark.parametrize(("kinds", "number"), [("b", 1), ("bk", 1), ("bkk", 1), ("bbk", 2), ("bbb", 3)])
def test_a_batch_ends_before_the_first_job_of_another_kind(database, put_in_order, kinds, number):
    put_in_order(*(("a/1", kind, 0) for kind in kinds))
    claimed = take(database, kinds=["k", "b"], batches={"b": 9})
    assert ([row.kind for row in claimed.jobs], claimed.slots) == (["b"] * number, 1)


# -- the turns that are given back -----------------------------------------------------------------------------------

URGENT = [("a/1", "k", 5), ("a/1", "k", 3), ("a/1", "k", 1)]
CAP = Policies(concurrency={"a/1": 1})
BURST = Policies(limits={"a/1": [Limit(1, per=60, burst=2, counts="jobs", name="m")]})


@pytest.mark.parametrize(
    ("policies", "options", "given_back"),
    [
        (NONE, {"per_key": 1}, (3, None)),  # as urgent as the first job that is left
        (NONE, {"per_key": 2}, (1, None)),
        (NONE, {"slots": 0}, (5, None)),
        (CAP, {}, (3, "a/1")),
        (BURST, {}, (1, "a/1")),
        (NONE, {"kinds": ["other"]}, (5, None)),
    ],
)
def test_a_turn_is_as_urgent_as_what_is_left(database, put_in_order, policies, options, given_back):
    put_in_order(*URGENT)
    take(database, policies, **options)
    assert turns(database) == [("a/1", *given_back)]


def test_a_key_with_work_for_others_keeps_a_turn_as_urgent_as_it_was(database, put_in_order):
    put_in_order(("a/1", "other", 7), ("a/1", "k", 2))
    assert len(take(database).jobs) == 1
    assert turns(database) == [("a/1", 7, None)]


def test_a_turn_that_parks_before_any_job_is_read_stays_as_urgent(database, put_in_order):
    put_in_order(*URGENT)
    database.transaction_sync(controls.pause, "a", reason="maintenance")
    claimed = take(database)
    assert (claimed.jobs, claimed.stops["a/1"].gate, turns(database)) == ([], "pause", [("a/1", 5, "a")])


# -- what is left of a window ----------------------------------------------------------------------------------------

DAY = Limit(100, per=86400, name="day")


@pytest.fixture
def window(database, clock):
    """Sets what an account's provider said is left of its day."""

    def window(remaining):
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        at = clock.now().timestamp()
        seen = limits.Observation("a/1", DAY, remaining, at + 3600, at)
        database.transaction_sync(limits.observe, [seen])

    return window


@pytest.mark.parametrize(("remaining", "number"), [(100, 5), (3, 3), (0, 0)])
def test_no_more_jobs_start_than_requests_are_left_of_what_was_said(database, put_in_order, window, remaining, number):
    put_in_order(*[("a/1", "k", 0)] * 5)
    window(remaining)
    claimed = take(database, stated={"a/1": (DAY,)})
    assert (len(claimed.jobs), claimed.limited) == (number, True)
    assert len(take(database, stated={"a/1": (DAY,)}).jobs) == 0, "the running ones may have sent none yet"


def test_what_was_said_of_an_account_holds_for_no_other(database, put_in_order, window):
    put_in_order(*[("a/2", "k", 0)] * 5)
    window(0)
    claimed = take(database, stated={"a/1": (DAY,)})
    assert (len(claimed.jobs), claimed.limited) == (5, False)


def test_a_part_that_is_kept_for_urgent_jobs_is_for_them_alone(database, put_in_order, window):
    policies = Policies(reserve={"a/*": {5: 0.5}}, limits={"a/*": [DAY]})
    put_in_order(*[("a/1", "k", 5)] * 2, *[("a/1", "k", 0)] * 2)
    window(40)
    claimed = take(database, policies, slots=9)
    assert ([row.priority for row in claimed.jobs], turns(database)) == ([5, 5], [("a/1", 0, None)])
    claimed = take(database, policies, slots=9)
    assert (claimed.jobs, claimed.stops["a/1"].code) == ([], "reserve")


@pytest.mark.parametrize(
    ("policies", "limited"),
    [
        (NONE, False),
        (CAP, False),
        (BURST, True),
        (Policies(limits={"a": [DAY]}), True),
        (Policies(limits={"b": [DAY]}), False),
    ],
)
def test_a_claim_says_whether_a_key_of_its_paths_has_limits(database, put_in_order, policies, limited):
    put_in_order(*URGENT)
    assert take(database, policies, lease=timedelta(seconds=9)).limited is limited


@pytest.mark.parametrize("capped", ["a", "a/1"])
def test_what_runs_counts_for_a_cap(database, capped):
    policies = Policies(concurrency={capped: 3})
    put(database, *[new("a/1") for _ in range(5)])
    assert len(take(database, policies, slots=2).jobs) == 2
    assert len(take(database, policies).jobs) == 1
