"""A worker process that ends by itself, drained, so that whoever started it starts a new one.

What a handler's libraries leak is given back that way.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from resilient.core.base.loggers import logger
from resilient.core.base.phrases import counted

if TYPE_CHECKING:
    from resilient.engine.run.worker import Worker

log = logger("worker")
LOOK: Final = 1.0  # seconds between two looks
_MEGABYTE: Final = 2**20
_KILOBYTE: Final = 2**10


def resident() -> int:
    """Bytes of memory that this process uses; where the system does not say, the most it ever used."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return _peak()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) * (1 if sys.platform == "darwin" else _KILOBYTE)


async def stop_when_due(worker: Worker, *, max_jobs: int | None, max_memory: int | None) -> None:
    """Stop the worker once it has ended so many executions, or its process uses so many megabytes."""
    while True:
        used = resident() // _MEGABYTE
        if max_jobs is not None and worker.ended >= max_jobs:
            reason = f"it has ended {counted(worker.ended, 'execution')} (--max-jobs {max_jobs})"
        elif max_memory is not None and used > max_memory:
            reason = f"it uses {used} MB of memory (--max-memory {max_memory})"
        else:
            await asyncio.sleep(LOOK)
            continue
        log.info("worker %s stops for a new process: %s", worker.id, reason)
        worker.stop()
        return
