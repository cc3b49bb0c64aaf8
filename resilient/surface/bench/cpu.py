"""CPU seconds and memory of what a bench used: its worker processes and, if it runs here, the database.

PostgreSQL's share is the sum over the children of its first process plus what ended children left there.
Other users of the same server count too: bench on a quiet one. None where /proc does not tell (another
host, macOS).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg

_TICK = os.sysconf("SC_CLK_TCK")
_MEGABYTE = 1 << (20 if sys.platform == "darwin" else 10)  # getrusage counts in kilobytes on Linux


def own_cpu() -> float:
    """User and system seconds of this process."""
    return time.process_time()  # `os.times` counts in hundredths: too coarse for an idle worker


def own_memory() -> float:
    """The most memory this process ever held, in megabytes."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MEGABYTE, 1)


def postmaster(c: psycopg.Connection) -> int | None:
    """The process id of the server behind ``c``, if it runs on this machine."""
    row = c.execute("SELECT pg_backend_pid()").fetchone()
    with suppress(OSError, ValueError, TypeError):
        stat = _stat(int(row[0])) if row else []
        parent = int(stat[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() in ("postgres", "postmaster"):
            return parent
    return None


def server_cpu(pid: int | None) -> float | None:
    """CPU seconds of the PostgreSQL server ``pid`` and its children, ended ones included."""
    if pid is None:
        return None
    total = 0.0
    try:
        total += sum(map(int, _stat(pid)[11:15])) / _TICK  # utime, stime, cutime, cstime
    except OSError:
        return None
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                if int(_stat(int(folder.name))[1]) == pid:
                    total += int((folder / "schedstat").read_text().split()[0]) / 1e9
    return total


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third (state) on; the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
