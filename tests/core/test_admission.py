"""How many may start, what stops the rest, and who probes."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.core.gates.admission import (
    Level,
    ResourceFacts,
    Stop,
    admit,
    needs_count,
    needs_lock,
    refusal,
    releasable,
    stop_of,
)
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.policy import BreakerPolicy, Policy
from resilient.core.gates.rate_limit import Limit, LimitState

NOW = datetime(2030, 1, 1, tzinfo=UTC)
EPOCH = NOW.timestamp()
PLAIN = Policy()


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def level(key="p/a", policy=PLAIN, limits=None, running=0, **facts):
    breaker = facts.pop("breaker", BreakerFacts())
    return Level(ResourceFacts(key, breaker, **facts), policy, limits or {}, running)


OPEN = BreakerFacts("open", 4, open_until=at(10), opened_at=at(-5))
DUE = replace(OPEN, open_until=at(-1))
HALF = BreakerFacts("half_open", 4, opened_at=at(-5), probe_owner="w9", probe_until=at(30))


def test_nothing_in_the_way():
    levels = [level("p/a", calm=True), level("p", calm=True)]
    verdict = admit(levels, 7, NOW, "w")
    assert (verdict.count, verdict.stop, verdict.probes) == (7, None, ())
    assert verdict.levels is levels  # not even copied
    assert admit([level("p/a"), level("p")], 7, NOW, "w").count == 7


@pytest.mark.parametrize(
    ("facts", "stop"),
    [
        ({"paused_at": at(-9), "paused_reason": "rent"}, Stop("p/a", "pause", None, at(-9), "rent")),
        ({"paused_at": at(-9), "paused_until": at(9)}, Stop("p/a", "pause", at(9), at(-9))),
        ({"auth": "needs_reauth", "auth_since": at(-3)}, Stop("p/a", "auth", None, at(-3), "needs_reauth")),
        (
            {"blocked_until": at(5), "blocked_since": at(-1), "blocked_code": "http_429"},
            Stop("p/a", "cooldown", at(5), at(-1), "http_429"),
        ),
        ({"breaker": OPEN}, Stop("p/a", "breaker", at(10), at(-5), "open")),
        ({"breaker": HALF}, Stop("p/a", "breaker", at(30), at(-5), "probing")),
        (
            {"breaker": BreakerFacts("isolated", 1, opened_at=NOW)},
            Stop("p/a", "breaker", None, NOW, "isolated"),
        ),
        ({"breaker": OPEN, "blocked_until": at(60)}, Stop("p/a", "cooldown", at(60))),  # the later one
    ],
)
def test_what_stops(facts, stop):
    shut = level(**facts)
    assert stop_of(shut.facts, NOW) == stop
    assert refusal(shut.facts, NOW) == stop
    verdict = admit([shut, level("p")], 3, NOW, "w")
    assert (verdict.count, verdict.stop, list(verdict.levels)) == (0, stop, [shut, level("p")])
    assert releasable(shut.facts, PLAIN, NOW, 100) == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"paused_at": at(-9), "paused_until": at(0)},
        {"blocked_until": at(0), "blocked_since": at(-5)},
        {"breaker": BreakerFacts("closed", 4, closed_at=at(-999))},
    ],
)
def test_what_is_over_stops_nothing(facts):
    assert stop_of(level(**facts).facts, NOW) is None
    assert admit([level(**facts)], 3, NOW, "w").count == 3
    assert releasable(level(**facts).facts, PLAIN, NOW, 100) == 100


def test_a_key_waits_where_it_waits_longest():
    verdict = admit([level(blocked_until=at(5)), level("p", blocked_until=at(50))], 1, NOW, "w")
    assert verdict.stop.resource == "p"
    verdict = admit([level(blocked_until=at(50)), level("p", blocked_until=at(5))], 1, NOW, "w")
    assert verdict.stop.resource == "p/a"
    verdict = admit([level(auth="needs_reauth"), level("p", paused_at=NOW)], 1, NOW, "w")
    assert verdict.stop.resource == "p"  # of equals the most general


# -- caps and ramps ------------------------------------------------------------------------------------------


def test_a_cap_leaves_room_for_some():
    capped = level("p", Policy(concurrency=5), running=3)
    verdict = admit([level(calm=True), capped], 4, NOW, "w")
    assert (verdict.count, verdict.stop) == (2, Stop("p", "concurrency"))
    assert verdict.levels[1].running == 5
    again = admit([level("p/b", calm=True), verdict.levels[1]], 1, NOW, "w")  # the next leaf of the claim
    assert (again.count, again.stop) == (0, Stop("p", "concurrency"))
    assert admit([replace(capped, running=9)], 1, NOW, "w").count == 0  # a cap that was lowered


def test_a_ramp_is_a_cap_that_grows():
    closed = BreakerFacts("closed", 4, closed_at=NOW)
    verdict = admit([level(breaker=closed)], 9, NOW, "w")
    assert (verdict.count, verdict.stop) == (2, Stop("p/a", "breaker", at(3), NOW, "ramp"))
    assert admit([level(breaker=closed, running=3)], 9, at(6), "w").count == 5
    assert admit([level(breaker=closed, running=3)], 9, at(30), "w").count == 9


# -- limits --------------------------------------------------------------------------------------------------


def test_job_limits_are_drawn():
    limited = level(policy=Policy(limits=(Limit(2, 1, burst=3, counts="jobs", name="j"),)))
    verdict = admit([limited], 5, NOW, "w")
    assert (verdict.count, verdict.stop.gate, verdict.stop.code) == (3, "limit", "j")
    assert verdict.stop.until == at(0.5)
    assert verdict.levels[0].limits["j"].tat == pytest.approx(EPOCH + 1.5, abs=1e-3)
    assert admit(verdict.levels, 1, NOW, "w").count == 0
    assert admit(verdict.levels, 1, at(0.51), "w").count == 1


def test_the_tightest_limit_decides():
    policy = Policy(
        limits=(Limit(9, 1, burst=9, counts="jobs"), Limit(1, 10, burst=2, counts="jobs", name="slow")),
        concurrency=5,
    )
    verdict = admit([level(policy=policy)], 9, NOW, "w")
    assert (verdict.count, verdict.stop.code) == (2, "slow")


def test_request_limits_are_looked_at_a_moment_ahead():
    limit = Limit(10, 1, burst=10, name="r")
    policy = Policy(limits=(limit,))
    assert admit([level(policy=policy)], 50, NOW, "w").count == 10 + 10  # there now, and back within a second
    empty = {"r": LimitState(tat=EPOCH + 1)}
    assert admit([level(policy=policy, limits=empty)], 50, NOW, "w").count == 10  # back within a second
    queue = {"r": LimitState(tat=EPOCH + 2)}
    verdict = admit([level(policy=policy, limits=queue)], 50, NOW, "w")
    assert (verdict.count, verdict.stop.until) == (0, at(0.1))


def test_leaves_of_one_provider_share_what_it_has_left():
    shared = level("p", Policy(limits=(Limit(10, 1, burst=4, name="r"),)))
    first = admit([level("p/a", calm=True), shared], 3, NOW, "w")
    second = admit([level("p/b", calm=True), first.levels[1]], 30, NOW, "w")
    assert (first.count, second.count) == (3, 4 - 3 + 10)  # what is there now and what comes within a second


def test_one_look_a_second_keeps_a_fast_limit_with_little_burst_busy():
    limit = Limit(10, 1, name="r")  # one at once, hardly ten a second
    policy = Policy(limits=(limit,))
    first = admit([level(policy=policy)], 50, NOW, "w")
    assert first.count == 1 + int(1 / limit.interval)
    assert first.stop.until <= at(limit.interval)


# -- probes --------------------------------------------------------------------------------------------------


def test_circuits_of_a_path_elect_one_job_together():
    lapsed = replace(HALF, probe_until=at(-1))
    verdict = admit([level(breaker=DUE), level("p", breaker=lapsed)], 5, NOW, "w")
    assert (verdict.count, verdict.probes) == (1, ("p/a", "p"))
    assert verdict.stop == Stop("p/a", "breaker", at(60), code="probing")
    for elected in verdict.levels:
        b = elected.facts.breaker
        assert (b.state, b.generation, b.probe_owner, b.probe_until) == ("half_open", 5, "w", at(60))
    assert admit(verdict.levels, 1, NOW, "w").count == 0


def test_or_none():
    for other in (
        level("p", breaker=HALF),
        level("p", paused_at=NOW),
        level("p", Policy(concurrency=1), running=1),
        level("p", Policy(limits=(Limit(1, 1, counts="jobs"),)), {"1/1s": LimitState(tat=EPOCH + 5)}),
    ):
        levels = [level(breaker=DUE), other]
        verdict = admit(levels, 5, NOW, "w")
        assert (verdict.count, verdict.probes, verdict.stop.resource) == (0, (), "p")
        assert list(verdict.levels) == levels


def test_a_probe_draws_like_any_job():
    verdict = admit(
        [level(policy=Policy(limits=(Limit(5, 1, burst=5, counts="jobs", name="j"),)), breaker=DUE)],
        1,
        NOW,
        "w",
    )
    assert verdict.count == 1
    assert verdict.levels[0].limits["j"].tat == pytest.approx(EPOCH + 0.2, abs=1e-3)


def test_a_due_circuit_lets_only_its_probe_go_on():
    due, half = level(breaker=DUE).facts, level(breaker=HALF).facts
    assert stop_of(due, NOW) is None
    assert refusal(due, NOW).gate == "breaker"  # a job that runs already is no probe
    assert refusal(due, NOW, probing=True).gate == "breaker"
    assert refusal(half, NOW).code == "probing"
    assert refusal(half, NOW, probing=True) is None
    assert refusal(replace(half, blocked_until=at(5)), NOW, probing=True).gate == "cooldown"


# -- what the claim must do ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "lock", "count"),
    [
        (level(calm=True), False, False),
        (level(blocked_until=at(-1)), False, False),
        (level(policy=Policy(concurrency=3), calm=True), True, True),
        (level(policy=Policy(limits=(Limit(1, 1, counts="jobs"),)), calm=True), True, False),
        (level(policy=Policy(limits=(Limit(1, 1),)), calm=True), False, False),
        (level(breaker=OPEN), True, False),
        (level(breaker=BreakerFacts("closed", 1, closed_at=at(-5))), True, True),
        (level(breaker=BreakerFacts("closed", 1, closed_at=at(-31))), False, False),
        (
            level(policy=Policy(breaker=BreakerPolicy(ramp=0)), breaker=BreakerFacts(closed_at=NOW)),
            False,
            False,
        ),
    ],
)
def test_what_needs_a_lock_and_a_count(subject, lock, count):
    assert needs_lock(subject.facts, subject.policy, NOW) is lock
    assert needs_count(subject.facts, subject.policy, NOW) is count


def test_releasable():
    assert releasable(level(calm=True).facts, PLAIN, NOW, 200) == 200
    assert releasable(level(breaker=DUE).facts, PLAIN, NOW, 200) == 1
    ramping = level(breaker=BreakerFacts("closed", 1, closed_at=NOW)).facts
    assert [releasable(ramping, PLAIN, at(s), 200) for s in (0, 6, 29, 30)] == [2, 8, 200, 200]


# -- whatever comes ------------------------------------------------------------------------------------------

breakers = st.builds(
    BreakerFacts,
    state=st.sampled_from(["closed", "open", "half_open", "isolated"]),
    generation=st.integers(0, 5),
    open_until=st.one_of(st.none(), st.integers(-20, 20).map(at)),
    probe_until=st.one_of(st.none(), st.integers(-20, 20).map(at)),
    closed_at=st.one_of(st.none(), st.integers(-60, 0).map(at)),
)
policies = st.builds(
    Policy,
    limits=st.lists(
        st.builds(Limit, st.integers(1, 20), st.sampled_from([1, 60]), counts=st.sampled_from(["jobs", "requests"])),
        max_size=2,
        unique_by=lambda limit: limit.name,
    ).map(tuple),
    concurrency=st.one_of(st.none(), st.integers(1, 5)),
)
levels = st.builds(
    Level,
    st.builds(
        ResourceFacts,
        st.just("k"),
        breakers,
        blocked_until=st.one_of(st.none(), st.integers(-20, 20).map(at)),
        paused_at=st.one_of(st.none(), st.just(at(-9))),
        auth=st.sampled_from(["ok", "ok", "ok", "needs_reauth"]),
    ),
    policies,
    st.just({}),
    st.integers(0, 6),
)


@given(st.lists(levels, min_size=1, max_size=4), st.integers(1, 20))
@settings(max_examples=400, deadline=None)
def test_admission_keeps_every_gate(path, wanted):
    path = [replace(x, facts=replace(x.facts, key=f"k{n}")) for n, x in enumerate(path)]
    verdict = admit(path, wanted, NOW, "w")
    assert 0 <= verdict.count <= wanted
    assert (verdict.stop is None) == (verdict.count == wanted)
    shut = [x for x in path if stop_of(x.facts, NOW) is not None]
    assert not (shut and verdict.count)
    troubled = tuple(x.facts.key for x in path if x.facts.breaker.state != "closed")
    assert verdict.probes == (troubled if verdict.count else ())
    if troubled and verdict.count:
        assert verdict.count == 1
    for before, now in zip(path, verdict.levels, strict=True):
        if not verdict.count:
            assert now == before
        cap = before.policy.concurrency
        assert cap is None or not verdict.count or now.running <= cap
    # admitting on until nothing more goes never passes a cap or a job limit's burst
    total, current = 0, verdict
    for _ in range(50):
        total += current.count
        current = admit(current.levels, wanted, NOW, "w")
    bounds = [x.policy.concurrency - x.running for x in path if x.policy.concurrency is not None]
    bounds += [limit.capacity for x in path for limit in x.policy.job_limits]
    assert all(total <= bound for bound in bounds if total)


def test_a_claim_over_many_leaves_never_passes_the_shared_cap():
    shared, started = level("p", Policy(concurrency=7)), 0
    for n in range(10):
        verdict = admit([level(f"p/{n}", calm=True), shared], 2, NOW, "w")
        started += verdict.count
        shared = verdict.levels[1]
    assert started == 7


def test_the_ramp_never_shrinks():
    b = BreakerFacts("closed", 1, closed_at=NOW)
    counts = [admit([level(breaker=b)], 5000, at(s / 10), "w").count for s in range(310)]
    assert all(a <= z for a, z in pairwise(counts))
    assert (counts[0], counts[-1]) == (2, 5000)
