"""Engines with one part removed, to see that the checker would notice; and a clock that is wrong.

Called in a worker process before anything runs.
"""

from __future__ import annotations

import datetime as dt
import sys
import time

from resilient.core import admission
from resilient.core.admission import Level
from resilient.core.states import JobState
from resilient.engine import gate
from resilient.engine.executor import Executor
from resilient.store import finishing, order


def no_fence():
    """Results are written whatever version the job has by now."""
    code = finishing.succeed_if_held.__code__
    changed = tuple(
        c.replace("{job}.version = p.version AND ", "") if isinstance(c, str) else c for c in code.co_consts
    )
    assert changed != code.co_consts
    finishing.succeed_if_held.__code__ = code.replace(co_consts=changed)
    Executor.interrupt = lambda *_: None  # nor does it hear that its lease is lost


def no_election():
    """A circuit that is due lets everybody through, instead of one elected probe."""

    def started(level, count, now, owner):
        return Level(level.facts, level.policy, level.limits, level.running + count)

    def refused(facts, now, *, probing=False):
        return admission.stop_of(facts, now)

    assert admission._with_started
    admission._with_started = started
    gate.refusal = refused


def failures_let_others_pass():
    """The next job of a lane starts although the one before it failed and is going to be tried again."""
    code = order.advance.__code__
    changed = tuple(
        c.replace(" AND j.finished_at IS NOT NULL", "") if isinstance(c, str) else c for c in code.co_consts
    )
    assert changed != code.co_consts
    order.advance.__code__ = code.replace(co_consts=changed)
    finishing.TERMINAL = frozenset(JobState)


def wrong_clock(seconds):
    """What this process believes the time to be is off by ``seconds``; its monotonic clock is not."""
    real, wall = dt.datetime, time.time

    class Kind(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, real)

        def __getattr__(cls, name):
            return getattr(real, name)

        def __call__(cls, *args, **kwargs):
            return real(*args, **kwargs)

    class Wrong(metaclass=Kind):
        @staticmethod
        def now(tz=None):
            return real.now(tz) + dt.timedelta(seconds=seconds)

    time.time = lambda: wall() + seconds
    patched = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("resilient.") and getattr(module, "datetime", None) is real:
            module.datetime = Wrong
            patched += 1
    assert patched
