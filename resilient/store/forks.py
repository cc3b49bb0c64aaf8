"""After a fork (a preforking server, `multiprocessing`) the child leaves the parent's connections alone.

Two processes on one connection read each other's answers. Threads do not live on in a child either: whoever has some
says here how it begins anew.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final, Protocol


class Renewed(Protocol):
    """What holds connections or threads."""

    def begin_anew(self) -> None:
        """In a child: as if nothing had been opened or started. No I/O, and nothing of the parent's is closed."""


_KNOWN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
left: Final[list[object]] = []  # the parent's connections: collected, they would be closed


def renew_in_children(one: Renewed) -> None:
    """Call `Renewed.begin_anew` in every forked child."""
    _KNOWN.add(one)


def _in_child() -> None:
    for one in list(_KNOWN):
        one.begin_anew()


if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
    os.register_at_fork(after_in_child=_in_child)
