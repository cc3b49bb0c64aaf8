"""The relay: the handlers that publish the outbox's events, one kind a destination.

An event is a job. While its destination's circuit, a pause or a limit stops it, it waits and no attempt is charged.
After an error it is tried again as the destination's ``retry`` says. If it is refused for good, it is dead, and a
person can retry it.
"""

from __future__ import annotations

import asyncio
import errno
from contextvars import copy_context
from dataclasses import dataclass
from socket import gaierror
from typing import TYPE_CHECKING, Any, Final, cast

from resilient.core.base import resource_key
from resilient.core.base.errors import (
    FailureKind,
    JobFailure,
    Permanent,
    ResilientError,
    ResourceStopped,
    SetupError,
    chain,
)
from resilient.core.base.phrases import value_text
from resilient.core.base.tracing import TRACEPARENT, TRACESTATE
from resilient.core.events.message import RESOURCE, Message, decode
from resilient.engine.events.outbox import PREFIX
from resilient.engine.ground.kinds import Handler
from resilient.engine.run.job import backend_of
from resilient.store.db import trouble
from resilient.wire.publishers.base import ConnectionLost, Unsendable, destination, is_away, lost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.errors import Failure
    from resilient.engine.run.backend import HandlerBackend
    from resilient.engine.run.job import Batch, Job
    from resilient.wire.publishers.base import Destination, Publisher

IN_FLIGHT: Final = 100  # events of a batch that wait for their confirms at once
# Numbers of a bare `OSError` that a connection has; None: asyncio gives no number if several addresses refuse.
_UNREACHABLE: Final = frozenset({None, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
MOST_STRIKES: Final = 5  # events in a row that find the destination away: the rest of their batch is not sent
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


def make_relays(destinations: Mapping[str, Destination]) -> list[Relay]:
    """A handler for each destination."""
    return [_relay(name, one) for name, one in destinations.items()]


def default_caps(destinations: Mapping[str, Destination]) -> dict[str, int]:
    """How many events each destination gets at once if the program does not say, by resource key."""
    return {f"{RESOURCE}/{name}": one.at_once for name, one in destinations.items() if one.at_once}


def _relay(name: str, target: Destination) -> Relay:
    # Rounds of `IN_FLIGHT` events, each as long as the destination's timeout; before them the first `MOST_STRIKES`
    # events may take as long, because the others wait for an answer to one of these.
    rounds = 1 + -(-target.batch // IN_FLIGHT)
    longest = target.timeout * rounds + _SLACK
    return Relay(kind=PREFIX + name, fn=_publish, retry=target.retry, batch=target.batch, timeout=longest)


def by_name(destinations: Mapping[str, Any] | None) -> dict[str, Destination]:
    """The destinations of ``Resilient(destinations=)`` by name; raises `SetupError` or `BadResourceKey`."""
    checked = {}
    for name, one in (destinations or {}).items():
        if "/" in resource_key.check(name):
            raise SetupError(f"destination {name!r}: give it a name without a slash; its resource is {RESOURCE}/<name>")
        checked[name] = destination(name, one)
    return checked


async def _publish(batch: Batch[str]) -> None:
    """Publish a batch, many events at once. It has one event of each key: the key's next event waits for that one.

    Each event is settled as soon as it is confirmed, so few are sent again after a crash. A destination is away if its
    connection is lost or it refuses every event. Then the first `MOST_STRIKES` events are charged with an attempt (only
    one, if no connection can be opened), and the others wait for it without a charge. A worker whose last event found
    it away, or that has sent none yet, sends at most `MOST_STRIKES` events at once until one is answered.
    """
    await _Delivery(batch).run()


class _Delivery:
    """A batch on its way."""

    def __init__(self, batch: Batch[str]) -> None:
        self._batch, self._name = batch, batch.kind.removeprefix(PREFIX)
        self._publishers = _backend(batch[0]).publishers
        self._waiting, self._strikes, self._tasks = iter(batch), 0, 0
        self._is_narrow = True  # at most `MOST_STRIKES` events are in flight, until one is answered
        self._context = copy_context()  # of each task: one that begins after an event's answer is not in its span

    async def run(self) -> None:
        """Publish each event, or say why not."""
        try:
            await self._publishers.open(self._name)
        except Exception as error:  # noqa: BLE001 - whatever was raised, the first event is charged with it
            failure = _count(self._batch[0], self._name, error)
            self._batch.fail(next(self._waiting), _make_repeatable(error, failure))
            self._strikes = MOST_STRIKES
            self._publishers.note(self._name, is_well=False)
        self._is_narrow = not self._publishers.is_well(self._name)
        async with asyncio.TaskGroup() as self._group:
            self._widen(MOST_STRIKES if self._is_narrow else IN_FLIGHT)
        for job in self._batch:  # a task that was cancelled from outside left them; unsettled, they would count as sent
            if job not in self._batch.succeeded and job not in self._batch.failed:
                self._batch.fail(job, lost("the task that published it was cancelled", "broken_off"))

    def _widen(self, most: int) -> None:
        """Let up to ``most`` events be in flight."""
        for _ in range(self._tasks, 0 if _is_cut_off() else min(len(self._batch), most, IN_FLIGHT)):
            self._group.create_task(self._publish_waiting(), context=self._context.copy())
            self._tasks += 1

    async def _publish_waiting(self) -> None:
        for job in self._waiting:
            try:
                message, publisher = await self._admit(job)
            except Exception as error:  # noqa: BLE001 - whatever was raised, nothing was sent: no answer came
                self._batch.fail(job, _make_repeatable(error, _count(job, self._name, error)))
            else:
                await self._send(job, message, publisher)
            if _is_cut_off():  # and the destination's code caught the cancellation: nothing new begins
                return

    async def _admit(self, job: Job[str]) -> tuple[Message, Publisher]:
        """Wait until the event may be sent; return its message and the connection."""
        self._require_present()
        message = message_of(job)
        return message, await _backend(job).admit(self._open)

    async def _open(self) -> Publisher:
        """Open the connection; raises `ResourceStopped` if other events have found the destination away meanwhile."""
        self._require_present()
        try:
            publisher = await self._publishers.open(self._name)
        except Exception as error:
            if (charged := self._strike(error)) is error:
                raise
            raise charged from error
        self._require_present()
        return publisher

    async def _send(self, job: Job[str], message: Message, publisher: Publisher) -> None:
        """Publish an event; note whether its destination is away or has answered."""
        trace = {TRACEPARENT: message.traceparent, TRACESTATE: message.tracestate}
        try:
            with _backend(job).tracing.send(self._name, trace):
                await self._publishers.hand_over(self._name, publisher, message)
        except Exception as error:  # noqa: BLE001 - whatever was raised, this event ends with it
            failure = _count(job, self._name, error)
            charge = _make_repeatable(error, failure)
            if _is_lost(charge) or (failure is not None and is_away(failure)):
                charge = self._strike(charge)
            elif _is_answer(error, failure):
                self._note_answer()
            self._batch.fail(job, charge)
        else:
            self._note_answer()
            _count_success(job, self._name, message)
            self._batch.succeed(job)

    def _strike(self, error: Exception) -> Exception:
        """Note that the destination is away; return what the event is charged with.

        All events in flight have the same error, and only the first `MOST_STRIKES` are charged with it.
        """
        self._strikes += 1
        self._publishers.note(self._name, is_well=False)
        return error if self._strikes <= MOST_STRIKES else self._stopped()

    def _require_present(self) -> None:
        if self._strikes >= MOST_STRIKES:
            raise self._stopped()

    def _stopped(self) -> ResourceStopped:
        return ResourceStopped(self._batch.resource_key, "connection")

    def _note_answer(self) -> None:
        """Note that the destination is there: it took an event, or refused that one event."""
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


def _count(job: Job[str], name: str, error: Exception) -> Failure | None:
    """Count an attempt that failed and return its failure; None for an event that a gate stopped: nothing was sent."""
    if isinstance(error, ResourceStopped):
        return None
    from resilient.wire.requests.explain import explain  # noqa: PLC0415 - httpx: only where something is sent

    backend = _backend(job)
    failure = explain(error, None, backend.now()).failure
    backend.counts.event(name, failure.kind)
    return failure


def _count_success(job: Job[str], name: str, message: Message) -> None:
    backend, began = _backend(job), None if "replay" in job.tags else message.time
    age = None if began is None else max(0.0, (backend.now() - began).total_seconds())
    backend.counts.event(name, "ok", age)


# A failure says that the destination is away (`is_away`), or that it is there (`_is_answer`), or nothing about it.


def _is_lost(error: Exception) -> bool:
    """Whether the connection is gone, and not because the destination closed it over one event."""
    return isinstance(error, ConnectionLost) and is_away(error.failure)


def _is_answer(error: Exception, failure: Failure | None) -> bool:
    """Whether the failure is an answer of the destination's: before a bug of the program's, nothing need be sent."""
    return failure is not None and failure.kind is not FailureKind.BUG and not isinstance(error, Unsendable)


def _is_cut(error: Exception) -> bool:
    """Whether a connection that the program's own function opened was lost or refused."""
    every = list(chain(error))
    if any(isinstance(one, ResilientError) or trouble.is_of_database(one) for one in every):
        return False  # a `Snooze`, say, that the function raised because of it
    bare = (one.errno for one in every if type(one) is OSError)  # not a file's: that may be this one event's fault
    return any(isinstance(one, (ConnectionError, gaierror)) for one in every) or not _UNREACHABLE.isdisjoint(bare)


def _make_repeatable(error: Exception, failure: Failure | None) -> Exception:
    """Return the error, or a `ConnectionLost` in its place if the confirm or the connection was lost.

    An event, unlike a request, is sent again when it is in doubt.
    """
    if failure is None or not (
        failure.kind is FailureKind.AMBIGUOUS or (failure.kind is FailureKind.BUG and _is_cut(error))
    ):
        return error
    text = value_text(error) if isinstance(error, JobFailure) else f"{type(error).__name__}: {value_text(error)}"
    # Without the error as its cause: one that is in doubt would decide what the whole chain means.
    return lost(text, failure.code or "no_confirm").with_traceback(error.__traceback__)


def message_of(job: Job[str]) -> Message:
    """The event of a job; raises `Permanent` for a payload that is no event."""
    try:
        return decode(job.payload, delivery=job.idempotency_key, number=job.order_no)
    except ValueError as error:
        raise Permanent(f"the payload of job {job.id} ({job.kind}) is {error}", code="undecodable") from None
