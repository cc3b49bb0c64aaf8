"""The life of a job: the table itself, and what must hold for it."""

import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resilient.core.jobs.states import TERMINAL, TRANSITIONS, WAITING, JobState, mermaid, permitted

RUNNING, READY = JobState.RUNNING, JobState.READY


def test_every_state_has_a_row():
    assert set(TRANSITIONS) == set(JobState)
    assert all(why for steps in TRANSITIONS.values() for why in steps.values())


def test_a_state_waits_runs_or_is_terminal():
    assert {RUNNING} | TERMINAL | WAITING == set(JobState)
    assert not TERMINAL & WAITING
    assert RUNNING not in TERMINAL | WAITING


@pytest.mark.parametrize("old", JobState)
@pytest.mark.parametrize("new", JobState)
def test_permitted_is_the_table(old, new):
    expected = {
        "blocked": "scheduled ready cancelled dead",
        "scheduled": "ready scheduled cancelled dead",
        "ready": "running scheduled cancelled dead",
        "running": "succeeded scheduled ready dead cancelled",
        "succeeded": "ready scheduled blocked",
        "dead": "ready scheduled blocked cancelled",
        "cancelled": "ready scheduled blocked",
    }
    assert permitted(old, new) == (new in expected[old].split())


def test_only_ready_jobs_are_claimed():
    assert [old for old in JobState if permitted(old, RUNNING)] == [READY]


def test_a_job_comes_back_from_its_end_only_to_wait_again():
    for old in TERMINAL:
        back = {new for new in JobState if permitted(old, new)} - TERMINAL
        assert back == {READY, JobState.SCHEDULED, JobState.BLOCKED}


def reachable(start: JobState) -> set[JobState]:
    seen = {start}
    while more := {new for old in seen for new in TRANSITIONS[old]} - seen:
        seen |= more
    return seen


def test_no_state_is_a_trap():
    """From everywhere a job can run again, end well and be cancelled."""
    for state in JobState:
        assert reachable(state) >= {RUNNING, READY, JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD}


def test_blocked_is_entered_only_at_enqueue_and_by_a_replay():
    assert {old for old in JobState if permitted(old, JobState.BLOCKED)} == TERMINAL


def test_the_diagram_draws_exactly_the_table():
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", mermaid(), re.MULTILINE)
    assert sorted(drawn) == sorted((old, new, why) for old, steps in TRANSITIONS.items() for new, why in steps.items())
    assert mermaid().split("\n")[:4] == [
        "stateDiagram-v2",
        "    [*] --> scheduled: enqueue later",
        "    [*] --> ready: enqueue",
        "    [*] --> blocked: enqueue behind others",
    ]


class Life(RuleBasedStateMachine):
    """A random walk: a job never runs unclaimed and never leaves its end unseen."""

    @initialize(start=st.sampled_from(sorted(WAITING)))
    def enqueue(self, start):
        self.state, self.previous = start, start

    @rule(choice=st.integers(0, 100))
    def step(self, choice):
        steps = sorted(TRANSITIONS[self.state])
        self.previous, self.state = self.state, steps[choice % len(steps)]

    @invariant()
    def a_claim_comes_before_a_run(self):
        if getattr(self, "state", None) is RUNNING:
            assert self.previous is READY

    @invariant()
    def success_comes_from_a_run(self):
        if getattr(self, "state", None) is JobState.SUCCEEDED:
            assert self.previous is RUNNING


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=30, stateful_step_count=20)
