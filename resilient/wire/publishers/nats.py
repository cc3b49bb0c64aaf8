"""NATS JetStream, by nats-py: an event is published when the stream has acknowledged it.

``Nats-Msg-Id`` is the delivery's id: what is sent again after a lost acknowledgement is dropped within the stream's
duplicate window (2 minutes by default), what is replayed on purpose is not. An acknowledgement is not durable at
once: a server writes to its disk every two minutes unless ``sync_interval`` says otherwise.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import JobFailure, Permanent
from resilient.core.base.misfit import explained_class
from resilient.wire.publishers.base import Destination, Unsendable, close_unopened, extra, fill, is_fixed, lost, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.events.message import Message

_FRAME: Final = b"NATS/1.0\r\n\r\n"  # around a message's headers
_TOO_LARGE: Final = 10_054  # of JetStream's errors: larger than the stream's `max_msg_size`


@explained_class
@dataclass(frozen=True)
class Nats(Destination):
    """A JetStream subject; a stream must listen to it.

    ``subject`` may hold ``{type}`` and ``{key}``, or be a function of the `Message`. ``stream`` refuses to publish to
    any other stream than that.
    """

    url: str = field(repr=False)
    subject: str | Callable[[Message], str] = "events.{type}"
    stream: str | None = None

    def require(self) -> None:
        """See `Destination`."""
        extra("nats", "nats")

    async def connect(self) -> _JetStream:
        """See `Destination`."""
        connection = extra("nats", "nats").NATS()
        try:
            # Its own reconnecting would hold events back in memory: ours are safe where they are.
            await connection.connect(
                self.url,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,
                connect_timeout=self.timeout,
                error_cb=_quiet,
            )
        except BaseException as error:
            await close_unopened(connection.close)
            if not isinstance(error, Exception):  # it took too long
                raise
            raise lost(f"NATS is not there: {type(error).__name__}: {error}", "broker_down") from error
        return _JetStream(self, connection)


class _JetStream:
    def __init__(self, destination: Nats, connection: Any) -> None:
        self._destination, self._connection = destination, connection
        self._stream = connection.jetstream(timeout=destination.timeout)

    async def publish(self, message: Message) -> None:
        """Publish, and wait for the stream's acknowledgement."""
        subject = fill(self._destination.subject, message)
        headers = {**message.headers, "Nats-Msg-Id": message.delivery}
        if self._destination.stream is not None:
            headers["Nats-Expected-Stream"] = self._destination.stream
        _check_size(message.body, headers, self._connection.max_payload)
        try:
            await self._stream.publish(subject, message.body, headers=headers)
        except Exception as error:
            connected, ill = self._connection.is_connected, is_fixed(self._destination.subject)
            raise _failure(error, connected=connected, ill=ill) from error

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            await self._connection.close()


def _check_size(body: bytes, headers: Mapping[str, str], most: int) -> None:
    """Raise `Permanent` for what the server would close the connection over; the library counts the body alone."""
    size = len(body) + len(_FRAME) + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    if size > most:
        raise Unsendable(f"NATS cannot take the event: it has {size:,} bytes, at most {most:,} fit", code="too_large")


def _failure(error: Exception, *, connected: bool, ill: bool) -> JobFailure:
    """``ill``: what is wrong with the subject is wrong with the whole destination."""
    name = type(error).__name__
    if name in ("MaxPayloadError", "BadSubjectError", "BadHeaderError"):
        return Unsendable(f"NATS cannot take the event: {error}", code=name)  # the library's own checks
    if getattr(error, "err_code", None) == _TOO_LARGE:
        return Permanent(f"JetStream cannot take the event: {error}", code="too_large")
    if connected and name == "NoStreamResponseError":
        return refused("no JetStream stream listens to the event's subject, or JetStream is off", "no_stream", ill=ill)
    if connected and name not in ("TimeoutError", "ConnectionClosedError", "ConnectionDrainingError"):
        return refused(f"JetStream did not take the event: {error}", str(getattr(error, "err_code", None) or name))
    return lost(f"NATS is not there: {name}: {error}", "broker_down")


async def _quiet(_: Exception) -> None:
    """Ignore an error of the connection: the next publish meets it."""
