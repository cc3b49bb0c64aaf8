"""Request limits on both databases."""

import pytest

from resilient.core.limit import Limit
from resilient.store import limits
from resilient.store.limits import Ask, Seen

FAST, SLOW = Limit(10, 1, burst=5, name="fast"), Limit(1, 10, burst=2, name="slow")


def draw(database, *asks, settled=()):
    return database.transaction_sync(limits.draw, asks, settled)


def states(database, *keys):
    return database.transaction_sync(limits.read, keys)


def test_draws_share_one_state(clock, database):
    found = draw(database, *[Ask((("p/a", SLOW),)) for _ in range(3)])
    assert [x.draw.granted for x in found] == [True, True, False]
    assert found[2].draw.until == pytest.approx(clock.now().timestamp() + 10, abs=1e-3)
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


def test_what_the_server_says_holds_for_the_next_draw(clock, database):
    now = clock.now().timestamp()
    wide = Limit(1000, 60, burst=1000, name="wide")
    database.transaction_sync(limits.observe, [Seen("p/a", wide, 1, now + 30, now)])
    assert draw(database, Ask((("p/a", wide),)))[0].draw.granted
    refused = draw(database, Ask((("p/a", wide),)))[0].draw
    assert (refused.granted, refused.until) == (False, pytest.approx(now + 30, abs=1e-3))
    late = Seen("p/a", wide, 900, now + 30, now - 1)
    database.transaction_sync(limits.observe, [late])
    assert not draw(database, Ask((("p/a", wide),)))[0].draw.granted
    clock.advance(30)
    assert draw(database, Ask((("p/a", wide),)))[0].draw.granted


def test_forgetting(database):
    draw(database, Ask((("p/a", SLOW), ("p", SLOW)), cost=2))
    assert database.transaction_sync(limits.forget, "p/a") == 1
    assert set(states(database, "p", "p/a")) == {"p"}


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
