"""Exceptions without the frames in which secrets stand: error trackers collect the variables of every frame.

A function whose variables hold secrets is `frameless`: the traceback of what it raises begins at its caller. On an
unexpected exception a note says where it was raised, so that a bug can still be located.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from functools import wraps
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from resilient.core.base.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type[Any])
E = TypeVar("E", bound=BaseException)
_NOTED: Final = 5  # of the innermost frames, in a note
_OURS: Final = f"{Path(__file__).parents[2]}{os.sep}"


class Hidden(tuple[str, ...]):
    """Secrets whose ``repr``, as frames and logs show it, says only how many there are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} hidden>"


def without_frames(error: E, outer: BaseException | None = None) -> E:
    """Remove the tracebacks of ``error``, its causes and its contexts (but not that of ``outer``); return it."""
    pending: list[BaseException | None] = [error]
    visited = {outer}
    while pending:
        one = pending.pop()
        if one is not None and one not in visited:
            visited.add(one)
            one.__traceback__ = None
            pending += [one.__cause__, one.__context__]
    return error


def from_callee(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not the engine's: what a handler's author can do something about.

    The same one if every frame is the engine's.
    """
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_OURS):
        rest = rest.tb_next
    return rest or trace


def frameless(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, or coroutine function, whose exceptions carry no frames from below its call."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = sys.exception()
        try:
            return fn(*args, **kwargs)
        except BaseException as caught:  # noqa: BLE001 - raised below
            error = caught
        del args, kwargs
        raise without_frames(_with_note(error), outer)

    @wraps(fn)
    async def wait(*args: P.args, **kwargs: P.kwargs) -> Any:
        outer = sys.exception()
        try:
            return await cast("Callable[P, Awaitable[Any]]", fn)(*args, **kwargs)
        except BaseException as caught:  # noqa: BLE001 - raised below, a cancellation too
            error = caught
        del args, kwargs
        raise without_frames(_with_note(error), outer)

    return cast("Callable[P, R]", wait) if inspect.iscoroutinefunction(fn) else call


def frameless_calls(cls: C) -> C:
    """The class, with each public method `frameless`; its constructor and asynchronous generators are not."""
    for name, fn in list(vars(cls).items()):
        if inspect.isfunction(fn) and not name.startswith("_") and not inspect.isasyncgenfunction(fn):
            setattr(cls, name, frameless(fn))
    return cls


def _with_note(error: BaseException) -> BaseException:
    """The error, with a note of where it was raised unless it is one of the library's own."""
    if isinstance(error, Exception) and not isinstance(error, ResilientError) and error.__traceback__ is not None:
        places = traceback.extract_tb(error.__traceback__)[1:][-_NOTED:]
        where = ", ".join(f"{PurePath(one.filename).name}:{one.lineno} ({one.name})" for one in reversed(places))
        if where:
            error.add_note(f"raised at {where}; the frames are left out, because secrets stand in them")
    return error
