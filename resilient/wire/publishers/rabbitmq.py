"""RabbitMQ, by aio-pika: publisher confirms, persistent messages, mandatory routing.

A confirm alone says only that the exchange took the message: one that no queue is bound for is confirmed and thrown
away. So messages are mandatory, and a returned one is a failure (https://www.rabbitmq.com/docs/confirms).

A broker closes the channel over a routing key that the user may not write to, with all that is under way there. From
then on events with that routing key go one by one, each over a channel of its own, until it takes one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from resilient.core.base.errors import JobFailure, Permanent
from resilient.core.base.misfit import explained_class
from resilient.core.events.message import CONTENT_TYPE
from resilient.wire.publishers.base import (
    Destination,
    Unsendable,
    away,
    close_quickly,
    cut_off,
    extra,
    fill,
    is_fixed,
    lost,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from resilient.core.events.message import Message

_LONGEST_KEY: Final = 255  # bytes, says AMQP
_MAX_SIZE: Final = re.compile(r"\bmax size (\d+)")
# The broker cuts its text after 252 bytes, and with it a long key (`amqp_exception_explanation` of its source).
_DENIED_KEY: Final = re.compile(r"access to topic '(?:(?P<key>.*)' in exchange|(?P<begin>.*)\.\.\.$)", re.DOTALL)
_MOST_DENIED: Final = 1_000  # routing keys that are remembered
_OF_EVENT: Final = frozenset({"PublishError", "DeliveryError"})  # any other error is of the channel or the connection
_TURN: Final = 0.2  # of its timeout: how long an event waits for its turn on a channel of its own


class _DeniedKeys:
    """The routing keys over which the broker closed a channel. Kept by the destination, beyond a connection."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}  # the oldest first

    def __contains__(self, routing_key: str) -> bool:
        return routing_key in self._keys

    def add(self, routing_key: str) -> None:
        """Note one; of too many the oldest is forgotten."""
        self._keys.pop(routing_key, None)  # one that is noted again is the newest
        self._keys[routing_key] = None
        while len(self._keys) > _MOST_DENIED:
            del self._keys[next(iter(self._keys))]

    def forget(self, routing_key: str) -> None:
        """Note that the broker has let an event with it pass."""
        self._keys.pop(routing_key, None)


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
    denied_keys: _DeniedKeys = field(default_factory=_DeniedKeys, init=False, repr=False, compare=False)

    def require(self) -> None:
        """See `Destination`."""
        extra("aio_pika", "rabbitmq")

    async def connect(self) -> _Exchange:
        """See `Destination`."""
        aio_pika = extra("aio_pika", "rabbitmq")
        connection = None
        try:
            connection = await aio_pika.connect(self.url, timeout=self.timeout)
            exchange = await _open(connection, self.exchange, ensure=True)
            channel = await exchange.channel.get_underlay_channel()
        except BaseException as error:  # the library's errors have no common root
            if connection is not None:
                await close_quickly(connection.close)
            if not isinstance(error, Exception):  # it took too long
                raise
            raise _failure(error, self.exchange) from error
        return _Exchange(self, aio_pika, connection, exchange, channel)


async def _open(connection: Any, name: str, *, ensure: bool = False) -> Any:
    """An exchange, over a channel of its own; ``ensure``: raise the library's error if there is none."""
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    return await channel.get_exchange(name, ensure=ensure) if name else channel.default_exchange


class _Exchange:
    def __init__(self, destination: RabbitMQ, aio_pika: Any, connection: Any, exchange: Any, channel: Any) -> None:
        self._destination, self._aio_pika = destination, aio_pika
        self._connection, self._exchange, self._channel = connection, exchange, channel
        self._locks_by_id: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of events
        self._own_channel_lock = asyncio.Lock()  # for one event at a time that may cost its channel

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
        outgoing = self._aio_pika.Message(
            message.body,
            content_type=CONTENT_TYPE,
            delivery_mode=self._aio_pika.DeliveryMode.PERSISTENT,
            message_id=message.id,
            type=message.type,
            headers=headers,
        )
        # The library tells returned messages apart by their id alone: of two copies one would be taken for published.
        lock = self._locks_by_id.setdefault(message.id, asyncio.Lock())
        try:
            async with lock:
                if to in self._destination.denied_keys:
                    await self._publish_on_own_channel(outgoing, to)
                else:
                    await self._exchange.publish(outgoing, to, mandatory=True)
        except JobFailure:
            raise
        except Exception as error:
            raise self._judge(error, message.body, to) from error

    async def _publish_on_own_channel(self, outgoing: Any, to: str) -> None:
        """Publish over a channel of its own, which the broker may close."""
        async with self._own_turn():
            exchange = await _open(self._connection, self._destination.exchange)
            try:
                await exchange.publish(outgoing, to, mandatory=True)
            except Exception as error:
                if _denied_key(error, to) == to:
                    raise refused(f"RabbitMQ did not take the event: {error}", "no_permission") from error
                raise
            finally:
                await close_quickly(exchange.channel.close)
        self._destination.denied_keys.forget(to)

    @contextlib.asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        """The turn of an event with a denied routing key; many are refused rather than held up, with a place of others.

        One that waited until its time is over would look as if the broker were away.
        """
        try:
            async with asyncio.timeout(self._destination.timeout * _TURN):
                await self._own_channel_lock.acquire()
        except TimeoutError:
            raise refused(
                "RabbitMQ denied the event's routing key before, and others are tried first", "no_permission"
            ) from None
        try:
            yield
        finally:
            self._own_channel_lock.release()

    async def silence(self, message: Message) -> JobFailure | None:  # noqa: ARG002 - it is the same for every event
        """Whether the broker has blocked this connection: then it reads nothing until its alarm is over."""
        try:
            async with asyncio.timeout(0):
                await self._connection.transport.connection.ready()
        except TimeoutError:
            return lost(
                "RabbitMQ has blocked its publishers: it is short of memory or disk (rabbitmq-diagnostics alarms)",
                "blocked",
            )
        return None

    def _judge(self, error: Exception, body: bytes, to: str) -> JobFailure:
        """The failure of an event; when the broker closes a channel over one event, those behind it end with it."""
        if (too_large := _too_large(error, body)) is not None:
            return too_large
        ill = is_fixed(self._destination.routing_key)
        if type(error).__name__ in _OF_EVENT:
            return _failure(error, self._destination.exchange, ill=ill)
        cause = self._cause_of_close() or error
        key = None if ill else _denied_key(cause, to)
        if key:
            self._destination.denied_keys.add(key)
        if key is not None or _MAX_SIZE.search(str(cause)):
            text = f"RabbitMQ closed the channel over one event: {cause}"
            return cut_off(text, "channel_closed", by_another=key != to)
        return _failure(cause, self._destination.exchange)

    def _cause_of_close(self) -> BaseException | None:
        """The error that closed the channel; an event that begins later gets only the error that it is closed."""
        closing = self._channel.closing
        return closing.exception() if closing.done() and not closing.cancelled() else None

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            await self._connection.close()


def _denied_key(error: BaseException, to: str) -> str | None:
    """The routing key that the user may not write to, if a channel was closed over one.

    Of one whose text is cut, ``to`` if it begins so; else "": it is another event's.
    """
    match = _DENIED_KEY.search(str(error)) if type(error).__name__ == "ChannelAccessRefused" else None
    if match is None or match["key"] is not None:
        return None if match is None else match["key"]
    return to if to.startswith(match["begin"]) else ""


def _too_large(error: Exception, body: bytes) -> Permanent | None:
    """The failure of an event whose body the broker finds too large."""
    most = _MAX_SIZE.search(str(error)) if type(error).__name__ == "ChannelPreconditionFailed" else None
    if most is not None and len(body) > int(most[1]):
        return Permanent(
            f"RabbitMQ cannot take the event: it has {len(body):,} bytes, at most {int(most[1]):,} fit",
            code="too_large",
        )
    return None


def _failure(error: BaseException, exchange: str, *, ill: bool = False) -> JobFailure:
    """``ill``: what is wrong with the routing key is wrong with the whole destination."""
    name = type(error).__name__
    if name == "PublishError":
        return refused("RabbitMQ returned the event: no queue is bound for its routing key", "unroutable", ill=ill)
    if name == "DeliveryError":
        return refused("RabbitMQ did not take the event (a queue is full, or failed)", "nacked", ill=ill)
    if name == "InvalidFrameError" and "Connection.OpenOk" in str(error):  # the library drops what the broker says
        return lost(
            "RabbitMQ opens no connection: look at the URL's virtual host and the user's right to it", "no_login"
        )
    if name == "ChannelNotFoundEntity":
        return lost(f"RabbitMQ has no exchange {exchange!r}: declare it", "no_exchange")
    if name == "ChannelAccessRefused":
        return lost(f"RabbitMQ lets this user not publish to {exchange!r}: {error}", "no_permission")
    return away("RabbitMQ", error)
