"""What the gates' transactions decide in between their statements."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient import Limit
from resilient.core.gates import rate_limit
from resilient.core.gates.admission import ResourceFacts
from resilient.core.gates.breaker import BreakerFacts, Report
from resilient.core.gates.learnt import Learnt
from resilient.core.gates.rate_limit import LimitState
from resilient.store.db.dialect import Dialect
from resilient.store.gates import circuits, controls, limits, turns
from resilient.store.gates.limits import Ask, Settled
from resilient.store.gates.turns import Selection, Turn

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
AT = NOW.timestamp()
LIMIT = Limit(1, 10, burst=3, name="slow")  # a unit each ten seconds


TAKEN = [("p/a", 0, 5), ("p/b", 7, 9), ("p/a", 7, 8), ("p/c", 0, 2), ("p/b", 7, 3)]


@pytest.mark.parametrize(
    ("oldest_first", "expected"),
    [
        (False, [Turn("p/b", 7, 3), Turn("p/a", 7, 8), Turn("p/c", 0, 2)]),
        (True, [Turn("p/c", 0, 2), Turn("p/b", 7, 3), Turn("p/a", 7, 8)]),
    ],
)
def test_a_key_has_one_turn_its_best_and_then_its_oldest(oldest_first, expected):
    assert turns.best_of_each(TAKEN, Selection(10, oldest_first=oldest_first)) == expected


DRAWN = LimitState(tat=AT + 20, remaining=5.0, reset_at=AT + 60, observed_at=AT)


@pytest.mark.parametrize(
    ("settled", "expected"),
    [
        (Settled("p/a", LIMIT, 2, AT + 20), rate_limit.take(LIMIT, DRAWN, 2, AT)),
        (Settled("p/a", LIMIT, 0.5), rate_limit.take(LIMIT, DRAWN, 0.5, AT)),
        (Settled("p/a", LIMIT, -1, AT + 20, unsent=True), rate_limit.give_back(LIMIT, DRAWN, 1, AT, AT + 20)),
        (Settled("p/a", LIMIT, -1, AT + 10, unsent=True), rate_limit.give_back(LIMIT, DRAWN, 1, AT, AT + 10)),
        (Settled("p/a", LIMIT, -1, AT + 10), rate_limit.refund(LIMIT, DRAWN, 1, AT, AT + 10)),
        (Settled("p/a", LIMIT, -1), rate_limit.refund(LIMIT, DRAWN, 1, AT)),
        (Settled("p/a", LIMIT, -1, unsent=True), rate_limit.refund(LIMIT, DRAWN, 1, AT)),
        (Settled("p/a", LIMIT, 0), rate_limit.refund(LIMIT, DRAWN, 0, AT)),
    ],
)
def test_what_is_settled_is_drawn_given_back_or_refunded(settled, expected):
    assert limits._settle(settled, DRAWN, AT) == expected


def test_those_ways_of_settling_differ():
    """Else the table above would hold nothing."""
    ways = [rate_limit.give_back(LIMIT, DRAWN, 1, AT, AT + 10), rate_limit.refund(LIMIT, DRAWN, 1, AT, AT + 10)]
    assert [state.tat - AT for state in ways] == [20, 10]


def test_fewer_units_come_back_while_later_draws_wait_for_their_moments():
    ahead = LimitState(AT + 100)
    assert limits._settle(Settled("p/a", LIMIT, -3, AT + 20), ahead, AT).tat == AT + 80
    assert limits._settle(Settled("p/a", LIMIT, -3), ahead, AT).tat == AT + 70


@pytest.mark.parametrize(
    ("ask", "granted", "leased", "tat"),
    [
        (Ask((("p/a", LIMIT),)), True, 0, 10),
        (Ask((("p/a", LIMIT),), more=1), True, 1, 20),
        (Ask((("p/a", LIMIT),), more=9), True, 2, 30),
        (Ask((("p/a", LIMIT),), cost=3, more=9), True, 0, 30),
        (Ask((("p/a", LIMIT),), cost=9, more=9), False, 0, 0),
        (Ask((("p/a", LIMIT),), lead=5), True, 0, 15),
    ],
)
def test_further_units_are_leased_of_what_is_there_at_once(ask, granted, leased, tat):
    drawn = limits._draw(ask, {("p/a", "slow"): LimitState(AT)}, AT)
    assert (drawn.draw.granted, drawn.leased, drawn.now) == (granted, leased, AT)
    assert drawn.tats == (AT + tat,)


def test_who_has_to_wait_leases_nothing():
    drawn = limits._draw(Ask((("p/a", LIMIT),), patience=10, more=9), {("p/a", "slow"): LimitState(AT + 30)}, AT)
    assert (drawn.draw.granted, drawn.draw.wait, drawn.leased, drawn.tats) == (True, 10, 0, (AT + 40,))


def test_a_slow_start_keeps_what_was_learnt_under_a_new_generation():
    facts = ResourceFacts("p/a", revision=7, learnt=Learnt(rate=5.0, generation=3, used_at=AT))
    now = controls._slow_start(facts, NOW)
    assert (now.rate, now.generation, now.previous, now.resumes_at, now.since) == (5.0, 8, 3, AT, AT)
    later = controls._slow_start(facts, NOW, NOW + timedelta(minutes=1))
    assert (later.resumes_at, later.since) == (AT + 60, AT)


def test_what_was_learnt_too_long_ago_is_forgotten_by_a_slow_start():
    facts = ResourceFacts("p/a", learnt=Learnt(rate=5.0, generation=3, used_at=AT - 400 * 86400))
    assert controls._slow_start(facts, NOW).rate is None


@pytest.mark.parametrize(
    ("probe", "until", "floor", "expected"),
    [
        (True, 60, None, 60),
        (True, 60, 30, 60),
        (True, 60, 90, 90),
        (True, 0, None, None),
        (True, None, 30, 30),
        (False, 60, None, None),
    ],
)
def test_the_report_of_a_probe_waits_for_the_end_of_a_cooldown(probe, until, floor, expected):
    def at(seconds):
        return None if seconds is None else NOW + timedelta(seconds=seconds)

    report = Report(generation=1, failed=1, probe=probe, floor_until=at(floor))
    assert circuits._rested(report, ResourceFacts("p/a", blocked_until=at(until)), NOW).floor_until == at(expected)


def test_a_circuit_is_written_in_full():
    moments = [NOW + timedelta(seconds=n) for n in range(4)]
    b = BreakerFacts(
        "half_open", 4, open_until=moments[0], opened_at=moments[1], closed_at=moments[2], reopens=2,
        probe_owner="w", probe_until=moments[3],
    )  # fmt: skip
    d = Dialect("postgresql")
    assert circuits._circuit(d, "p/a", b) == {
        "key": "p/a", "breaker": "half_open", "generation": 4, "open_until": d.time(moments[0]),
        "opened_at": d.time(moments[1]), "closed_at": d.time(moments[2]), "reopens": 2, "probe_owner": "w",
        "probe_until": d.time(moments[3]),
    }  # fmt: skip
