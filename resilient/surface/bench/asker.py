"""Asks a worker's probes for all that they have, every second: a process of its own, so that its CPU is nobody else's.

``python -m resilient.surface.bench.asker ADDRESS``: says when it is loaded, begins with the first line that it is sent,
and ends with its input. Prometheus asks four times a minute.
"""

from __future__ import annotations

import select
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from itertools import chain, repeat

_PATHS = ("/metrics", "/livez", "/readyz")


def main() -> None:
    """Ask until the input ends."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    for delay in chain([0.1], repeat(1.0)):
        if select.select([sys.stdin], [], [], delay)[0]:
            return
        for path in _PATHS:
            with suppress(urllib.error.URLError):  # not ready yet, or over
                urllib.request.urlopen(f"{sys.argv[1]}{path}", timeout=10).read()  # noqa: S310 - ours


if __name__ == "__main__":
    main()
