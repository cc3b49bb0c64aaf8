"""When a parked turn is looked at again."""

from datetime import timedelta

from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.policy import Policies
from resilient.engine.run.sweeper import recheck
from resilient.store.gates import circuits, resources, turns


def parked(now, key, on, seconds):
    return turns.Parking(key, 0, on, now + timedelta(seconds=seconds), now + timedelta(seconds=60))


def test_a_key_that_is_parked_again_is_still_looked_at_in_time(database, clock):
    """Its own earlier turn is written over, so it must not count as the one that is looked at early."""
    now = clock.now()

    def twice(c, d):
        resources.ensure(c, d, ["crm/a", "crm/b", "crm"])
        turns.park(c, d, [parked(now, "crm/a", "crm", 2), parked(now, "crm/b", "crm", 2)], {})
        turns.park(c, d, [parked(now, "crm/a", "crm", 3)], {})

    database.transaction_sync(twice)
    released = database.transaction_sync(lambda c, d: turns.due_parked(c, d, now + timedelta(seconds=3)))
    assert list(released) == ["crm"]


def test_of_several_keys_parked_on_one_resource_only_the_first_is_looked_at_early(database, clock):
    now = clock.now()
    keys = [f"crm/{n}" for n in range(5)]

    def park(c, d):
        resources.ensure(c, d, [*keys, "crm"])
        turns.park(c, d, [parked(now, key, "crm", 2) for key in keys], {})
        return turns.due_parked(c, d, now + timedelta(seconds=2))

    assert {on: len(ids) for on, ids in database.transaction_sync(park).items()} == {"crm": 1}


def test_a_key_that_moves_to_another_resource_leaves_nobody_behind(database, clock):
    """The turn that was looked at early parks elsewhere: the others of its old resource still are looked at in time."""
    now = clock.now()

    def move(c, d):
        resources.ensure(c, d, ["crm/a", "crm/b", "crm"])
        turns.park(c, d, [parked(now, "crm/a", "crm", 2), parked(now, "crm/b", "crm", 2)], {})
        turns.park(c, d, [parked(now, "crm/a", "crm/a", 3)], {})

    database.transaction_sync(move)
    found = database.transaction_sync(lambda c, d: turns.due_parked(c, d, now + timedelta(seconds=3)))
    assert {on: len(ids) for on, ids in found.items()} == {"crm": 1, "crm/a": 1}


def test_keys_take_turns_at_probing_whatever_their_priority(database, clock):
    """One whose probe fails comes back first by priority, and last by age."""
    policies = Policies()

    def park(c, d, key, priority):
        turns.park(c, d, [turns.Parking(key, priority, "crm", clock.now(), clock.now())], {})

    def begin(c, d):
        resources.ensure(c, d, ["crm/ill", "crm/well", "crm"])
        shut = BreakerFacts("open", 1, open_until=clock.now(), opened_at=clock.now())
        circuits.write_breakers(c, d, [("crm", shut)], clock.now())
        park(c, d, "crm/ill", 9)
        park(c, d, "crm/well", 0)

    def probe(c, d):
        recheck(c, d, policies.for_key, 0.5)
        (turn,) = turns.take(c, d, turns.Selection(10))
        park(c, d, turn.resource_key, turn.priority)
        return turn.resource_key

    database.transaction_sync(begin)
    probed = []
    for _ in range(4):
        probed.append(database.transaction_sync(probe))
        clock.advance(61)
    assert probed == ["crm/ill", "crm/well", "crm/ill", "crm/well"]
