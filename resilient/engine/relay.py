"""The relay: the handlers that publish the outbox's events, one kind a destination.

An event waits as a job like any other, so what is true of jobs is true of it: the destination's circuit, pauses and
limits hold it without a charge, errors are retried by its policy, what is refused for good is dead and can be replayed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core import resource_key
from resilient.core.errors import JobFailure, Permanent, ResourceStopped, SetupError
from resilient.core.events import RESOURCE
from resilient.core.failure import FailureKind
from resilient.core.message import Message, decode
from resilient.engine.handler import Handler
from resilient.wire.publishers.base import ConnectionLost
from resilient.wire.publishers.callback import destination

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.engine.batch import Batch
    from resilient.engine.execution import Execution
    from resilient.engine.job import Job
    from resilient.engine.worker import Worker
    from resilient.wire.publishers.base import Destination

PREFIX: Final = "outbox."
IN_FLIGHT: Final = 100  # events of a batch that wait for their confirms at once
AWAY: Final = 5  # failures in a row after which the rest of a batch is not tried
_SLACK: Final = 30.0  # seconds of a batch beyond its destination's own timeouts: for opening the connection


@dataclass(frozen=True, eq=False)
class Relay(Handler[str, None]):
    """Publishes the events of one destination. Their payload is the event as JSON text, and stays text."""

    def encode(self, payload: Any) -> str:
        """It is encoded already."""
        return str(payload)

    def decode(self, text: str | None, version: int) -> str:  # noqa: ARG002 - the event has its own version
        """As it stands in the database."""
        return text or ""


def relays(destinations: Mapping[str, Destination]) -> list[Relay]:
    """A handler for each destination."""
    return [_relay(name, one) for name, one in destinations.items()]


def _relay(name: str, said: Destination) -> Relay:
    longest = said.timeout * -(-said.batch // IN_FLIGHT) + _SLACK
    return Relay(kind=PREFIX + name, fn=_publish, retry=said.retry, batch=said.batch, timeout=longest)


def named(given: Mapping[str, Any] | None) -> dict[str, Destination]:
    """What ``Resilient(destinations=)`` was given; raises `SetupError` or `BadResourceKey`."""
    found = {}
    for name, one in (given or {}).items():
        if "/" in resource_key.check(name):
            raise SetupError(f"destination {name!r}: give it a name without a slash; its resource is {RESOURCE}/<name>")
        found[name] = destination(name, one)
    return found


def require(destinations: Mapping[str, Destination], kinds: Iterable[str]) -> None:
    """Raise `MissingExtra` if a worker of these kinds could not publish: when it is made, not with the first event."""
    mine = set(kinds)
    for name, one in destinations.items():
        if PREFIX + name in mine:
            one.require()


async def _publish(batch: Batch[str]) -> None:
    """Publish a batch, many at once; of one key there is never more than one in it, because its next waits for it.

    Each event ends by itself, so that a crash repeats few. A destination that is away is charged to the first events
    that meet it: the others go back to where they stood.
    """
    worker: Worker = _side(batch[0]).worker
    name, publishers = batch.kind.removeprefix(PREFIX), worker.wire.publishers
    waiting, strikes = iter(batch), 0
    try:
        await publishers.open(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the first event's
        batch.fail(next(waiting), error)
        strikes = AWAY

    async def publish_waiting() -> None:
        nonlocal strikes
        for job in waiting:
            if strikes >= AWAY:
                batch.fail(job, ResourceStopped(batch.resource_key, "connection"))
                continue
            try:
                await _admitted(worker, job)
                await publishers.publish(name, message_of(job))
            except ConnectionLost as error:  # whatever was in flight meets it: the first ones pay
                batch.fail(job, ResourceStopped(batch.resource_key, "connection") if strikes >= AWAY else error)
                strikes += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this event's
                batch.fail(job, error)
                strikes += _is_ill(error)
            else:
                batch.succeed(job)
                strikes = 0

    async with asyncio.TaskGroup() as group:
        for _ in range(min(len(batch), IN_FLIGHT)):
            group.create_task(publish_waiting())


def _side(job: Job[str]) -> Execution:
    side: Any = job._side  # noqa: SLF001 - the engine's own handler
    return side  # type: ignore[no-any-return]


async def _admitted(worker: Worker, job: Job[str]) -> None:
    """Draw the destination's request limits and look at its gates, as before any request.

    Raises `ResourceStopped`, or `LostLease` for an event that another worker publishes by now.
    """
    side = _side(job)
    worker.gate.abandoned(await worker.gate.admit(side.resource_key, probes=side.probes))  # its outcome is counted
    side.require_running()


def _is_ill(error: Exception) -> bool:
    """Whether it says something about the destination, and not about the event."""
    failure = error.failure if isinstance(error, JobFailure) else None
    return failure is not None and failure.kind is FailureKind.TRANSIENT and failure.counts_for_breaker is not False


def message_of(job: Job[str]) -> Message:
    """The event of a job; raises `Permanent` for a payload that is none."""
    try:
        return decode(job.payload, delivery=job.idempotency_key, number=job.order_no)
    except ValueError as error:
        raise Permanent(f"the payload of job {job.id} ({job.kind}) is {error}", code="undecodable") from None
