"""An event loop whose time is a number: nothing waits, a seed decides what runs next, and processes can be killed.

Everything that a simulated process starts (tasks, timers, calls in threads) runs in its context, so a handle says whose
it is. A handle of a killed process is never run again, as after SIGKILL; that of a frozen one runs when it is thawed,
as after SIGCONT. What would run in a thread runs in the loop, whole, a little later.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import sys
import warnings
from asyncio import base_events
from contextvars import ContextVar
from functools import partial

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
STEP = 5e-6  # seconds that one callback takes
SHUFFLE = 0.25  # how often a task runs before those that were ready earlier


class Crashed(BaseException):
    """The process ends here. Nobody may catch it: nothing of this process runs afterwards."""


class Stuck(Exception):
    """Nothing is left to run, and somebody still waits."""


class Process:
    """One simulated process."""

    def __init__(self, name):
        self.name, self.is_dead, self.frozen_until = name, False, 0.0
        self.at_death = []  # what the system does for it then: its connections close

    def kill(self):
        self.is_dead = True
        for close in self.at_death:
            close()

    def __repr__(self):
        return self.name


class Loop(base_events.BaseEventLoop):
    """See the module. ``latency()`` gives the seconds that a call in a thread takes to begin, and to answer."""

    def __init__(self, rng, latency):
        super().__init__()
        self.rng, self._latency = rng, latency
        self.now = 1_000.0
        self.may_block = lambda: False  # whether a call in a thread would have to wait for somebody's lock
        self.graves = []  # handles of killed processes: collected, their coroutines would run on
        self._frozen = []
        self.steps = 0

    def time(self):
        return self.now

    # -- what runs next --------------------------------------------------------------------------------------

    def _run_once(self):
        while self._scheduled and (self._scheduled[0]._when <= self.now or not self._ready):
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            if timer._cancelled:
                continue
            self.now = max(self.now, timer._when)
            self._ready.append(timer)
        if not self._ready:
            raise Stuck("nothing is left to run")
        handle = self._pick()
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)
        if process is not None and process.is_dead:
            self.graves.append(handle)
        elif process is not None and process.frozen_until > self.now:
            self._frozen.append(handle)
            if len(self._frozen) == 1:
                self.call_at(process.frozen_until, self._thaw)
        else:
            self.now += STEP
            self.steps += 1
            handle._run()

    def _pick(self):
        """The oldest, or now and then any task: which of several ready tasks runs first is nobody's promise."""
        if len(self._ready) > 1 and self.rng.random() < SHUFFLE:
            for _ in range(3):
                index = self.rng.randrange(len(self._ready))
                if isinstance(getattr(self._ready[index]._callback, "__self__", None), asyncio.Task):
                    handle = self._ready[index]
                    del self._ready[index]
                    return handle
        return self._ready.popleft()

    def _thaw(self):
        """Handles of frozen processes, in their order; those that are still frozen come back."""
        handles, self._frozen = self._frozen, []
        self._ready.extend(handles)

    def bury(self):
        """Close, and collect what killed processes left."""
        self.graves.clear()
        self._frozen.clear()
        self.close()
        collect()

    # -- threads ---------------------------------------------------------------------------------------------

    def run_in_executor(self, _executor, func, *args):
        future = self.create_future()
        self.call_later(self._latency(), self._call, future, partial(func, *args), self.now + 30.0)
        return future

    def _call(self, future, func, patience):
        if self.may_block() and self.now < patience:
            self.call_later(0.002, self._call, future, func, patience)
            return
        try:
            result, error = func(), None
        except Crashed:
            return
        except BaseException as failure:  # noqa: BLE001 - as concurrent.futures does
            result, error = None, failure
        self.call_later(self._latency(), self._answer, future, result, error)

    def _answer(self, future, result, error):
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    # -- what a loop over sockets would do -------------------------------------------------------------------

    def _write_to_self(self):
        pass

    def _process_events(self, event_list):
        pass


def collect():
    """Collect garbage; nobody hears what coroutines of killed processes have to say to that."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    logging.disable(logging.NOTSET)
    sys.unraisablehook = hook
