"""Kafka, by aiokafka: ``acks=all`` and an idempotent producer, the ordering key as the record's key.

An idempotent producer's own retries make no duplicates and keep a partition's order. It does not know what another
producer sent before: an event that is sent again after a crash is in the topic twice.

A broker refuses a whole batch over one record, and counts none of its records. The library counts them, so its next
batch for that partition would be refused as out of order: after a refusal another producer takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import JobFailure, Permanent
from resilient.core.base.misfit import explained_class
from resilient.wire.publishers.base import Destination, away, close_quickly, cut_off, extra, fill, is_fixed, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.core.events.message import Message

_TOO_LARGE: Final = frozenset({"MessageSizeTooLargeError", "RecordListTooLargeError"})
_OF_TOPIC: Final = frozenset({"UnknownTopicOrPartitionError", "TopicAuthorizationFailedError", "InvalidTopicError"})
_REFUSED: Final = _OF_TOPIC | {"PolicyViolationError", "NotEnoughReplicasError", "NotEnoughReplicasAfterAppendError"}
# Of one record, or of another of its batch. What the library does not know, as `INVALID_RECORD`, is an `UnknownError`.
_OF_RECORD: Final = frozenset({
    "CorruptRecordException", "InvalidTimestampError", "UnsupportedForMessageFormatError", "UnknownError",
})  # fmt: skip
# What the batches behind a refused one end in.
_OUT_OF_ORDER: Final = frozenset({"OutOfOrderSequenceNumber", "UnknownProducerId", "ProducerFenced"})
_PART: Final = 0.8  # of the time for an event: the library waits so long for a topic, and says then what is missing


@explained_class
@dataclass(frozen=True)
class Kafka(Destination):
    """A topic of a Kafka cluster.

    ``servers``: ``"host:9092"`` or several. ``topic`` may hold ``{type}``, or be a function of the `Message`.
    ``options`` go to aiokafka's producer (security_protocol, sasl_plain_username, ssl_context, compression_type ...).
    """

    servers: str | Sequence[str]
    topic: str | Callable[[Message], str] = "{type}"
    options: Mapping[str, Any] | None = None

    def require(self) -> None:
        """See `Destination`."""
        extra("aiokafka", "kafka")

    def __repr__(self) -> str:
        """Without the options: they may hold a password."""
        return f"Kafka({self.servers!r}, topic={self.topic!r})"

    async def connect(self) -> _Producer:
        """See `Destination`."""
        aiokafka = extra("aiokafka", "kafka")
        words = {
            "bootstrap_servers": self.servers if isinstance(self.servers, str) else list(self.servers),
            "request_timeout_ms": int(self.timeout * 1000 * _PART),
            **(self.options or {}),
            "acks": "all",
            "enable_idempotence": True,
        }
        producer = aiokafka.AIOKafkaProducer(**words)
        try:
            await producer.start()
        except BaseException as error:
            await close_quickly(producer.stop)
            if not isinstance(error, Exception):  # a cancellation: it took too long
                raise
            raise away("Kafka", error) from error
        return _Producer(self, producer)


class _Producer:
    def __init__(self, destination: Kafka, producer: Any) -> None:
        self._destination, self._producer = destination, producer

    async def publish(self, message: Message) -> None:
        """Send, and wait until all replicas in sync have it."""
        topic = fill(self._destination.topic, message)
        key = None if message.key is None else message.key.encode()
        headers = [(name, value.encode()) for name, value in message.headers.items()]
        try:
            sent = await self._producer.send(topic, message.body, key=key, headers=headers)
            await sent
        except Exception as error:
            raise _failure(error, ill=is_fixed(self._destination.topic)) from error

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            try:
                await self._producer.stop()
            except asyncio.CancelledError:  # it waits for a hung broker, and would leave its tasks and sockets behind
                await close_quickly(self._abort)
                raise

    async def _abort(self) -> None:
        """End what `stop` began and did not finish: the library has no function for it."""
        producer = self._producer
        producer._message_accumulator.fail_all(ConnectionError("its producer is closed"))  # noqa: SLF001
        await producer.client.close()  # which ends the requests that the sender waits for
        await producer._sender.close()  # noqa: SLF001
        await producer.client.close()  # the sender may have opened another connection


def _failure(error: Exception, *, ill: bool) -> JobFailure:
    """``ill``: what is wrong with the topic is wrong with the whole destination."""
    name = type(error).__name__
    if name in _TOO_LARGE:
        return Permanent(f"Kafka cannot take the event: {error}", code=name)
    if name in _OF_RECORD:
        hint = " (a compacted topic, for one, takes no event without a key)" if name == "UnknownError" else ""
        return cut_off(f"Kafka did not take the event, or one that was sent with it: {error}{hint}", name)
    if name in _OUT_OF_ORDER:
        return cut_off(f"Kafka refused an event before this one: {error}", name)
    if name in _REFUSED:
        return refused(f"Kafka did not take the event: {error}", name, ill=ill or name not in _OF_TOPIC)
    return away("Kafka", error)
