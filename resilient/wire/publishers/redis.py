"""Redis Streams, by redis-py: an event is published when XADD has answered.

Redis does not recognise duplicates: an event whose answer was lost is in the stream twice. And an event is
not durable when XADD has answered: with ``appendfsync everysec`` a power cut costs up to a second.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.misfit import check_whole, explained_class
from resilient.wire.publishers.base import Destination, away, extra, fill, is_fixed, lost, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.base.errors import JobFailure
    from resilient.core.events.message import Message

_CONNECTIONS: Final = 16  # each carries one event at a time
_OF_CLASS: Final = {  # errors that have a class of their own are told without their word
    "NoPermissionError": "NOPERM", "OutOfMemoryError": "OOM", "MovedError": "MOVED", "AskError": "ASK",
    "TryAgainError": "TRYAGAIN", "ClusterDownError": "CLUSTERDOWN", "ClusterCrossSlotError": "CROSSSLOT",
    "MasterDownError": "MASTERDOWN",
}  # fmt: skip

_OF_STREAM: Final = frozenset({"WRONGTYPE", "MOVED", "ASK", "TRYAGAIN"})  # a cluster's server has some of the streams


@explained_class
@dataclass(frozen=True)
class RedisStream(Destination):
    """A stream of a Redis server. Entries have the fields ``id``, ``type``, ``key`` and ``event`` (the JSON).

    ``stream`` may hold ``{type}`` and ``{key}``, or be a function of the `Message`. ``maxlen`` trims it, roughly.
    """

    url: str = field(repr=False)
    stream: str | Callable[[Message], str] = "events"
    maxlen: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("RedisStream", "maxlen", self.maxlen)

    def require(self) -> None:
        """See `Destination`."""
        extra("redis.asyncio", "redis")

    async def connect(self) -> _Stream:
        """See `Destination`."""
        redis = extra("redis.asyncio", "redis")
        pool = redis.BlockingConnectionPool.from_url(
            self.url, max_connections=_CONNECTIONS, timeout=self.timeout, socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
        )  # fmt: skip
        return _Stream(self, redis.Redis.from_pool(pool))


class _Stream:
    def __init__(self, destination: RedisStream, client: Any) -> None:
        self._destination, self._client = destination, client

    async def publish(self, message: Message) -> None:
        """Add an entry to the stream, and wait for the answer."""
        stream = fill(self._destination.stream, message)
        fields = {"id": message.id, "type": message.type, "event": message.body}
        if message.key is not None:
            fields["key"] = message.key
        try:
            await self._client.xadd(stream, fields, maxlen=self._destination.maxlen)
        except Exception as error:
            raise _failure(error, ill=is_fixed(self._destination.stream)) from error

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            await self._client.aclose()


def _failure(error: Exception, *, ill: bool) -> JobFailure:
    """``ill``: what is wrong with the stream is wrong with the whole destination."""
    name = type(error).__name__
    if name == "ReadOnlyError":  # after a failover its name leads to another one, and this connection does not
        return lost("Redis did not take the event: the server is a replica", "READONLY")
    answered = any(cls.__name__ == "ResponseError" for cls in type(error).__mro__)
    if answered:  # WRONGTYPE, OOM, NOPERM: an operator mends the server, so the events must wait and not die
        code = _code(error)
        text = str(error).removeprefix(f"{code} ")
        of_stream = (
            code in _OF_STREAM
            or (code == "NOPERM" and "to run the" not in text)  # not of the command
            or (code == "CLUSTERDOWN" and "slot" in text)
        )
        return refused(f"Redis did not take the event: {code} {text}", code, ill=ill or not of_stream)
    return away("Redis", error)


def _code(error: Exception) -> str:
    """The word in capitals that Redis begins an error with; the library takes some of these words out of the text."""
    word = _OF_CLASS.get(type(error).__name__) or str(error).partition(" ")[0]
    return word[:40] if word.isupper() and word.isascii() else "ERR"
