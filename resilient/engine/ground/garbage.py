"""Garbage collection: rarely in a process that belongs to a worker, not at all while thousands of jobs are encoded.

Measured: with Python's defaults two fifths of the CPU time of no-op jobs went to the cyclic collector, which walks the
hundred thousand objects of imported libraries again and again. They are moved out of its sight (`gc.freeze`), and it
runs less often: each young collection looks at 50,000 new objects instead of 700, some MB. A process that is the
engine's own does so while it imports, and skips the two looks at everything that the interpreter takes as it ends:
together a third of the CPU time of `resilient status`.
"""

from __future__ import annotations

import atexit
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

THRESHOLDS: Final = (50_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """For as long as the worker runs; an application that set thresholds of its own keeps them, and what it froze."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if before not in (_DEFAULTS, THRESHOLDS):
        yield
        return
    if not frozen:  # without a collection: imports leave next to no garbage, and looking for it took half of a start
        gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """For imports, and a loop without waiting that makes nothing but what it returns: up to half of their time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def own_process() -> None:
    """For a process that is ours: rare collections from the first import on, and none as it ends."""
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.freeze)


_DEFAULTS: Final = gc.get_threshold()
