"""An `aiohttp.ClientSession` for one job: ``AsyncWebClient(token="", session=aiohttp.session(job))``.

A middleware of the session (aiohttp 3.12 and later) handles each request and each hop of a redirect. Gate and limits
admit the request before any I/O; it gets the account's credentials and an idempotency key (which replaces a key that
the SDK made up, not one that was set by hand); its answer is classified. If the provider refuses the credentials, they
are refreshed and the request is sent once more, if its body is in memory. A handler need not catch the SDK's errors:
the engine classifies them by their causes. Leave the SDK's own retries off: longer waits are the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from resilient.core.base.errors import MissingExtra

try:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.payload import BytesPayload
    from multidict import CIMultiDict, CIMultiDictProxy
    from yarl import URL
except ModuleNotFoundError as error:
    raise MissingExtra("sessions of aiohttp need it: pip install 'resilient-engine[aiohttp]'") from error

from resilient.core.base.bounds import ANSWER_BODY, ANSWER_TIME, ERROR_BODY
from resilient.core.base.errors import Failure, FailureKind, JobFailure, Permanent
from resilient.engine.run.job import Requests
from resilient.wire.requests.answer import is_charset, no_room
from resilient.wire.requests.body_budget import FREE, STEP
from resilient.wire.requests.flow import BARE
from resilient.wire.requests.streams import has_ended, is_readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse

    from resilient.wire.requests.body_budget import Reservation
    from resilient.wire.requests.call import AsyncCall

TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=30.0)
_CLIENT_ERROR: Final = 400
_REMEDIES: Final = "stream it (response.content), or have fewer at once (concurrency=)"
_ERROR_TIMEOUT: Final = 5.0  # seconds for the body of an error
_BARE_NAMES: Final = frozenset(name.decode() for name in BARE)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


def session(job: Requests, **options: Any) -> aiohttp.ClientSession:
    """A session for an ``async def`` handler's job, or for ``job.through(...)``: use it with ``async with``.

    ``options`` go to `aiohttp.ClientSession`; a ``connector`` of the program's own keeps connections between jobs (with
    ``connector_owner=False``). Give a ``timeout`` no total, because its error does not name the request: bound the
    silence, as the default does. Raises `TypeError` for a plain handler's job.
    """
    if not isinstance(job, Requests):
        raise TypeError("aiohttp is for `async def` handlers: a plain one (`def`) takes resilient.adapters.requests")
    own = Middleware(job)
    middlewares = (*options.pop("middlewares", ()), own)
    made = aiohttp.ClientSession(middlewares=middlewares, **{"timeout": TIMEOUT, "response_class": Response, **options})
    _keep_last(made, own)
    return made


def _keep_last(made: aiohttp.ClientSession, own: Middleware) -> None:
    """Keep the job's middleware last where a request has middlewares of its own: they replace the session's."""
    send = made._request  # noqa: SLF001 - every request of a session goes through it, also those of sockets

    async def request(
        *args: Any, middlewares: Sequence[ClientMiddlewareType] | None = None, **options: Any
    ) -> ClientResponse:
        if middlewares is not None:
            middlewares = [*(one for one in middlewares if one is not own), own]
        return await send(*args, middlewares=middlewares, **options)

    object.__setattr__(made, "_request", request)  # aiohttp's own warns of attributes, in development mode


class Response(aiohttp.ClientResponse):
    """An answer whose `read` keeps to the bounds; its ``content`` is aiohttp's stream, without bounds."""

    call: AsyncCall | None = None  # that it answers; None for an answer to no request of the job's
    reservation: Reservation | None = None  # room for its body

    def get_encoding(self) -> str:
        """The charset of its text: UTF-8 if the one that it names is none."""
        name = super().get_encoding()
        return name if is_charset(name) else "utf-8"

    async def read(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`, `NoRoomForAnswer`."""
        if self._body is None:
            try:
                self._body = await _read_whole(self)
            except BaseException as error:
                self.close()
                broke = isinstance(error, (aiohttp.ClientError, OSError)) and not isinstance(error, AnswerTooLarge)
                if self.call is not None and broke:
                    self.call.cut_off(error, by_us=isinstance(error, NoRoomForAnswer))
                raise
        return await super().read()


class AnswerTooLarge(aiohttp.ClientPayloadError, Permanent):
    """The body is larger than what is read into memory, or took longer; ``response.content`` streams it."""

    def __init__(self, status: int) -> None:
        most, seconds = ANSWER_BODY.value, ANSWER_TIME.value
        text = f"the answer's body is larger than {most} bytes or took longer than {seconds} s: stream it"
        aiohttp.ClientPayloadError.__init__(self, text)
        self.failure = Failure(FailureKind.PERMANENT, code="answer_too_large", status=status)


class NoRoomForAnswer(aiohttp.ClientPayloadError, JobFailure):
    """The process holds so many large bodies that this account may have no more now."""

    def __init__(self, explanation: str, *, repeatable: bool) -> None:
        aiohttp.ClientPayloadError.__init__(self, explanation)
        self.failure = no_room(repeatable=repeatable)


class Middleware:
    """The job's middleware; it must be the last of ``ClientSession(middlewares=[...])``, which sees what is sent."""

    def __init__(self, job: Requests) -> None:
        self._job = job
        self._hops: WeakKeyDictionary[ClientResponse, _Hop] = WeakKeyDictionary()  # by the redirect that ended the hop

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send one request; once more if its credentials were refused and refreshed."""
        hop = self._before(request)
        original = request.headers.copy(), request.url
        body = await _repeatable_body(request)
        call, response = await self._once(request, handler, body, hop)
        if call.renewed and body is not None:
            response.release()
            request.headers, request.url = original[0], original[1]
            call, response = await self._once(request, handler, body, hop)
        if response.status in _REDIRECTS:
            bare = hop.bares(call, original[1])
            self._hops[response] = _Hop(
                hop.went_astray or not call.trusted,
                bare,
                original[1].origin(),
                request._traces,  # noqa: SLF001
            )
        return response

    def _before(self, request: ClientRequest) -> _Hop:
        """The latest hop of the chain; aiohttp keeps the responses of a chain to its end."""
        hops = [hop for hop in self._hops.values() if hop.chain is request._traces]  # noqa: SLF001
        return hops[-1] if hops else _START

    async def _once(
        self, request: ClientRequest, handler: ClientHandlerType, body: bytes | None, hop: _Hop
    ) -> tuple[AsyncCall, ClientResponse]:
        url = str(request.url)
        own = request.request_info._replace(headers=CIMultiDictProxy(request.headers.copy()))
        async with self._job.call(
            request.method, url, body=body, headers=dict(request.headers), trusted=not hop.went_astray
        ) as call:
            if hop.bares(call, request.url):
                request.headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() in _BARE_NAMES)
            for name, value in call.headers.items():
                request.headers[name] = value
            if call.url != url:
                request.url = URL(call.url, encoded=True)
            _watch_ends(request.session.connector)
            _drop_spoilt(request.session.connector)
            try:
                response = await handler(request)
            except UnicodeError as error:  # of a name whose label is too long
                raise aiohttp.InvalidURL(request.url, str(error)) from None
            response._request_info = own  # noqa: SLF001 - without our credentials: the text of an error shows it
            if isinstance(response, Response):
                response.reservation = call.make_reservation()
            call.report(response.status, list(response.headers.items()), await _read_to_classify(response, call))
        if isinstance(response, Response):  # only now: what breaks off within the call fails it
            response.call = call
        return call, response


def _watch_ends(connector: aiohttp.BaseConnector | None) -> None:
    """Let the connector's new connections tell a body that was cut off from one that has ended."""
    made = getattr(connector, "_factory", None)
    if isinstance(made, partial) and made.func is ResponseHandler:
        connector._factory = partial(_Watched, *made.args, **made.keywords)  # type: ignore[union-attr]  # noqa: SLF001


class _Watched(ResponseHandler):
    """A connection whose end fails a body that was not read to its own end.

    aiohttp takes a body without a length for whole however its connection ends. One that ends by an error, or that TLS
    has not ended, too, was cut by somebody (RFC 9112, 9.8).
    """

    def eof_received(self) -> None:
        self._judge(None)
        super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._judge(exc)  # uvloop tells of no end before
        super().connection_lost(exc)

    def _judge(self, error: BaseException | None) -> None:
        payload = self._payload
        if payload is None or payload.is_eof() or payload.exception() is not None:
            return
        tls = None if self.transport is None else self.transport.get_extra_info("ssl_object")
        if error is not None:
            payload.set_exception(aiohttp.ClientPayloadError(f"the connection broke off: {error}"))
        elif tls is not None and not has_ended(tls):
            payload.set_exception(aiohttp.ClientPayloadError("the connection was cut before TLS ended"))


def _drop_spoilt(connector: aiohttp.BaseConnector | None) -> None:
    """Close idle connections with unread bytes, here or in sockets: aiohttp would read them as the next answer."""
    for idle in getattr(connector, "_conns", {}).values():
        for protocol, _ in idle:
            transport = protocol.transport
            if protocol.should_close or (transport and is_readable(transport.get_extra_info("socket"))):
                protocol.close()


class _Hop(NamedTuple):
    """The hop before a request: its origin, and what holds for the chain up to it.

    ``went_astray``: some hop was at a foreign host. ``bare``: that hop was sent without the caller's headers.
    ``chain``: the list of traces that aiohttp makes for each call of the session, and that all of its hops share.
    """

    went_astray: bool = False
    bare: bool = False
    origin: URL | None = None  # None: the request is the first of its chain
    chain: object = None

    def bares(self, call: AsyncCall, url: URL) -> bool:
        """Whether ``url`` is sent without the caller's headers: this redirect, or one before, led to a foreign host."""
        return not call.trusted and self.origin is not None and (self.bare or self.origin != url.origin())


_START: Final = _Hop()


async def _read_to_classify(response: ClientResponse, call: AsyncCall) -> bytes | None:
    """Read the part of the body that the classification needs; None if it needs none."""
    if response.status >= _CLIENT_ERROR:
        return await _read_beginning(response)
    if call.reads_success and "json" in response.headers.get("content-type", ""):
        return await response.read()
    return None


async def _read_beginning(response: ClientResponse) -> bytes:
    """Read the beginning of an error's body; the response keeps no more of it."""
    body = bytearray()
    with contextlib.suppress(aiohttp.ClientPayloadError, TimeoutError):  # an error's body decides nothing by itself
        async with asyncio.timeout(_ERROR_TIMEOUT):
            while len(body) < ERROR_BODY.value and (chunk := await response.content.readany()):
                body += chunk
    if not response.content.at_eof():
        _cut(response)
    response._body = bytes(body[: ERROR_BODY.value])  # noqa: SLF001 - aiohttp has no public way to set it
    return response._body  # noqa: SLF001


async def _read_whole(response: Response) -> bytes:
    """Read all of a body, in parts that aiohttp decodes within its own small buffer.

    Raises `AnswerTooLarge`, `NoRoomForAnswer`.
    """
    body, room = bytearray(), min(FREE, ANSWER_BODY.value)
    try:
        async with asyncio.timeout(ANSWER_TIME.value):
            while chunk := await response.content.readany():
                body += chunk
                while len(body) > room:
                    room += _widen(response, room)
    except BaseException as error:  # the frames of its traceback would keep the body
        body.clear()
        response.reservation = None
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise AnswerTooLarge(response.status) from None
        raise
    return bytes(body)


def _widen(response: Response, room: int) -> int:
    """Take room for one step more of a body that has ``room``; returns how much. Raises as `_read_whole`."""
    step = min(STEP, ANSWER_BODY.value - room)
    if step <= 0:
        raise AnswerTooLarge(response.status)
    if response.reservation is not None and not response.reservation.grow(step):
        repeatable = response.call is not None and response.call.repeatable
        raise NoRoomForAnswer(response.reservation.explanation(_REMEDIES), repeatable=repeatable)
    return step


def _cut(response: ClientResponse) -> None:
    """Close the connection, but leave the response readable: `ClientResponse.close` forbids that."""
    if response.connection is not None:
        response.connection.close()
        response._connection = None  # noqa: SLF001 - as at the end of its body


async def _repeatable_body(request: ClientRequest) -> bytes | None:
    """The body, if it can be sent twice; None for a stream."""
    body: Any = request.body
    if not body:
        return b""
    return await body.as_bytes() if isinstance(body, BytesPayload) else None


__all__ = ["Middleware", "session"]
