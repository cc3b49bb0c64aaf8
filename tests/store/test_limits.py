"""Request limits on both databases."""

from itertools import pairwise

import pytest

from resilient import Limit
from resilient.core.gates.rate_limit import LimitState
from resilient.store.gates import limits
from resilient.store.gates.limits import Ask, Observation
from resilient.store.inspect import pages
from resilient.store.inspect.pages import LimitUse

FAST, SLOW = Limit(10, 1, burst=5, name="fast"), Limit(1, 10, burst=2, name="slow")


def draw(database, *asks, settled=()):
    return database.transaction_sync(limits.draw, asks, settled)


def states(database, *keys):
    return database.transaction_sync(limits.read, keys)


def test_draws_share_one_state(clock, database):
    found = draw(database, *[Ask((("p/a", SLOW),)) for _ in range(3)])
    assert [x.draw.granted for x in found] == [True, True, False]
    assert found[2].draw.at == pytest.approx(clock.now().timestamp() + 10, abs=1e-3)
    assert not draw(database, Ask((("p/a", SLOW),)))[0].draw.granted
    assert draw(database, Ask((("p/b", SLOW),)))[0].draw.granted
    clock.advance(10)
    assert draw(database, Ask((("p/a", SLOW),)))[0].draw.granted
    assert states(database, "p/a")["p/a"]["slow"].tat == pytest.approx(clock.now().timestamp() + 20, abs=1e-3)


def test_all_or_nothing_over_resources(clock, database):
    both = Ask((("p/a", FAST), ("p", SLOW)))
    assert [x.draw.granted for x in draw(database, both, both, both)] == [True, True, False]
    found = states(database, "p", "p/a")
    assert found["p/a"]["fast"].tat == pytest.approx(clock.now().timestamp() + 0.2, abs=1e-3)
    assert draw(database, both)[0].draw.by == 1
    assert states(database, "p", "p/a") == found


def test_patience_reserves(clock, database):
    asks = [Ask((("p/a", FAST),), patience=0.25) for _ in range(8)]
    found = draw(database, *asks)
    assert [round(x.draw.wait, 3) for x in found] == [0, 0, 0, 0, 0, 0.1, 0.2, 0]
    assert [x.draw.granted for x in found] == [True] * 7 + [False]


def test_more_is_leased_only_if_it_is_there(clock, database):
    assert draw(database, Ask((("p/a", FAST),), more=3))[0].leased == 3
    assert draw(database, Ask((("p/a", FAST),), more=3))[0].leased == 0
    clock.advance(0.4)
    assert draw(database, Ask((("p/a", FAST), ("p", SLOW)), more=3))[0].leased == 1  # what the slow one has left


def test_settling(clock, database):
    draw(database, Ask((("p/a", FAST),), cost=4))
    draw(database, settled=[limits.Settled("p/a", FAST, -3.0)])
    assert states(database, "p/a")["p/a"]["fast"].tat == pytest.approx(clock.now().timestamp() + 0.1, abs=1e-3)
    draw(database, settled=[limits.Settled("p/a", FAST, 7.0)])
    assert not draw(database, Ask((("p/a", FAST),)))[0].draw.granted


def test_a_place_in_the_middle_of_a_queue_is_given_to_nobody_else(clock, database):
    """Three wait for their moments; the first of them is not sent, and the last keeps its own."""
    limit = Limit(4, 1)
    now, ask = clock.now().timestamp(), Ask((("p/a", limit),), patience=2.0)
    _, first, *_, last = draw(database, *[ask] * 4)
    unsent = [limits.Settled("p/a", limit, -1.0, first.tats[0], unsent=True)]
    (later,) = draw(database, ask, settled=unsent)
    assert later.draw.at == pytest.approx(last.draw.at + limit.interval, abs=1e-3)
    both = [limits.Settled("p/a", limit, -1.0, one.tats[0], unsent=True) for one in (last, later)]
    (again,) = draw(database, ask, settled=both)
    assert again.draw.at == pytest.approx(last.draw.at, abs=1e-3)
    assert again.draw.at == pytest.approx(now + 3 * limit.interval, abs=1e-3)


def test_one_level_counts_when_another_lets_it_go(clock, database):
    """The provider's limit makes three wait for two seconds; the account's own still spaces them."""
    shared, own = Limit(100, 1, burst=1, name="app"), Limit(4, 1, name="own")
    draw(database, settled=[limits.Settled("p", shared, 190.0)])
    found = draw(database, *[Ask((("p", shared), ("p/a", own)), patience=9.0) for _ in range(3)])
    times = [one.draw.at for one in found]
    assert times[0] == pytest.approx(clock.now().timestamp() + 1.9, abs=1e-3)
    assert [b - a for a, b in pairwise(times)] == [pytest.approx(own.interval, abs=1e-3)] * 2


def test_what_the_server_says_holds_for_the_next_draw(clock, database):
    now = clock.now().timestamp()
    wide = Limit(1000, 60, burst=1000, name="wide")
    database.transaction_sync(limits.observe, [Observation("p/a", wide, 1, now + 30, now)])
    assert draw(database, Ask((("p/a", wide),)))[0].draw.granted
    refused = draw(database, Ask((("p/a", wide),)))[0].draw
    assert (refused.granted, refused.at) == (False, pytest.approx(now + 30, abs=1e-3))
    late = Observation("p/a", wide, 900, now + 30, now - 1)
    database.transaction_sync(limits.observe, [late])
    assert not draw(database, Ask((("p/a", wide),)))[0].draw.granted
    clock.advance(30)
    assert draw(database, Ask((("p/a", wide),)))[0].draw.granted


def test_a_limit_that_is_declared_anew_counts_the_same_units(clock, database):
    old, new = (Limit(rate, "1d", burst=burst, name="daily") for rate, burst in ((10, 10), (10_000, 1000)))
    assert draw(database, Ask((("p/a", old),), cost=10))[0].draw.granted
    assert not draw(database, Ask((("p/a", old),)))[0].draw.granted
    clock.advance(5)
    assert draw(database, Ask((("p/a", new),), cost=990))[0].draw.granted
    assert not draw(database, Ask((("p/a", new),)))[0].draw.granted
    found = states(database, "p/a")["p/a"]["daily"]
    assert (found.interval, found.drawn_at) == (8.64, pytest.approx(clock.now().timestamp(), abs=1e-3))
    draw(database, settled=[limits.Settled("p/a", old, 5.0)])  # by a worker that does not know the new one
    clock.advance(8.64 * 6 + 0.01)
    assert draw(database, Ask((("p/a", new),)))[0].draw.granted


def test_the_claims_draw_of_jobs_says_of_what_limit_it_was(database):
    old = LimitState(5.0, interval=2.0, drawn_at=3.0)
    keys = [("p/a", "j"), ("p/a", "~x")]
    database.transaction_sync(limits.insert, keys)
    database.transaction_sync(limits.write_tats, [("p/a", "j", old), ("p/a", "~x", LimitState(7.0))])
    assert states(database, "p/a") == {"p/a": {"j": old, "~x": LimitState(7.0)}}


def test_a_draw_locks_exactly_its_rows(postgres_database):
    """A job limit of the same name elsewhere is the claim's: a draw must not wait for it."""
    draw(postgres_database, Ask((("p/a", SLOW), ("p/b", FAST), ("p/b", Limit(1, 1, name="slow")))))
    with postgres_database.sync_engine.connect() as other, other.begin():
        d = postgres_database.dialect
        d.run(other, "SELECT 1 FROM {rate_limit} WHERE resource_key = 'p/b' AND name = 'slow' FOR UPDATE")

        def bounded(c, d):
            d.run(c, "SET LOCAL lock_timeout = '2s'")
            return limits.draw(c, d, [Ask((("p/a", SLOW), ("p/b", FAST)))])

        assert postgres_database.transaction_sync(bounded)[0].draw.granted


def test_what_a_provider_said_is_left_is_told_until_its_window_ends(clock, database):
    now = clock.now().timestamp()
    seen = [Observation("p/a", FAST, 3, now + 60, now), Observation("p/a", SLOW, 0, now + 5, now)]
    database.transaction_sync(limits.observe, seen)
    draw(database, Ask((("p/b", FAST),)))  # of which nobody said anything
    uses = database.transaction_sync(pages.limit_uses, ["p/a", "p/b"])
    assert uses == {"p/a": [LimitUse("fast", 3.0), LimitUse("slow", 0.0)]}
    clock.advance(10)
    assert database.transaction_sync(pages.limit_uses, ["p/a", "p/b"]) == {"p/a": [LimitUse("fast", 3.0)]}
