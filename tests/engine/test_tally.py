"""Sums of requests, and when they are worth a write."""

import pytest

from resilient import Failure, FailureKind
from resilient.engine.gates.reporter import PROMPT, QUIET, SOON, Tally

DOWN = Failure(FailureKind.TRANSIENT)


class Time:
    at = 1000.0


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def tally(time):
    return Tally(lambda: time.at, lambda: 0.5)


def one(evidence, key):
    (found,) = [e for e in evidence if e.key == key]
    return found.report


def test_failures_are_due_at_once_and_together(time, tally):
    assert tally.due() is None
    assert tally.add("a/b", 3, "failed", ".", failure=DOWN) == PROMPT
    assert tally.add("a/b", 3, "failed", "x", failure=DOWN) == PROMPT
    assert tally.due() == pytest.approx(PROMPT)
    assert tally.collect() == []
    time.at += PROMPT
    r = one(tally.collect(), "a/b")
    assert (r.generation, r.ok, r.failed, r.trailing, r.children_failed) == (3, 0, 2, 2, {".", "x"})
    assert tally.due() is None
    assert tally.collect(everything=True) == []


def test_trailing_failures_and_latest_children(tally):
    for verdict, child in [("failed", "x"), ("failed", "y"), ("ok", "x"), ("failed", "z")]:
        tally.add("a", 0, verdict, child)
    r = one(tally.collect(everything=True), "a")
    assert (r.ok, r.failed, r.trailing) == (1, 3, 1)
    assert (r.children_ok, r.children_failed) == ({"x"}, {"y", "z"})


def test_when_successes_are_due(time, tally):
    assert tally.add("a", 0, "ok", "b") == SOON  # an ancestor must know soon who is alive
    assert tally.add("a/b", 0, "ok", ".") == SOON + QUIET / 2  # leaves spread out
    assert tally.add("a/c", 0, "ok", ".", calm=False) == SOON  # it has troubles
    tally.add("a/d", 0, "failed", ".")
    assert tally.add("a/d", 0, "ok", ".") == SOON
    tally.collect(everything=True)
    assert tally.add("a", 0, "ok", "b") == QUIET
    time.at += 10
    assert tally.add("a", 0, "ok", "b") == QUIET - 10
    assert tally.due() == QUIET - 10
    time.at += 100
    assert {e.key for e in tally.collect()} == {"a"}


def test_a_failure_hurries_the_successes_before_it(time, tally):
    tally.add("a/b", 0, "ok", ".")
    tally.add("a/b", 0, "failed", ".")
    time.at += PROMPT
    r = one(tally.collect(), "a/b")
    assert (r.ok, r.failed) == (1, 1)


def test_a_newer_generation_drops_the_older_counts(tally):
    tally.add("a", 1, "failed", "x")
    tally.add("a", 2, "ok", "x")
    tally.add("a", 1, "failed", "x")
    r = one(tally.collect(everything=True), "a")
    assert (r.generation, r.ok, r.failed) == (2, 1, 0)


def test_neutral_costs_nothing(tally):
    tally.add("a", 0, "neutral", "x")
    assert (tally.due(), tally.collect(everything=True)) == (None, [])


def test_probes_are_due_now_and_before_sums(time, tally):
    tally.add("a", 0, "ok", "x")
    tally.probe("a", 5, "ok", None, None)
    tally.probe("a", 5, "neutral", None, None)
    assert tally.due() == 0
    first, second = tally.collect()
    assert (first.report.probe, first.report.ok) == (True, 1)
    assert (second.report.probe, second.report.ok, second.report.failed) == (True, 0, 0)


def test_children_named_are_few(tally):
    for n in range(100):
        tally.add("a", 0, "ok", f"x{n}")
        tally.add("a", 0, "failed", f"y{n}")
    r = one(tally.collect(everything=True), "a")
    assert len(r.children_ok) + len(r.children_failed) <= 32


def test_what_is_put_back_comes_first_and_is_bounded(tally):
    tally.add("a", 0, "failed", "x")
    lost = tally.collect(everything=True)
    tally.add("b", 0, "failed", "x")
    tally.put_back(lost)
    assert [e.key for e in tally.collect(everything=True)] == ["a", "b"]
    tally.put_back(lost * 20_000)
    assert len(tally.collect()) == 5_000


def test_keys_not_used_are_forgotten(time, tally):
    for n in range(100):
        tally.add(f"a/{n}", 0, "ok", ".")
    tally.collect(everything=True)
    time.at += 5 * QUIET
    tally.add("b", 0, "ok", "x")
    tally.collect()
    assert set(tally._sums) == {"b"}
