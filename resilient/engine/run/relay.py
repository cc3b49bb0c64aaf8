"""The relay: the handlers that publish the outbox's events, one kind a destination.

An event waits as a job like any other, so what is true of jobs is true of it: the destination's circuit, pauses and
limits hold it without a charge, errors are retried by its policy, what is refused for good is dead and can be replayed.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from resilient.core.base import resource_key
from resilient.core.base.errors import FailureKind, JobFailure, Permanent, ResourceStopped, SetupError
from resilient.core.base.tracing import TRACEPARENT, TRACESTATE
from resilient.core.events.message import RESOURCE, Message, decode
from resilient.engine.events.outbox import PREFIX
from resilient.engine.ground.kinds import Handler
from resilient.engine.run.job import backend_of
from resilient.wire.publishers.base import ConnectionLost, destination

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.engine.run.backend import HandlerBackend
    from resilient.engine.run.job import Batch, Job
    from resilient.wire.publishers.base import Destination

IN_FLIGHT: Final = 100  # events of a batch that wait for their confirms at once
AWAY: Final = 5  # signs in a row that the destination is away, after which the rest of a batch is not tried
_SLACK: Final = 30.0  # seconds of a batch beyond its destination's own timeouts: for opening the connection


@dataclass(frozen=True, eq=False)
class Relay(Handler[str, None]):
    """Publishes the events of one destination. Their payload is the event as JSON text, and stays text."""

    def encode(self, payload: Any) -> str:
        """The payload as it is: `Outbox` has encoded it."""
        return str(payload)

    def decode(self, text: str | None, version: int) -> str:  # noqa: ARG002 - the event has its own version
        """The text as it stands in the database: `message_of` decodes it."""
        return text or ""


def relays(destinations: Mapping[str, Destination]) -> list[Relay]:
    """A handler for each destination."""
    return [_relay(name, one) for name, one in destinations.items()]


def usual_caps(destinations: Mapping[str, Destination]) -> dict[str, int]:
    """How many events each gets at once where the program says nothing, by resource key."""
    return {f"{RESOURCE}/{name}": one.at_once for name, one in destinations.items() if one.at_once}


def _relay(name: str, target: Destination) -> Relay:
    # Each round of `IN_FLIGHT` events may take the destination's whole timeout, and so may the round before them: that
    # of the first `AWAY` events, whose answer the others wait for.
    rounds = 1 + -(-target.batch // IN_FLIGHT)
    longest = target.timeout * rounds + _SLACK
    return Relay(kind=PREFIX + name, fn=_publish, retry=target.retry, batch=target.batch, timeout=longest)


def named(destinations: Mapping[str, Any] | None) -> dict[str, Destination]:
    """The destinations of ``Resilient(destinations=)`` by name; raises `SetupError` or `BadResourceKey`."""
    by_name = {}
    for name, one in (destinations or {}).items():
        if "/" in resource_key.check(name):
            raise SetupError(f"destination {name!r}: give it a name without a slash; its resource is {RESOURCE}/<name>")
        by_name[name] = destination(name, one)
    return by_name


async def _publish(batch: Batch[str]) -> None:
    """Publish a batch, many events at once; of one key a batch has one event, because the key's next waits for it.

    Each event is settled as soon as it is confirmed, so that a crash repeats few. A destination that is away (its
    connection is lost, or it refuses whatever comes) costs the first `AWAY` events an attempt; the others wait for it
    at no charge. If this worker's last event failed in that way, or it has sent none yet, it sends at most `AWAY`
    events at once until one is answered.
    """
    await _Delivery(batch).run()


class _Delivery:
    """A batch on its way."""

    def __init__(self, batch: Batch[str]) -> None:
        self._batch, self._name = batch, batch.kind.removeprefix(PREFIX)
        self._publishers = _backend(batch[0]).publishers
        self._waiting, self._strikes, self._tasks = iter(batch), 0, 0
        self._is_narrow = True  # at most `AWAY` events are in flight, until one is answered
        self._context = copy_context()  # of each task, whichever event's answer begins it: no span is below another's

    async def run(self) -> None:
        """Publish each event, or say why not."""
        try:
            await self._publishers.open(self._name)
        except Exception as error:  # noqa: BLE001 - whatever was raised, the first event is charged with it
            _count(self._batch[0], self._name, error)
            self._batch.fail(next(self._waiting), error)
            self._strikes = AWAY
        self._is_narrow = not self._publishers.is_well(self._name)
        async with asyncio.TaskGroup() as self._group:
            self._widen(AWAY if self._is_narrow else IN_FLIGHT)

    def _widen(self, most: int) -> None:
        """Let up to ``most`` events be in flight."""
        for _ in range(self._tasks, 0 if _is_cut_off() else min(len(self._batch), most, IN_FLIGHT)):
            self._group.create_task(self._publish_waiting(), context=self._context.copy())
            self._tasks += 1

    async def _publish_waiting(self) -> None:
        for job in self._waiting:
            try:
                message = await self._admitted(job)
            except Exception as error:  # noqa: BLE001 - whatever was raised, nothing was sent: no answer came
                _count(job, self._name, error)
                self._batch.fail(job, error)
            else:
                await self._send(job, message)
            if _is_cut_off():  # and the destination swallowed that: nothing new begins
                return

    async def _admitted(self, job: Job[str]) -> Message:
        """The event, once it may be sent."""
        self._require_present()
        message = message_of(job)
        await _backend(job).admit(self._require_present)  # while it waited, others may have met that it is away
        return message

    async def _send(self, job: Job[str], message: Message) -> None:
        trace = {TRACEPARENT: message.traceparent, TRACESTATE: message.tracestate}
        try:
            with _backend(job).tracing.send(self._name, trace):
                await self._hand_over(message)
        except Exception as error:  # noqa: BLE001 - whatever was raised, this event ends with it
            _count(job, self._name, error)
            is_free = _is_away(error) and self._strikes > AWAY  # all in flight meet it: only the first are charged
            self._batch.fail(job, self._stopped() if is_free else error)
        else:
            _count(job, self._name, message=message)
            self._batch.succeed(job)

    async def _hand_over(self, message: Message) -> None:
        """Publish an event, and note what that says of its destination."""
        try:
            await self._publishers.publish(self._name, message)
        except Exception as error:
            if _is_away(error):
                self._strikes += 1
                self._publishers.note(self._name, is_well=False)
            elif not isinstance(error, ResourceStopped):
                self._note_answer()
            raise
        self._note_answer()

    def _require_present(self) -> None:
        if self._strikes >= AWAY:
            raise self._stopped()

    def _stopped(self) -> ResourceStopped:
        return ResourceStopped(self._batch.resource_key, "connection")

    def _note_answer(self) -> None:
        """It took an event, or refused that one event: the destination is there."""
        self._strikes = 0
        if self._is_narrow or not self._publishers.is_well(self._name):
            self._is_narrow = False
            self._publishers.note(self._name, is_well=True)
            self._widen(IN_FLIGHT)


def _is_cut_off() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _backend(job: Job[str]) -> HandlerBackend:
    return cast("HandlerBackend", backend_of(job))


def _count(job: Job[str], name: str, error: Exception | None = None, message: Message | None = None) -> None:
    """Count what became of a try to publish; one that a gate stopped was none."""
    if isinstance(error, ResourceStopped):
        return
    from resilient.wire.requests.explain import explain  # noqa: PLC0415 - httpx: only where something is sent

    backend = _backend(job)
    counts, now = backend.counts, backend.now()
    if error is not None:
        counts.event(name, explain(error, None, now).failure.kind)
    elif message is not None:
        began = None if "replay" in job.tags else message.time
        counts.event(name, "ok", None if began is None else max(0.0, (now - began).total_seconds()))


def _is_away(error: Exception) -> bool:
    """Whether an error is about the destination, and not about the event."""
    if isinstance(error, ConnectionLost):
        return True
    failure = error.failure if isinstance(error, JobFailure) else None
    return failure is not None and failure.kind is FailureKind.TRANSIENT and failure.counts_for_breaker is not False


def message_of(job: Job[str]) -> Message:
    """The event of a job; raises `Permanent` for a payload that is none."""
    try:
        return decode(job.payload, delivery=job.idempotency_key, number=job.order_no)
    except ValueError as error:
        raise Permanent(f"the payload of job {job.id} ({job.kind}) is {error}", code="undecodable") from None
