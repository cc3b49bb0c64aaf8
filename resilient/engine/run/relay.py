"""The relay: the handlers that publish the outbox's events, one kind a destination.

An event waits as a job like any other, so what is true of jobs is true of it: the destination's circuit, pauses and
limits hold it without a charge, errors are retried by its policy, what is refused for good is dead and can be replayed.
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
from resilient.core.base.tracing import TRACEPARENT, TRACESTATE
from resilient.core.events.message import RESOURCE, Message, decode
from resilient.engine.events.outbox import PREFIX
from resilient.engine.ground.kinds import Handler
from resilient.engine.run.job import backend_of
from resilient.store.db import trouble
from resilient.wire.publishers.base import ConnectionLost, Unsendable, destination, lost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.errors import Failure
    from resilient.engine.run.backend import HandlerBackend
    from resilient.engine.run.job import Batch, Job
    from resilient.wire.publishers.base import Destination, Publisher

IN_FLIGHT: Final = 100  # events of a batch that wait for their confirms at once
# Of an `OSError` without a class of its own; asyncio gives no number where several addresses refuse.
_AWAY_TOO: Final = frozenset({None, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
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
            failure = _count(self._batch[0], self._name, error)
            self._batch.fail(next(self._waiting), _repeatable(error, failure))
            self._strikes = AWAY
            self._publishers.note(self._name, is_well=False)
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
                message, publisher = await self._admitted(job)
            except Exception as error:  # noqa: BLE001 - whatever was raised, nothing was sent: no answer came
                self._batch.fail(job, _repeatable(error, _count(job, self._name, error)))
            else:
                await self._send(job, message, publisher)
            if _is_cut_off():  # and the destination swallowed that: nothing new begins
                return

    async def _admitted(self, job: Job[str]) -> tuple[Message, Publisher]:
        """The event, once it may be sent, and what it is sent over."""
        self._require_present()
        message = message_of(job)
        return message, await _backend(job).admit(self._opened)

    async def _opened(self) -> Publisher:
        """The connection, if the destination is there: while an event waited, others may have met that it is not."""
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
        """Publish an event, and note what that says of its destination."""
        trace = {TRACEPARENT: message.traceparent, TRACESTATE: message.tracestate}
        try:
            with _backend(job).tracing.send(self._name, trace):
                await self._publishers.hand_over(self._name, publisher, message)
        except Exception as error:  # noqa: BLE001 - whatever was raised, this event ends with it
            failure = _count(job, self._name, error)
            charge = _repeatable(error, failure)
            if isinstance(charge, ConnectionLost) or _is_away(failure):
                charge = self._strike(charge)
            elif _is_answer(error, failure):
                self._note_answer()
            self._batch.fail(job, charge)
        else:
            self._note_answer()
            _count_success(job, self._name, message)
            self._batch.succeed(job)

    def _strike(self, error: Exception) -> Exception:
        """Note that the destination is away. All events in flight meet it, and only the first are charged with that."""
        self._strikes += 1
        self._publishers.note(self._name, is_well=False)
        return error if self._strikes <= AWAY else self._stopped()

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


def _count(job: Job[str], name: str, error: Exception) -> Failure | None:
    """Count a try to publish that failed, and return its failure; one that a gate stopped was none."""
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


# What a failure says of the destination: that it is away, that it is there (it refused this one event), or nothing.


def _is_away(failure: Failure | None) -> bool:
    """Whether the destination is away, whoever says so: a destination, or the client in a program's function."""
    if failure is None or failure.kind not in (FailureKind.TRANSIENT, FailureKind.AMBIGUOUS):
        return False
    return failure.counts_for_breaker is not False


def _is_answer(error: Exception, failure: Failure | None) -> bool:
    """Whether the destination gave it: a mistake of the program's own need not have come so far."""
    return failure is not None and failure.kind is not FailureKind.BUG and not isinstance(error, Unsendable)


def _is_cut(error: Exception) -> bool:
    """Whether a connection of the program's function was lost, or refused, that no HTTP client speaks for."""
    every = list(chain(error))
    if any(isinstance(one, ResilientError) or trouble.is_of_database(one) for one in every):
        return False  # a `Snooze`, say, which the function made of it
    bare = (one.errno for one in every if type(one) is OSError)  # a file's may be this one event's fault
    return any(isinstance(one, (ConnectionError, gaierror)) for one in every) or not _AWAY_TOO.isdisjoint(bare)


def _repeatable(error: Exception, failure: Failure | None) -> Exception:
    """The same error, for an event: one whose confirm was lost is sent again, and a lost connection is no mistake."""
    if failure is None or not (
        failure.kind is FailureKind.AMBIGUOUS or (failure.kind is FailureKind.BUG and _is_cut(error))
    ):
        return error
    text = str(error) if isinstance(error, JobFailure) else f"{type(error).__name__}: {error}"
    # Not from the error: what is in doubt anywhere in a chain decides what all of it means.
    return lost(text, failure.code or "no_confirm").with_traceback(error.__traceback__)


def message_of(job: Job[str]) -> Message:
    """The event of a job; raises `Permanent` for a payload that is none."""
    try:
        return decode(job.payload, delivery=job.idempotency_key, number=job.order_no)
    except ValueError as error:
        raise Permanent(f"the payload of job {job.id} ({job.kind}) is {error}", code="undecodable") from None
