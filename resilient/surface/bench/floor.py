"""``bench floor``: what the same database gives the least code that could do the work.

Figures: a claim-100/complete-100 loop, one COPY or one big transaction of inserts, single inserts each
committed, and wake-up from a committed insert to the claimed row. Every other bench is read as a share of
these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench import floor_sqlite
from resilient.surface.bench.crew import BenchFailed, Server, milliseconds, own_cpu, percentile, rate, run_crew
from resilient.surface.scratch import Scratch, scratch

if TYPE_CHECKING:
    from types import ModuleType

_SINGLES: Final = 1000
_PICKUPS: Final = 200


@dataclass(frozen=True, slots=True)
class Rate:
    """Jobs per second and the CPU seconds they took."""

    per_second: float
    cpu: float


def floor(url: str | None, *, jobs: int, resources: int, workers: int) -> dict[str, Any]:
    """Every bare limit of the database at ``url``."""
    with scratch(url, "bench") as place:
        code = _code(place)
        code.create(place)
        many = code.fill(place, jobs, resources)
        drained = _drain(place, code, jobs, workers)
        single = code.single(place, min(jobs, _SINGLES))
        woken = code.pickup(place, min(jobs, _PICKUPS))
    return {
        "jobs_per_second": drained.per_second,
        "cpu_seconds": drained.cpu,
        "enqueue_many_per_second": rate(jobs, many),
        "enqueue_single_per_second": rate(len(single), sum(single)),
        "enqueue_single_p50_ms": round(percentile(single, 0.5) * 1000, 3),
        **milliseconds(woken, "pickup_"),
    }


def drain_floor(place: Scratch, *, jobs: int, resources: int, workers: int) -> Rate:
    """The drain alone, in a place another bench already has."""
    code = _code(place)
    code.create(place)
    code.fill(place, jobs, resources)
    return _drain(place, code, jobs, workers)


def enqueue_floor(place: Scratch, *, jobs: int, resources: int) -> tuple[float, list[float], list[float], float]:
    """Jobs per second of one bulk insert, and the seconds of each of up to 1,000 single ones, sync and async.

    The last: the CPU seconds of the asynchronous ones, or of the others where there are none.
    """
    code, singles = _code(place), min(jobs, _SINGLES)
    code.create(place)
    many = jobs / code.fill(place, jobs, resources)
    own = own_cpu()
    plain = code.single(place, singles)
    if place.is_sqlite:
        return many, plain, [], own_cpu() - own
    own = own_cpu()
    return many, plain, code.single_async(place, singles), own_cpu() - own


def pickup_floor(place: Scratch, *, jobs: int) -> list[float]:
    """Seconds from each committed insert to its claim."""
    code = _code(place)
    code.create(place)
    seconds: list[float] = code.pickup(place, jobs)
    return seconds


def _drain(place: Scratch, code: ModuleType, jobs: int, workers: int) -> Rate:
    server = Server(place)
    before = server.cpu()
    crew = run_crew(code.drain, workers, place)
    if (done := crew.total("done")) != jobs:
        raise BenchFailed(f"the bare loop finished {done} of {jobs} jobs")
    return Rate(rate(jobs, crew.seconds), server.total(crew.cpu, before))


def _code(place: Scratch) -> ModuleType:
    if place.is_sqlite:
        return floor_sqlite
    from resilient.surface.bench import floor_postgresql  # noqa: PLC0415 - needs the postgres extra

    return floor_postgresql
