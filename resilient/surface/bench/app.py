"""The application every bench runs: handlers that do nothing, or one request, and say so."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from resilient import BreakerPolicy, Job, Limit, Resilient, Retry, Transient, handler

if TYPE_CHECKING:
    from resilient.surface.scratch import Scratch

ROOT: Final = "bench"
DOWN: Final = f"{ROOT}/down"
_ROOMY: Final = 10_000_000.0  # limits that cost their work and stop nobody


@handler("bench.noop")
async def noop(job: Job[int]) -> None:
    """Do nothing."""


@handler("bench.down", retry=Retry(max_attempts=None, delay=600))
async def down(job: Job[int]) -> None:  # noqa: ARG001 - handlers take a job
    """Find that the account is down: an execution that was of no use."""
    raise Transient("the bench's account is down")


@handler("bench.stamp")
async def stamp(job: Job[int]) -> None:
    """Say when the job started."""
    started: dict[int, float] = job.deps
    started[job.payload] = time.perf_counter()


@handler("bench.get")
async def get(job: Job[str]) -> None:
    """One request."""
    response = await job.client.get(job.payload)
    response.raise_for_status()


def build(place: Scratch, *, limits: bool = False, deps: Any = None) -> Resilient:
    """The application in ``place``; with ``limits`` two job limits on every account."""
    two = [Limit(_ROOMY, per=60, counts="jobs"), Limit(_ROOMY, per=3600, counts="jobs")]
    return Resilient(
        place.url,
        schema=place.schema,
        upgrade=True,
        handlers=[noop, down, stamp, get],
        limits={f"{ROOT}/*": two} if limits else None,
        breakers={DOWN: BreakerPolicy(streak=1, first_open=600)},  # one probe a run, however long it takes
        deps=deps,
    )


def account(n: int, resources: int) -> str:
    """The resource key of job ``n``."""
    return f"{ROOT}/acct-{n % resources}"
