"""Engines with one part broken, each a fault that was there once or could be: the simulation must see every one.

Called once in a process that simulates. Each asserts that what it breaks is there.
"""

from __future__ import annotations

import dataclasses
import json
import types
import uuid

from resilient.core.gates import admission, rate_limit, retry_after
from resilient.engine.gates.gate import Gate
from resilient.engine.run import backend, sweeper
from resilient.engine.run.execution import Execution
from resilient.store.gates import controls as gates
from resilient.store.gates import limits, turns
from resilient.store.jobs import order, ready, workflows
from resilient.wire.requests import request_log
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
    assert ready.turns is turns
    ready.turns = missing


def head_lost():
    """Some ordering keys have no head although jobs wait."""
    order._next = every(4, order._next, lambda *_: {})


def mark_never_made():
    """A request without a key is sent without a mark on its job."""

    async def mark(self, permit):
        permit.fresh = True

    assert backend.JobHooks.mark
    backend.JobHooks.mark = mark


def mark_cleared_early():
    """The mark leaves the row before the answer came."""
    original = Execution.mark

    async def mark(self, name, mark, commit):
        await original(self, name, mark, commit)
        self._set_mark(name, None)
        assert await commit(json.dumps({**self._effects, **self._marks}))

    Execution.mark = mark


def rescue_is_blind():
    """A rescued job runs again whatever it had sent: neither the rescue nor its next execution looks at its marks."""
    marks, begin = sweeper.marks, Execution.__init__
    sweeper.marks = types.SimpleNamespace(**{**vars(marks), "in_doubt": lambda *_: False})

    def begin_anew(self, context, row, handler, probes):
        begin(self, context, row, handler, probes)
        self._marks = {}

    Execution.__init__ = begin_anew


def workflow_unasked():
    """The end of a step asks nobody to look at its workflow."""
    original = workflows.ask
    workflows.ask = every(3, original, lambda *_: None)
    assert original is not workflows.ask


def cooldown_ignored():
    """A throttle makes nobody wait."""
    nothing = lambda *_, **__: None  # noqa: E731
    assert gates.cooled is retry_after.cooled
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
    assert request_log.derive
    request_log.derive = lambda *_: uuid.uuid4().hex


def refresh_waited_for():
    """Jobs wait in their slots for a refresh that somebody else began, however long."""
    assert backend.patience_of
    backend.patience_of = lambda _: 60.0


def places_taken_twice():
    """A place in a limit's queue that is not used comes back also while others wait behind it."""
    assert rate_limit.give_back
    rate_limit.give_back = lambda limit, state, units, now, _tat: rate_limit.refund(limit, state, units, now)


def levels_count_early():
    """A limit counts a request when it is drawn, although another level's makes it wait."""
    original = rate_limit.take
    rate_limit.take = lambda limit, state, cost, now, at=None: original(limit, state, cost, now)  # noqa: ARG005 - so


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
    "places taken twice": places_taken_twice,
    "levels count early": levels_count_early,
    "cap ignored": cap_ignored,
    "slots wait for a refresh": refresh_waited_for,
    "idempotency keys not stable": keys_not_stable,
}
