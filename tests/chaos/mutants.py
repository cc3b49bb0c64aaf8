"""Engines with one part removed, to see that the checker would notice; and a clock that is wrong.

Called in a worker process before anything runs.
"""

from __future__ import annotations

import datetime as dt
import functools
import sys
import time

from resilient import JobState
from resilient.core.gates import admission
from resilient.core.gates.admission import Level
from resilient.engine.gates import gate
from resilient.engine.run.executor import Executor
from resilient.store.accounts import grants
from resilient.store.jobs import finishing, order


def no_fence():
    """Results are written whatever version the job has by now."""
    fenced = finishing._UNDER_FENCE
    finishing._UNDER_FENCE = fenced.replace("{job}.version = p.version AND ", "")
    assert fenced != finishing._UNDER_FENCE
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


def no_refresh_lease():
    """Whoever wants to refresh a token does, whoever is at it."""
    begin = grants.begin

    @functools.wraps(begin)
    def taken(c, d, id_, *args, **kwargs):
        free = "UPDATE {grant} SET state = 'active', lease_until = NULL WHERE id = :id AND state = 'refreshing'"
        d.run(c, free, {"id": d.id(id_)})
        return begin(c, d, id_, *args, **kwargs)

    grants.begin = taken


def no_refresh_mark():
    """That a refresh is under way is written with its end."""
    begin, renew = grants.begin, grants.renew_if_held

    @functools.wraps(begin)
    def unmarked(c, d, id_, *args, **kwargs):
        begun = begin(c, d, id_, *args, **kwargs)
        if begun is not None and begun.may_send:
            grants.write(c, d, id_, begun.now, state="active", sent_at=None)
        return begun

    @functools.wraps(renew)
    def marked(c, d, held, fresh):
        grants.write(c, d, held.id, d.now(c), state="refreshing", sent_at=d.now(c))
        return renew(c, d, held, fresh)

    grants.begin, grants.renew_if_held = unmarked, marked


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
