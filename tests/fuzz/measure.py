"""What an input costs a parser, and whether that is within its bounds.

Time is CPU time of this thread, the best of a few, so that no neighbour on the machine counts. Memory is the most that
was allocated at once. Both may have a floor, whatever the input, and so much for each character: what grows with the
square of its input passes neither when an input is stretched.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import NamedTuple

FLOOR_SECONDS, FLOOR_BYTES = 0.02, 512 * 1024
STRETCHED = 16_000  # characters
TRIES = 4


class Cost(NamedTuple):
    seconds: float
    memory: int


class Fault(AssertionError):
    """A parser that raised what it may not, or cost too much."""


def tried(parser, text):
    """Run it; what it refuses is none of our business. Raises `Fault`."""
    try:
        parser.run(text)
    except parser.refuses:
        pass
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error!s:.200} for {shown(text)}") from error


def timed(parser, text, *, weight=1.0):
    """CPU seconds. Raises `Fault` beyond the bound. ``weight``: how much slower this interpreter is made."""
    bound = (FLOOR_SECONDS + parser.micros * 1e-6 * len(text)) * weight
    best = float("inf")
    for _ in range(TRIES):
        began = time.thread_time()
        tried(parser, text)
        best = min(best, time.thread_time() - began)
        if best <= bound:
            return best
    raise Fault(f"{best * 1e3:.1f} ms for {len(text)} characters, more than {bound * 1e3:.1f}: {shown(text)}")


def weighed(parser, text):
    """Bytes. Raises `Fault` beyond the bound. The first run fills caches and imports."""
    tried(parser, text)
    bound = FLOOR_BYTES + int(parser.memory * len(text))
    tracemalloc.start()
    try:
        tried(parser, text)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if most > bound:
        raise Fault(f"{most:,} bytes for {len(text)} characters, more than {bound:,}: {shown(text)}")
    return most


def measured(parser, text):
    """`Cost` of one input. Raises `Fault`."""
    return Cost(timed(parser, text), weighed(parser, text))


def stretched(text, size=STRETCHED):
    """The input repeated up to a size: all of it, and its middle between its ends."""
    if not text:
        return []
    whole = (text * (size // len(text) + 1))[:size]
    head, middle, tail = (
        text[: len(text) // 3],
        text[len(text) // 3 : -(len(text) // 3) or None],
        text[-(len(text) // 3) :],
    )
    return [whole, head + (middle * (size // len(middle) + 1))[:size] + tail if middle else whole]


def shown(text):
    """For a report: an input as JSON, not too long."""
    told = json.dumps(text)
    return told if len(told) < 2_000 else f"{told[:2_000]}... ({len(text)} characters)"
