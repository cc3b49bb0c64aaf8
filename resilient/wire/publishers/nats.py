"""NATS JetStream, by nats-py: an event is published when the stream has acknowledged it.

``Nats-Msg-Id`` is the delivery's id: what is sent again after a lost acknowledgement is dropped within the stream's
duplicate window (2 minutes by default), what is replayed on purpose is not. An acknowledgement is not durable at
once: a server writes to its disk every two minutes unless ``sync_interval`` says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import JobFailure, Permanent
from resilient.core.base.misfit import explained_class
from resilient.wire.publishers.base import Destination, Unsendable, away, close_quickly, extra, fill, is_fixed, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.core.events.message import Message

_FRAME: Final = b"NATS/1.0\r\n\r\n"  # around a message's headers
_TOO_LARGE: Final = 10_054  # of JetStream's errors: larger than the stream's `max_msg_size`
# No room on the server or in the account, whichever the stream: for the account's limit, the disk, the memory, either.
_NO_ROOM: Final = frozenset({10_002, 10_023, 10_028, 10_047})
_DENIED: Final = "permissions violation"
_DENIED_SUBJECT: Final = re.compile(r'permissions violation for publish to "(.*)"')


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
        connection, denials = extra("nats", "nats").NATS(), _Denials()
        try:
            # Its own reconnecting would hold events back in memory: ours are safe where they are.
            await connection.connect(
                self.url,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,
                connect_timeout=self.timeout,
                error_cb=denials.note,
            )
        except BaseException as error:
            await close_quickly(connection.close)
            if not isinstance(error, Exception):  # it took too long
                raise
            raise away("NATS", error) from error
        return _JetStream(self, connection, denials)


class _JetStream:
    def __init__(self, destination: Nats, connection: Any, denials: _Denials) -> None:
        self._destination, self._connection, self._denials = destination, connection, denials
        self._stream = connection.jetstream(timeout=2 * destination.timeout)  # the engine ends it before

    async def publish(self, message: Message) -> None:
        """Publish, and wait for the stream's acknowledgement."""
        subject = fill(self._destination.subject, message)
        headers = {**message.headers, "Nats-Msg-Id": message.delivery}
        if self._destination.stream is not None:
            headers["Nats-Expected-Stream"] = self._destination.stream
        _check_size(message.body, headers, self._connection.max_payload)
        ill, reasons = is_fixed(self._destination.subject), list[str]()
        try:
            async with asyncio.timeout(None) as end:
                with self._denials.watched(subject, end, reasons):
                    await self._stream.publish(subject, message.body, headers=headers)
        except Exception as error:
            if reasons:
                ill = ill or not _DENIED_SUBJECT.search(reasons[0])
                raise refused(f"NATS did not take the event: {reasons[0]}", "no_permission", ill=ill) from error
            raise _failure(error, connected=self._connection.is_connected, ill=ill) from error

    async def silence(self, message: Message) -> JobFailure | None:
        """Whether no stream listens to the subject, but somebody does who never acknowledges an event."""
        subject = fill(self._destination.subject, message)
        try:
            await self._stream.find_stream_name_by_subject(subject)
        except Exception as error:  # noqa: BLE001 - whatever the library raises, nothing is known then
            if type(error).__name__ != "NotFoundError":
                return None
            ill = is_fixed(self._destination.subject)
            return refused("no JetStream stream listens to the event's subject, only others do", "no_stream", ill=ill)
        return None

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
        code = getattr(error, "err_code", None)
        ill = ill or code in _NO_ROOM
        return refused(f"JetStream did not take the event: {error}", str(code or name), ill=ill)
    return away("NATS", error)


class _Denials:
    """What the server says of missing rights: it answers no publish with that, so each would wait in vain.

    Other errors of the connection are ignored: the next publish meets them.
    """

    def __init__(self) -> None:
        # By subject, in small letters as the library tells it: what ends each publish, and what was said about it.
        self._under_way: dict[str, dict[asyncio.Timeout, list[str]]] = {}

    @contextlib.contextmanager
    def watched(self, subject: str, end: asyncio.Timeout, reasons: list[str]) -> Iterator[None]:
        """A block that publishes to a subject; if the server says that it may not, that is in the list, and it ends."""
        same = self._under_way.setdefault(subject.lower(), {})
        same[end] = reasons
        try:
            yield
        finally:
            del same[end]
            if not same:
                self._under_way.pop(subject.lower(), None)

    async def note(self, error: Exception) -> None:
        """End what the server denied: publishing to one subject, or (no answer can be received) everything."""
        text = str(error).lower().removeprefix("nats: ")
        if _DENIED not in text:
            return
        match = _DENIED_SUBJECT.search(text)
        for subject in [match[1]] if match else list(self._under_way):
            for end, reasons in self._under_way.get(subject, {}).items():
                if not reasons:
                    reasons.append(text)
                    end.reschedule(0)
