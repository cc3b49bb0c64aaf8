"""The relay: the handlers that publish the outbox's events, one kind a destination.

An event waits as a job like any other, so what is true of jobs is true of it: the destination's circuit, pauses and
limits hold it without a charge, errors are retried by its policy, what is refused for good is dead and can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core import resource_key
from resilient.core.errors import Permanent, SetupError
from resilient.core.events import RESOURCE
from resilient.core.message import Message, decode
from resilient.engine.handler import Handler
from resilient.wire.publishers.callback import destination

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.engine.job import Job
    from resilient.wire.publishers.base import Destination

PREFIX: Final = "outbox."
_SLACK: Final = 30.0  # seconds beyond a destination's own timeout: opening, and waiting for others of the key


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
    return [
        Relay(kind=PREFIX + name, fn=_publish, retry=one.retry, timeout=one.timeout + _SLACK, max_attempts=None)
        for name, one in destinations.items()
    ]


def named(given: Mapping[str, Any] | None) -> dict[str, Destination]:
    """What ``Resilient(destinations=)`` was given; raises `SetupError` or `BadResourceKey`."""
    found = {}
    for name, one in (given or {}).items():
        if "/" in resource_key.check(name):
            raise SetupError(f"destination {name!r}: give it a name without a slash; its resource is {RESOURCE}/<name>")
        found[name] = destination(name, one)
    return found


async def _publish(job: Job[str]) -> None:
    name = job.kind.removeprefix(PREFIX)
    side: Any = job._side  # noqa: SLF001 - the engine's own handler
    await side.worker.wire.publishers.publish(name, message_of(job))


def message_of(job: Job[str]) -> Message:
    """The event of a job; raises `Permanent` for a payload that is none."""
    try:
        return decode(job.payload, delivery=str(job.id), number=getattr(job, "order_no", None))
    except ValueError as error:
        raise Permanent(f"the payload of job {job.id} ({job.kind}) is {error}", code="undecodable") from None
