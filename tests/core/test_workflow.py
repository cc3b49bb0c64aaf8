"""What becomes of a workflow: each place its steps can stand, and what holds for any of them."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.jobs.states import TERMINAL, WAITING, JobState
from resilient.core.jobs.workflow import (
    OVER,
    Plan,
    StepFacts,
    StepInfo,
    WorkflowInfo,
    WorkflowState,
    needs_undo,
    plan,
    stands_still,
)

RUNNING, UNDOING, STUCK = WorkflowState.RUNNING, WorkflowState.UNDOING, WorkflowState.STUCK
DONE, UNDONE, FAILED = WorkflowState.SUCCEEDED, WorkflowState.UNDONE, WorkflowState.FAILED
READY, RUNS, DEAD = JobState.READY, JobState.RUNNING, JobState.DEAD
SUCCESS, CANCELLED, BLOCKED = JobState.SUCCEEDED, JobState.CANCELLED, JobState.BLOCKED


def steps(*states, **facts):
    """Steps a, b, c ... in these states; ``facts``: of all of them."""
    return [StepFacts("abcdef"[n], n, state, **facts) for n, state in enumerate(states)]


def undos(*states):
    """Succeeded steps a, b, c ... whose undos are in these states; None: not begun. A dead step comes last."""
    made = [
        StepFacts("abcdef"[n], n, SUCCESS, has_undo=True, undo_begun=state is not None, undo_state=state)
        for n, state in enumerate(states)
    ]
    return [*made, StepFacts("z", len(made), DEAD, error_kind="bug")]


@pytest.mark.parametrize(
    ("state", "facts", "expected"),
    [
        (RUNNING, steps(READY, BLOCKED), Plan(RUNNING)),
        (RUNNING, steps(SUCCESS, RUNS), Plan(RUNNING)),
        (RUNNING, steps(SUCCESS, SUCCESS), Plan(DONE)),
        (RUNNING, [], Plan(DONE)),
        (RUNNING, steps(SUCCESS, DEAD), Plan(FAILED, "step b is dead")),
        (RUNNING, steps(CANCELLED, BLOCKED), Plan(UNDOING, "step a was cancelled", ("b",))),
        (RUNNING, steps(SUCCESS, None), Plan(FAILED, "step b was deleted")),
        (RUNNING, steps(DEAD, RUNS, READY), Plan(UNDOING, "step a is dead", ("c", "b"))),
        (RUNNING, steps(RUNS, CANCELLED), Plan(UNDOING, "step b was cancelled", ("a",))),
        (RUNNING, undos(None, None), Plan(UNDOING, "step z is dead", undo="b")),
        (UNDOING, undos(None, None), Plan(UNDOING, undo="b")),
        (UNDOING, undos(None, RUNS), Plan(UNDOING)),
        (UNDOING, undos(None, READY), Plan(UNDOING)),
        (UNDOING, undos(None, SUCCESS), Plan(UNDOING, undo="a")),
        (UNDOING, undos(None, CANCELLED), Plan(UNDOING, undo="a")),
        (UNDOING, undos(None, DEAD), Plan(STUCK)),
        (STUCK, undos(None, DEAD), Plan(STUCK)),
        (STUCK, undos(None, READY), Plan(UNDOING)),
        (STUCK, undos(None, SUCCESS), Plan(UNDOING, undo="a")),
        (UNDOING, undos(SUCCESS, SUCCESS), Plan(UNDONE)),
        (UNDOING, undos(SUCCESS, CANCELLED), Plan(UNDONE)),
        (UNDOING, steps(SUCCESS, DEAD), Plan(FAILED)),
        (UNDOING, steps(SUCCESS, RUNS, has_undo=True), Plan(UNDOING, stop=("b",))),
        (DONE, steps(DEAD), Plan(DONE)),
        (UNDONE, undos(None), Plan(UNDONE)),
        (FAILED, steps(SUCCESS), Plan(FAILED)),
    ],
)
def test_what_is_to_be_done(state, facts, expected):
    assert plan(state, facts) == expected


@pytest.mark.parametrize("state", [UNDOING, STUCK])
def test_an_undo_whose_job_was_deleted_is_not_taken_for_done(state):
    gone = StepFacts("b", 1, SUCCESS, has_undo=True, undo_begun=True, undo_state=None)
    first = StepFacts("a", 0, SUCCESS, has_undo=True)
    assert plan(state, [first, gone]) == plan(state, [gone]) == Plan(STUCK)
    assert stands_still(state, [first, gone]) is (state is UNDOING)


def test_an_undo_whose_job_was_deleted_when_the_next_one_had_begun_is_done():
    """It ended before that began; workflows that were stuck for weeks have some whose jobs were pruned."""
    gone = StepFacts("c", 2, SUCCESS, has_undo=True, undo_begun=True, undo_state=None)
    dead = StepFacts("b", 1, SUCCESS, has_undo=True, undo_begun=True, undo_state=DEAD)
    first = StepFacts("a", 0, SUCCESS, has_undo=True)
    assert plan(STUCK, [first, dead, gone]) == Plan(STUCK)
    assert plan(STUCK, [first, dead._replace(undo_state=SUCCESS), gone]) == Plan(UNDOING, undo="a")


def test_an_undo_that_has_begun_counts_though_the_job_of_its_step_was_deleted():
    gone = StepFacts("a", 0, None, has_undo=True, undo_begun=True, undo_state=DEAD)
    assert needs_undo(gone)
    assert plan(STUCK, [gone]) == Plan(STUCK)
    assert plan(STUCK, [gone._replace(undo_state=SUCCESS)]) == Plan(UNDONE)


@pytest.mark.parametrize(
    ("state", "error_kind", "in_doubt", "expected"),
    [
        (SUCCESS, None, False, True),
        (SUCCESS, "timeout", False, True),
        (DEAD, "bug", False, False),
        (DEAD, "bug", True, True),
        (DEAD, "timeout", False, True),
        (DEAD, "lost_worker", False, True),
        (DEAD, "ambiguous", False, True),
        (CANCELLED, "timeout", False, True),
        (CANCELLED, "lost_worker", False, True),
        (CANCELLED, "ambiguous", False, False),  # somebody looked, and ended it
        (CANCELLED, None, False, False),
        (CANCELLED, None, True, True),
        (READY, "timeout", True, False),
        (None, None, True, False),
    ],
)
def test_what_took_effect_or_may_have_is_undone(state, error_kind, in_doubt, expected):
    step = StepFacts("a", 0, state, error_kind, has_undo=True, in_doubt=in_doubt)
    assert needs_undo(step) is expected
    assert not needs_undo(step._replace(has_undo=False))


@pytest.mark.parametrize(
    ("state", "facts", "expected"),
    [
        (RUNNING, steps(READY, BLOCKED), False),
        (RUNNING, steps(SUCCESS, SUCCESS), True),
        (RUNNING, steps(DEAD, RUNS), True),
        (UNDOING, steps(DEAD, RUNS), False),  # it was asked to stop; its end asks for the next look
        (UNDOING, steps(DEAD, READY), True),
        (UNDOING, steps(DEAD, RUNS, BLOCKED), True),
        (UNDOING, undos(None), True),
        (UNDOING, undos(RUNS), False),
        (UNDOING, undos(SUCCESS), True),
        (STUCK, undos(DEAD), False),
        (STUCK, undos(READY), True),
        (DONE, steps(SUCCESS), False),
    ],
)
def test_one_that_needs_a_look_stands_still(state, facts, expected):
    assert stands_still(state, facts) is expected


JOBS = st.sampled_from([*JobState, None])
KINDS = st.sampled_from([None, "bug", "timeout", "ambiguous", "lost_worker"])
STEPS = st.lists(st.tuples(JOBS, KINDS, st.booleans(), st.booleans(), JOBS, st.booleans()), max_size=6).map(
    lambda drawn: [StepFacts("abcdef"[n], n, *facts) for n, facts in enumerate(drawn)]
)


@given(st.sampled_from(WorkflowState), STEPS)
def test_whatever_its_steps_are(state, facts):
    made, by_name = plan(state, facts), {step.name: step for step in facts}
    if state in OVER:
        assert made == Plan(state)
    if state is not RUNNING:
        assert made.state is not RUNNING
    assert (made.reason is not None) == (state is RUNNING and made.state not in (RUNNING, DONE))
    assert all(by_name[name].state in {*WAITING, RUNS} for name in made.stop)
    if made.undo is not None:
        step = by_name[made.undo]
        assert needs_undo(step)
        assert not step.undo_begun
        assert not any(other.state in {*WAITING, RUNS} for other in facts)
        later = [other for other in facts if other.no > step.no and needs_undo(other)]
        assert all(other.undo_begun and (other.undo_state in TERMINAL or other.undo_state is None) for other in later)
        assert DEAD not in {other.undo_state for other in later}
        begun = [other for other in facts if other.undo_begun and needs_undo(other)]
        last = min(begun, key=lambda other: other.no, default=step)  # of a deleted job; it stops the undo in its turn
        assert last is step or last.undo_state is not None or last.no < step.no


@given(STEPS)
def test_each_undo_runs_once_and_the_latest_first(facts):
    over = [step._replace(state=SUCCESS if step.state in {*WAITING, RUNS} else step.state) for step in facts]
    fresh, order = [step._replace(undo_begun=False, undo_state=None) for step in over], []
    while (made := plan(UNDOING, fresh)).undo is not None:
        order.append(next(step.no for step in fresh if step.name == made.undo))
        fresh = [s._replace(undo_begun=True, undo_state=SUCCESS) if s.name == made.undo else s for s in fresh]
    assert all(a > b for a, b in pairwise(order))
    assert sorted(order) == [step.no for step in fresh if needs_undo(step)]
    assert made.state is (UNDONE if order else FAILED)


def test_a_workflow_for_people_and_programs():
    at = datetime(2030, 1, 1, 12, tzinfo=UTC)
    names = StepInfo.__dataclass_fields__
    first, second = (StepInfo(**{**dict.fromkeys(names), "name": name, "started_at": at}) for name in "ab")
    rest = dict.fromkeys(WorkflowInfo.__dataclass_fields__)
    flow = WorkflowInfo(**{**rest, "name": "f", "state": STUCK, "created_at": at, "steps": (first, second)})
    assert (flow.step("a"), flow.step("b")) == (first, second)
    with pytest.raises(KeyError, match=r"^'c'$"):
        flow.step("c")
    shown = {name: {**dict.fromkeys(names), "name": name, "started_at": "2030-01-01T12:00:00.000Z"} for name in "ab"}
    assert first.to_json() == shown["a"]
    assert flow.to_json() == {
        **rest, "name": "f", "state": "stuck", "created_at": "2030-01-01T12:00:00.000Z", "steps": [*shown.values()],
    }  # fmt: skip
