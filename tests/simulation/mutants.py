"""Engines with one part broken, each a fault that was there once or could be: the simulation must see every one.

Called once in a process that simulates. Each asserts that what it breaks is there.
"""

from __future__ import annotations

import dataclasses
import types
import uuid

from resilient.core import admission, cooldown
from resilient.engine import grants, sweeper, wiring
from resilient.engine.execution import Execution
from resilient.engine.gate import Gate
from resilient.store import gates, jobs, limits, order, turns, workflows
from resilient.wire import trail
from tests.chaos import mutants as chaos


def every(count, original, otherwise):
    """Each ``count``-th call goes wrong."""
    calls = [0]

    def run(*args, **kwargs):
        calls[0] += 1
        return (otherwise if calls[0] % count == 0 else original)(*args, **kwargs)

    return run


def turn_not_inserted():
    """Some jobs become ready without a turn."""
    missing = types.SimpleNamespace(**{**vars(turns), "insert": every(5, turns.insert, lambda *_: None)})
    assert jobs.turns is turns
    jobs.turns = missing


def head_lost():
    """Some ordering keys have no head although jobs wait."""
    order._next = every(4, order._next, lambda *_: {})


def mark_never_made():
    """A request without a key is sent without a mark on its job."""

    async def mark(self, permit):
        permit.fresh = True

    assert wiring.JobConduct.mark
    wiring.JobConduct.mark = mark


def mark_cleared_early():
    """The mark leaves the row before the answer came."""
    original = Execution.mark

    async def mark(self, name, mark):
        await original(self, name, mark)
        await original(self, name, None)

    Execution.mark = mark


def rescue_is_blind():
    """A rescued job runs again whatever it had sent."""
    marks = sweeper.marks
    sweeper.marks = types.SimpleNamespace(**{**vars(marks), "in_doubt": lambda *_: False})


def workflow_unasked():
    """The end of a step asks nobody to look at its workflow."""
    original = workflows.ask
    workflows.ask = every(3, original, lambda *_: None)
    assert original is not workflows.ask


def cooldown_ignored():
    """A throttle makes nobody wait."""
    nothing = lambda *_, **__: None  # noqa: E731
    assert gates.cooled is cooldown.cooled
    gates.cooled = nothing
    Gate._rest = lambda *_: False


def draws_forgotten():
    """What is drawn from a limit is not written: each draw sees a full bucket."""
    assert limits.write
    limits.write = lambda *_: None
    limits.write_tats = lambda *_: None


def cap_ignored():
    """Caps of jobs at once are not looked at."""
    original = admission._room

    def room(level, wanted, now):
        return original(admission.Level(level.facts, dataclasses.replace(level.policy, concurrency=None),
                                        level.limits, level.running), wanted, now)  # fmt: skip

    admission._room = room


def keys_not_stable():
    """Each try has an idempotency key of its own."""
    assert trail.derive
    trail.derive = lambda *_: uuid.uuid4().hex


def refresh_waited_for():
    """Jobs wait in their slots for a refresh that somebody else began, however long."""
    assert grants.AT_ONCE
    grants.AT_ONCE = 60.0


MUTANTS = {
    "fence removed": chaos.no_fence,
    "probe election removed": chaos.no_election,
    "turn not inserted": turn_not_inserted,
    "head of an ordering key lost": head_lost,
    "failed job lets others pass": chaos.failures_let_others_pass,
    "mark never made": mark_never_made,
    "mark cleared early": mark_cleared_early,
    "rescue ignores marks": rescue_is_blind,
    "workflow not looked at": workflow_unasked,
    "cooldown ignored": cooldown_ignored,
    "draws forgotten": draws_forgotten,
    "cap ignored": cap_ignored,
    "slots wait for a refresh": refresh_waited_for,
    "idempotency keys not stable": keys_not_stable,
}
