"""The circuit breaker: its table of steps, and a machine that tries to break it."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilient.core.base.errors import InvalidInput
from resilient.core.gates.breaker import (
    BreakerFacts,
    Report,
    Window,
    elect,
    electable,
    growth,
    ill_enough,
    isolate,
    orphaned,
    ramp_allowance,
    ramp_step,
    report,
    reset,
)
from resilient.core.gates.policy import BreakerPolicy

NOW = datetime(2030, 1, 1, tzinfo=UTC)
P = BreakerPolicy()


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def failed(count=1, *, generation=0, children=(".",), **more):
    return Report(generation, failed=count, trailing=count, children_failed=frozenset(children), **more)


def ok(count=1, *, generation=0, children=(".",), **more):
    return Report(generation, ok=count, children_ok=frozenset(children), **more)


def after(*reports, policy=P, seconds=0, b=None, root=False):
    b = b or BreakerFacts()
    for r in reports:
        b = report(b, r, policy, at(seconds), 0.5, root=root)
    return b


OPEN = after(failed(5))
HALF = elect(OPEN, "w1", P, at(20))


# -- the table -----------------------------------------------------------------------------------------------


def test_a_streak_opens():
    assert after(failed(4)).state == "closed"
    assert after(failed(4), ok(), failed(4)).state == "closed"
    assert OPEN.state == "open"
    assert (OPEN.generation, OPEN.opened_at, OPEN.reopens, OPEN.closed_at) == (1, NOW, 0, None)
    assert OPEN.open_until == at(18.75)  # 15 s, and up to half of it more


def test_a_mixed_report_counts_the_failures_after_its_last_ok():
    mixed = Report(0, ok=3, failed=9, trailing=2, children_ok=frozenset("."), children_failed=frozenset("x"))
    assert after(mixed, policy=BreakerPolicy(ratio=None)).streak == 2


def test_a_ratio_opens():
    quiet = BreakerPolicy(streak=None)
    half = [ok(), failed()] * 9
    assert after(*half, policy=quiet).state == "closed"  # 18 requests are too few
    assert after(*half, ok(), failed(), policy=quiet).state == "open"
    assert after(*half, ok(), ok(), ok(), failed(), policy=quiet).state == "closed"


def test_the_window_forgets():
    quiet = BreakerPolicy(streak=None)
    b = after(failed(10), ok(9), policy=quiet)
    assert after(failed(1), policy=quiet, b=b, seconds=59).state == "open"
    assert after(failed(1), policy=quiet, b=b, seconds=61).state == "closed"
    assert after(failed(1), policy=quiet, b=b, seconds=10_000).window.failed == 1


def test_success_alone_never_opens():
    b = replace(after(failed(4)), streak=7)  # as a lower limit at runtime would leave it
    assert after(ok(), b=b).state == "closed"


@pytest.mark.parametrize("switch", [{"streak": None}, {"ratio": None}])
def test_either_trigger_can_be_off(switch):
    assert after(failed(30), policy=BreakerPolicy(**switch)).state == "open"
    assert after(failed(30), policy=BreakerPolicy(streak=None, ratio=None)).state == "closed"


def test_a_stale_generation_changes_nothing():
    for b in (BreakerFacts(generation=3), replace(OPEN, generation=3), replace(HALF, generation=3)):
        for r in (failed(99, generation=2, probe=True), ok(generation=4, probe=True)):
            assert report(b, r, P, at(30), 0.5) is b


def test_only_its_time_makes_it_electable():
    assert not electable(BreakerFacts(), NOW)
    assert not electable(OPEN, at(18.7))
    assert electable(OPEN, at(18.75))
    assert (HALF.state, HALF.generation, HALF.probe_owner, HALF.probe_until) == ("half_open", 2, "w1", at(80))
    assert not electable(HALF, at(79))
    assert electable(HALF, at(80))  # a dead probe is replaced
    again = elect(HALF, "w2", P, at(80))
    assert (again.generation, again.probe_owner) == (3, "w2")
    assert report(again, ok(generation=2, probe=True), P, at(81), 0.5) is again  # the dead probe's late success


def test_the_probe_decides():
    closed = report(HALF, ok(generation=2, probe=True), P, at(21), 0.5)
    assert closed == BreakerFacts("closed", 3, closed_at=at(21))
    reopened = report(HALF, failed(generation=2, probe=True), P, at(21), 0.5)
    assert (reopened.state, reopened.generation, reopened.reopens) == ("open", 3, 1)
    assert (reopened.open_until, reopened.opened_at) == (at(21 + 37.5), NOW)
    neutral = report(HALF, Report(2, probe=True), P, at(21), 0.5)
    assert (neutral.state, neutral.reopens, neutral.open_until) == ("open", 0, at(22))
    throttled = report(HALF, Report(2, probe=True, floor_until=at(90)), P, at(21), 0.5)
    assert throttled.open_until == at(90)


def test_only_the_probe_decides():
    assert report(HALF, ok(generation=2), P, at(21), 0.5) is HALF
    assert report(HALF, failed(9, generation=2), P, at(21), 0.5) is HALF


def test_open_times_double_are_jittered_and_end():
    b, shortest, longest = OPEN, [], []
    for _ in range(9):
        half = elect(b, "w", P, at(0))
        now = at(0)
        r = failed(generation=half.generation, probe=True)
        shortest.append((report(half, r, P, now, 0.0).open_until - now).total_seconds())
        b = report(half, r, P, now, 0.999999)
        longest.append(round((b.open_until - now).total_seconds()))
    assert shortest == [30, 60, 120, 240, 400, 400, 400, 400, 400]
    assert longest == [45, 90, 180, 360, 600, 600, 600, 600, 600]


@pytest.mark.parametrize("roll", [0.0, 0.5, 0.999999])
@pytest.mark.parametrize(("first", "longest"), [(15, 600), (300, 600), (300, 300), (500, 600), (0.5, 0.6)])
def test_the_first_open_time_is_the_shortest_and_the_longest_the_longest(first, longest, roll):
    policy, b = BreakerPolicy(first_open=first, longest_open=longest), BreakerFacts()
    b = report(b, failed(5), policy, NOW, roll)
    for _ in range(8):
        assert first <= (b.open_until - NOW).total_seconds() <= longest
        half = elect(b, "w", policy, NOW)
        b = report(half, failed(generation=half.generation, probe=True), policy, NOW, roll)


@pytest.mark.parametrize("wrong", [{"first_open": 900}, {"children": 1}, {"children": 17}])
def test_a_policy_that_cannot_be_kept_is_refused(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        BreakerPolicy(**wrong)


def test_a_told_time_is_a_floor():
    assert after(failed(5, floor_until=at(300))).open_until == at(300)
    assert after(failed(5, floor_until=at(1))).open_until == at(18.75)


def test_growth_comes_down_step_by_step():
    b = BreakerFacts("closed", 9, closed_at=NOW, reopens=3)
    assert [growth(b, P, at(s)) for s in (0, 59, 60, 119, 120, 180, 9999)] == [3, 3, 2, 2, 1, 0, 0]
    flapping = after(failed(5, generation=9), b=b, seconds=61)
    assert (flapping.reopens, flapping.open_until) == (2, at(61 + 75))


def test_a_settled_circuit_forgets_the_outage():
    b = BreakerFacts("closed", 9, closed_at=NOW, reopens=3)
    assert after(ok(generation=9), b=b, seconds=179).closed_at == NOW
    settled = after(ok(generation=9), b=b, seconds=180)
    assert (settled.closed_at, settled.reopens, settled.generation) == (None, 0, 9)


def test_ramp():
    closed = BreakerFacts("closed", 3, closed_at=NOW)
    assert [ramp_allowance(closed, P, at(s)) for s in (0, 2.9, 3, 6, 15, 29, 30)] == [
        2,
        2,
        4,
        8,
        64,
        1024,
        None,
    ]
    assert ramp_allowance(closed, P, at(-5)) == 2  # a clock that went back
    assert ramp_allowance(BreakerFacts(), P, NOW) is None
    assert ramp_allowance(closed, BreakerPolicy(ramp=0), NOW) is None


def test_isolated_until_closed_or_for_a_time():
    for b in (BreakerFacts(generation=1), OPEN, HALF):
        shut = isolate(b, NOW)
        assert (shut.state, shut.generation, shut.open_until) == ("isolated", b.generation + 1, None)
        assert not electable(shut, at(1e9))
        assert report(shut, ok(generation=shut.generation, probe=True), P, NOW, 0.5) is shut
    timed = isolate(BreakerFacts(), NOW, at(60))
    assert (electable(timed, at(59)), electable(timed, at(60))) == (False, True)


def test_reset_by_hand_ramps():
    b = reset(replace(HALF, reopens=5), at(30))
    assert b == BreakerFacts("closed", 3, closed_at=at(30))


# -- children ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ill", "well", "root", "below"),
    [
        ("a", "", False, True),  # the only active child
        ("a", "b", False, False),
        ("ab", "", False, True),
        ("ab", "c", False, False),
        ("abc", "", True, True),
        ("abc", "def", True, True),
        ("abc", "defg", False, True),  # most accounts work
        (".", "", True, True),  # work on the very key: no other circuit is there for it
        (".", "a", False, False),
        (".a", "", True, True),
        (".ab", "cd", True, True),
        ("", "", False, False),
        ("", "abc", False, False),
    ],
)
def test_enough_children_are_ill(ill, well, root, below):
    assert ill_enough(set(ill), set(well), 3, root=True) == root
    assert ill_enough(set(ill), set(well), 3, root=False) == below
    reports = [ok(children=(child,)) for child in well] + [failed(9, children=(child,)) for child in ill]
    assert after(*reports, root=True).state == ("open" if root else "closed")
    assert after(*reports).state == ("open" if below else "closed")


@given(st.sets(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefgh")), st.integers(2, 16))
def test_a_root_never_opens_on_one_childs_failures(ill, well, children):
    assert not (len(ill) < 2 and ill_enough(ill, well - ill, children, root=True))
    if ill_enough(ill, well - ill, children, root=True):
        assert len(ill) >= children
        assert len(ill) >= len(well - ill)


def test_a_child_that_works_again_is_no_longer_ill():
    sick = [failed(2, children=("a",)), ok(children=("b",)), failed(2, children=("b",))]
    b = after(*sick, ok(children=("c",)), ok(children=("a",)), failed(9, children=("b",)))
    assert (b.state, set(b.window.ill), set(b.window.well)) == ("closed", {"b"}, {"a", "c"})


def test_children_are_forgotten_after_the_window():
    b = after(ok(children=("a",)), ok(children=("b",)))
    assert after(failed(9, children=("x",)), b=b, seconds=59).state == "closed"
    assert after(failed(9, children=("x",)), b=b, seconds=61).state == "open"


def test_the_memory_of_children_is_bounded():
    b = after(*[ok(children=(f"c{n}",)) for n in range(500)])
    b = after(
        *[failed(1, children=(f"c{n}",)) for n in range(0, 500, 2)],
        b=b,
        policy=BreakerPolicy(streak=None, ratio=None),
    )
    assert len(json.dumps(b.window.to_json())) < 1000


def test_a_window_survives_json():
    w = after(ok(), failed(2, children=("a", "b"))).window
    assert Window.from_json(json.loads(json.dumps(w.to_json()))) == w
    assert Window.from_json(None) == Window()


@pytest.mark.parametrize(
    ("state", "owner", "lost", "answer"),
    [
        ("half_open", "w1", {"w1", "w2"}, True),
        ("half_open", "w3", {"w1", "w2"}, False),
        ("open", "w1", {"w1"}, False),
    ],
)
def test_whose_probe_is_lost(state, owner, lost, answer):
    assert orphaned(BreakerFacts(state, probe_owner=owner), lost) is answer


# -- what each step leaves of the others ------------------------------------------------------------------------------

USED = BreakerFacts(
    "closed", 7, open_until=at(-50), opened_at=at(-90), closed_at=at(-40), reopens=3, streak=2, window_at=at(-9),
    window=Window(1, 2, 3, 4, {"a": 1.0}, {"b": 2.0}),
)  # fmt: skip
PROBED = replace(USED, state="half_open", probe_owner="w", probe_until=at(9), closed_at=None)


def test_what_each_step_leaves():
    opened = replace(USED, state="open", generation=8, closed_at=None)
    assert elect(opened, "w9", P, NOW) == replace(
        opened, state="half_open", generation=9, probe_owner="w9", probe_until=at(60)
    )
    assert elect(replace(opened, opened_at=None), "w9", P, NOW).opened_at == NOW
    assert isolate(PROBED, NOW, at(5)) == replace(
        PROBED, state="isolated", generation=8, open_until=at(5), opened_at=NOW, probe_owner=None, probe_until=None
    )
    assert reset(PROBED, NOW) == BreakerFacts("closed", 8, closed_at=NOW)
    probe = Report(7, ok=1, probe=True)
    assert report(PROBED, probe, P, NOW, 0.5) == BreakerFacts("closed", 8, closed_at=NOW, reopens=3)
    again = report(PROBED, replace(probe, ok=0, failed=1), P, NOW, 0.0)
    assert again == replace(
        PROBED, state="open", generation=8, open_until=at(240), reopens=4, probe_owner=None, probe_until=None
    )
    neutral = report(PROBED, replace(probe, ok=0), P, NOW, 0.0)
    assert neutral == replace(again, open_until=at(1), reopens=3)


def test_a_trip_leaves_nothing_of_the_closing_before():
    b = BreakerFacts(generation=7, closed_at=at(-40), reopens=3)
    b = report(b, failed(5, generation=7, children=("a",)), P, NOW, 0.5)
    assert (b.state, b.generation, b.opened_at, b.closed_at, b.reopens, b.open_until) == (
        "open", 8, NOW, None, 3, at(150),
    )  # fmt: skip


@pytest.mark.parametrize("count", [{"failed": 1}, {}])
def test_a_probe_dates_a_circuit_that_has_no_date_and_waits_for_the_time_that_it_was_given(count):
    b = report(BreakerFacts("half_open", 2), Report(2, probe=True, floor_until=at(999), **count), P, NOW, 0.5)
    assert (b.state, b.opened_at, b.open_until) == ("open", NOW, at(999))


def test_open_times_end_however_often_it_opened():
    often = replace(PROBED, reopens=5000)
    again = report(often, Report(7, failed=1, probe=True), P, NOW, 0.0)
    assert (again.reopens, again.open_until) == (32, at(400))


@pytest.mark.parametrize(
    ("closed", "reopens", "left"),
    [(None, 3, 3), (0, 3, 3), (-59, 3, 3), (-60, 3, 2), (-600, 3, 0), (5, 3, 3), (3600, 3, 3)],
)
def test_growth(closed, reopens, left):
    b = BreakerFacts(closed_at=None if closed is None else at(closed), reopens=reopens)
    assert growth(b, P, NOW) == left


def test_a_ramp_of_nothing_and_one_that_is_half_over():
    closed = BreakerFacts(closed_at=NOW)
    assert ramp_allowance(closed, BreakerPolicy(ramp=0), at(-5)) is None
    assert ramp_allowance(closed, BreakerPolicy(ramp=0.5), NOW) == 2
    assert ramp_allowance(replace(closed, state="open"), P, NOW) is None
    assert ramp_step(BreakerPolicy(ramp=5)) == timedelta(seconds=0.5)
    settling = BreakerPolicy(ramp=500, calm=1)
    assert after(ok(), b=closed, policy=settling, seconds=499).closed_at == NOW
    assert after(ok(), b=closed, policy=settling, seconds=500).closed_at is None


@pytest.mark.parametrize(
    ("seconds", "counts", "window_at"),
    [
        (-31, (1, 2, 0, 0), -31),  # a clock that was wrong
        (-30, (6, 8, 7, 8), 0),
        (29, (6, 8, 7, 8), 0),
        (30, (1, 2, 5, 6), 30),
        (59, (1, 2, 5, 6), 30),
        (60, (1, 2, 0, 0), 60),
    ],
)
def test_a_window_has_two_halves(seconds, counts, window_at):
    b = BreakerFacts(window_at=NOW, window=Window(5, 6, 7, 8))
    counted = after(Report(0, ok=1, failed=2), b=b, seconds=seconds)
    w = counted.window
    assert ((w.ok, w.failed, w.ok_before, w.failed_before), counted.window_at) == (counts, at(window_at))
    assert after(Report(0), b=b, seconds=seconds) is b, "neutral"


def test_of_the_children_the_latest_are_kept():
    policy, b = BreakerPolicy(streak=None, ratio=None), BreakerFacts()
    for second in range(20):
        b = after(
            failed(children=(f"ill{second:02}",)),
            ok(children=(f"well{second:02}",)),
            b=b,
            policy=policy,
            seconds=second,
        )
    assert set(b.window.ill) == {f"ill{second:02}" for second in range(4, 20)}
    assert b.window.well == {f"well{second:02}": at(second).timestamp() for second in range(4, 20)}
    over = after(failed(children=("new",)), b=b, policy=policy, seconds=4 + 60)
    assert set(over.window.well) == {f"well{second:02}" for second in range(5, 20)}, "a window ago is too long ago"


@pytest.mark.parametrize(
    ("policy", "counts", "streak", "state"),
    [
        ({"streak": 3, "ratio": None}, (0, 0, 0, 0), 1, "closed"),
        ({"streak": 3, "ratio": None}, (0, 0, 0, 0), 2, "open"),
        ({"streak": 3, "volume": 9}, (0, 0, 0, 9), 0, "open"),
        ({"streak": None, "volume": 9}, (0, 7, 0, 0), 0, "closed"),
        ({"streak": None, "volume": 9}, (2, 3, 2, 1), 0, "open"),  # 5 of 9
        ({"streak": None, "volume": 9}, (1, 2, 4, 1), 0, "closed"),  # 4 of 9
        ({"streak": None, "volume": 10, "ratio": 0.5}, (2, 3, 3, 1), 0, "open"),  # 5 of 10
    ],
)
def test_what_trips(policy, counts, streak, state):
    b = BreakerFacts(streak=streak, window_at=NOW, window=Window(*counts))
    assert after(failed(), b=b, policy=BreakerPolicy(**policy)).state == state


def test_a_window_as_json():
    window = Window(1, 2, 3, 4, {"a": 1.0}, {"b": 2.0})
    doc = {"n": [1, 2, 3, 4], "well": {"a": 1.0}, "ill": {"b": 2.0}}
    assert (window.to_json(), Window.from_json(doc)) == (doc, window)
    assert Window.from_json({}) == Window()


# -- the machine ---------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Workers send requests and report late, in any order, lose probes, and operators meddle."""

    def __init__(self):
        super().__init__()
        self.b = BreakerFacts()
        self.now = NOW
        self.policy = BreakerPolicy(volume=4, ramp=10)
        self.flying = []  # (generation, probe)
        self.elections = {}  # generation -> who
        self.fallback = 0

    def _step(self, b):
        if b.state != self.b.state:
            assert b.generation == self.b.generation + 1  # every arrow
        assert b.generation >= self.b.generation
        self.b = b

    @rule(seconds=st.floats(0, 120))
    def time_passes(self, seconds):
        self.now += timedelta(seconds=seconds)

    @rule()
    def send(self):
        if self.b.state == "closed":
            self.flying.append((self.b.generation, False))

    @rule(who=st.sampled_from("xyz"))
    def look_for_a_probe(self, who):
        if electable(self.b, self.now):
            lapsed = self.b.state != "half_open" or self.b.probe_until <= self.now
            assert lapsed
            self._step(elect(self.b, who, self.policy, self.now))
            assert self.b.generation not in self.elections
            self.elections[self.b.generation] = who
            self.flying.append((self.b.generation, True))

    @rule(
        data=st.data(),
        verdict=st.sampled_from(["ok", "failed", "neutral"]),
        child=st.sampled_from("ab"),
        roll=st.floats(0, 0.999),
    )
    def answer(self, data, verdict, child, roll):
        if not self.flying:
            return
        generation, probe = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        names = {"children_ok": frozenset(child)} if verdict == "ok" else {"children_failed": frozenset(child)}
        counts = {} if verdict == "neutral" else {verdict: 1}
        r = Report(generation, trailing=int(verdict == "failed"), probe=probe, **counts, **names)
        before = self.b
        self._step(report(self.b, r, self.policy, self.now, roll))
        if generation != before.generation:
            assert self.b is before
        elif probe:
            assert self.b.state == ("closed" if verdict == "ok" else "open")

    @rule()
    def crash(self):
        self.flying.clear()

    @rule(until=st.one_of(st.none(), st.integers(0, 100)))
    def isolate(self, until):
        self._step(isolate(self.b, self.now, None if until is None else self.now + timedelta(seconds=until)))

    @rule()
    def reset(self):
        self._step(reset(self.b, self.now))

    @invariant()
    def at_most_one_live_probe(self):
        live = [g for g, probe in self.flying if probe and g == self.b.generation]
        assert len(live) <= 1
        assert (self.b.state == "half_open") == (self.b.probe_owner is not None)
        if live:
            assert self.b.state == "half_open"

    @invariant()
    def every_shut_circuit_has_a_way_out(self):
        if self.b.state == "half_open":
            assert electable(self.b, self.b.probe_until)
            assert self.b.probe_until <= self.now + timedelta(seconds=self.policy.probe_lease)
        elif self.b.state == "open":
            assert electable(self.b, self.b.open_until)
            assert self.b.open_until <= self.now + timedelta(seconds=self.policy.longest_open)

    @invariant()
    def it_fits_in_its_row(self):
        assert Window.from_json(json.loads(json.dumps(self.b.window.to_json()))) == self.b.window


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
