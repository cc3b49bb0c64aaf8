"""RabbitMQ, by aio-pika: publisher confirms, persistent messages, mandatory routing.

A confirm alone says only that the exchange took the message: one that no queue is bound for is confirmed and thrown
away. So messages are mandatory, and a returned one is a failure (https://www.rabbitmq.com/docs/confirms).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from resilient.core.base.errors import Permanent
from resilient.core.base.misfit import explained_class
from resilient.core.events.message import CONTENT_TYPE
from resilient.wire.publishers.base import Destination, Unsendable, close_unopened, extra, fill, lost, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.base.errors import JobFailure
    from resilient.core.events.message import Message

_LONGEST_KEY: Final = 255  # bytes, says AMQP
_MAX_SIZE: Final = re.compile(r"\bmax size (\d+)")


@explained_class
@dataclass(frozen=True)
class RabbitMQ(Destination):
    """An exchange of a RabbitMQ broker; it and its queues must exist.

    ``exchange=""`` is the default one, whose routing keys are names of queues. ``routing_key`` may hold ``{type}`` and
    ``{key}``, or be a function of the `Message`.
    """

    url: str = field(repr=False)
    exchange: str = ""
    routing_key: str | Callable[[Message], str] = "{type}"

    def require(self) -> None:
        """See `Destination`."""
        extra("aio_pika", "rabbitmq")

    async def connect(self) -> _Exchange:
        """See `Destination`."""
        aio_pika = extra("aio_pika", "rabbitmq")
        connection = None
        try:
            connection = await aio_pika.connect(self.url, timeout=self.timeout)
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = (
                await channel.get_exchange(self.exchange, ensure=True) if self.exchange else (channel.default_exchange)
            )
        except BaseException as error:  # the library's errors have no common root
            if connection is not None:
                await close_unopened(connection.close)
            if not isinstance(error, Exception):  # it took too long
                raise
            raise _failure(error, self.exchange) from error
        return _Exchange(self, aio_pika, connection, exchange)


class _Exchange:
    def __init__(self, destination: RabbitMQ, aio_pika: Any, connection: Any, exchange: Any) -> None:
        self._destination, self._aio_pika = destination, aio_pika
        self._connection, self._exchange = connection, exchange
        self._under_way: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by event

    async def publish(self, message: Message) -> None:
        """Publish, and wait for the broker's confirm."""
        to = fill(self._destination.routing_key, message)
        if len(to.encode()) > _LONGEST_KEY:
            raise Unsendable(
                f"the event's routing key has more than {_LONGEST_KEY} bytes: {to[:40]!r}...", code="long_key"
            )
        headers = {name: value for name, value in message.headers.items() if name != "content-type"}
        if message.key is not None:
            headers["partitionkey"] = message.key
        sent = self._aio_pika.Message(
            message.body,
            content_type=CONTENT_TYPE,
            delivery_mode=self._aio_pika.DeliveryMode.PERSISTENT,
            message_id=message.id,
            type=message.type,
            headers=headers,
        )
        # What is returned is told apart by the message's id alone: of two copies one would be taken for published.
        alone = self._under_way.setdefault(message.id, asyncio.Lock())
        try:
            async with alone:
                await self._exchange.publish(sent, to, mandatory=True)
        except Exception as error:
            _check_size(message.body, error)
            raise _failure(error, self._destination.exchange) from error

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            await self._connection.close()


def _check_size(body: bytes, error: Exception) -> None:
    """Raise `Permanent` for a body that the broker finds too large.

    It closes the channel over it, so everything that is under way there ends in the same error.
    """
    most = _MAX_SIZE.search(str(error)) if type(error).__name__ == "ChannelPreconditionFailed" else None
    if most is not None and len(body) > int(most[1]):
        raise Permanent(
            f"RabbitMQ cannot take the event: it has {len(body):,} bytes, at most {int(most[1]):,} fit",
            code="too_large",
        ) from error


def _failure(error: Exception, exchange: str) -> JobFailure:
    name = type(error).__name__
    if name == "PublishError":
        return refused("RabbitMQ returned the event: no queue is bound for its routing key", "unroutable")
    if name == "DeliveryError":
        return refused("RabbitMQ did not take the event (a queue is full, or failed)", "nacked")
    if name == "ChannelNotFoundEntity":
        return lost(f"RabbitMQ has no exchange {exchange!r}: declare it", "no_exchange")
    return lost(f"RabbitMQ is not there: {name}: {error}", "broker_down")
