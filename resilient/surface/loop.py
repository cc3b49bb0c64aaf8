"""The event loop of what the command line starts: uvloop's where it is installed, else asyncio's own.

uvloop is a loop in C; what it saves is in `docs/scaling.md`. A program of your own chooses for itself:
``uvloop.run(main())``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from resilient.core.base.errors import MissingExtra, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

LoopName = Literal["auto", "asyncio", "uvloop"]
NAMES: Final[tuple[LoopName, ...]] = get_args(LoopName)
VARIABLE: Final = "RESILIENT_LOOP"
_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T], loop: LoopName | None = None) -> _T:
    """Run ``main`` to its end, as `asyncio.run` does; without a name on the loop that RESILIENT_LOOP names.

    Raises `SetupError` for a loop that nobody has, `MissingExtra` for uvloop where it is not installed.
    """
    try:
        factory = factory_of(loop or os.environ.get(VARIABLE) or "auto")
    except SetupError:
        main.close()
        raise
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def factory_of(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop of this name; None for asyncio's own. Raises as `run` does."""
    if loop not in NAMES:
        raise SetupError(f"no event loop is called {loop!r}: auto, asyncio or uvloop ({VARIABLE}, --loop)")
    if sys.platform == "win32" and loop != "uvloop":
        return asyncio.SelectorEventLoop  # psycopg and the engine's reader work on no other
    if loop == "asyncio" or (loop == "auto" and find_spec("uvloop") is None):
        return None
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra("the event loop 'uvloop' needs it: pip install 'resilient-engine[uvloop]'") from error
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
