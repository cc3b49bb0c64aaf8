"""An `aiohttp.ClientSession` for one job: ``AsyncWebClient(token="", session=aiohttp.session(job))``.

The job stands in the session as a middleware (aiohttp 3.12 and later), which sees each request and each hop of a
redirect: it is admitted by gate and limits before any I/O, given the account's credentials and an idempotency key (a
key the SDK made up is replaced, one set by hand stays), and classified by its answer. Credentials refused once are
refreshed, and the request is repeated if its body is in memory. Whatever the SDK raises is read by what lies beneath
it, so a handler need not catch it. Leave the SDK's own retries off: longer waits are the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.errors import MissingExtra

try:
    import aiohttp
    from aiohttp.payload import BytesPayload
    from multidict import CIMultiDict
    from yarl import URL
except ModuleNotFoundError as error:
    raise MissingExtra("sessions of aiohttp need it: pip install 'resilient-engine[aiohttp]'") from error

from resilient.core.bounds import ANSWER_BODY, ANSWER_TIME, ERROR_BODY
from resilient.core.errors import Permanent
from resilient.core.failure import Failure, FailureKind
from resilient.engine.requests import Requests
from resilient.wire.outgoing import BARE

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

    from resilient.wire.call import AsyncCall

TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=30.0)
_CLIENT_ERROR: Final = 400
_ERROR_PATIENCE: Final = 5.0  # seconds for the body of an error
_KEPT: Final = frozenset(name.decode() for name in BARE)
_MOST_HOPS: Final = 100


def session(job: Requests, **options: Any) -> aiohttp.ClientSession:
    """A session for an ``async def`` handler's job, or for ``job.through(...)``: use it with ``async with``.

    ``options`` go to `aiohttp.ClientSession`; a ``connector`` of the program's own keeps connections between jobs (say
    ``connector_owner=False``). A ``timeout`` with a total ends requests without saying whose they were: bound silence
    instead, as the default does. Raises `TypeError` for a plain handler's job.
    """
    if not isinstance(job, Requests):
        raise TypeError("aiohttp is for `async def` handlers: a plain one (`def`) takes resilient.adapters.requests")
    middlewares = (*options.pop("middlewares", ()), Middleware(job))
    return aiohttp.ClientSession(middlewares=middlewares, **{"timeout": TIMEOUT, "response_class": Response, **options})


class Response(aiohttp.ClientResponse):
    """An answer whose body is read within bounds; its ``content`` is a stream as ever."""

    async def read(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`."""
        if self._body is None:
            try:
                self._body = await _whole(self)
            except BaseException:
                self.close()
                raise
        return await super().read()


class AnswerTooLarge(aiohttp.ClientPayloadError, Permanent):
    """The body is larger than what is read into memory, or took longer; ``response.content`` streams it."""

    def __init__(self, status: int) -> None:
        most, seconds = ANSWER_BODY.value, ANSWER_TIME.value
        text = f"the answer's body is larger than {most} bytes or took longer than {seconds} s: stream it"
        aiohttp.ClientPayloadError.__init__(self, text)
        self.failure = Failure(FailureKind.PERMANENT, code="answer_too_large", status=status)


class Middleware:
    """For ``ClientSession(middlewares=[..., Middleware(job)])``: the last one sees what is sent."""

    def __init__(self, job: Requests) -> None:
        self._job = job
        self._hops: dict[str, _Hop] = {}  # by where redirects lead

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """One request, sent at most twice."""
        hop = self._hops.pop(str(request.url), _START)
        kept = request.headers.copy(), request.url
        body = await _in_memory(request)
        call, response = await self._once(request, handler, body, hop)
        if call.renewed and body is not None:
            response.release()
            request.headers, request.url = kept[0], kept[1]
            call, response = await self._once(request, handler, body, hop)
        target = response.headers.get("Location") if response.status in (301, 302, 303, 307, 308) else None
        if target is not None and len(self._hops) < _MOST_HOPS:
            with contextlib.suppress(ValueError):  # no URL: aiohttp says so
                bare = hop.bares(call, kept[1])
                self._hops[str(kept[1].join(URL(target)))] = _Hop(hop.left or not call.trusted, bare, kept[1].origin())
        return response

    async def _once(
        self, request: ClientRequest, handler: ClientHandlerType, body: bytes | None, hop: _Hop
    ) -> tuple[AsyncCall, ClientResponse]:
        url = str(request.url)
        async with self._job.call(
            request.method, url, body=body, headers=dict(request.headers), trusted=not hop.left
        ) as call:
            if hop.bares(call, request.url):
                request.headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() in _KEPT)
            for name, value in call.headers.items():
                request.headers[name] = value
            if call.url != url:
                request.url = URL(call.url, encoded=True)
            _drop_spoilt(request.session.connector)
            response = await handler(request)
            call.report(response.status, list(response.headers.items()), await _look(response, call))
        return call, response


def _drop_spoilt(connector: aiohttp.BaseConnector | None) -> None:
    """Close idle connections that hold bytes nobody asked for: aiohttp would read them as the next answer."""
    for idle in getattr(connector, "_conns", {}).values():
        for protocol, _ in idle:
            if protocol.should_close:
                protocol.close()


class _Hop(NamedTuple):
    """What led to a request: whether the chain has left the provider's hosts, is bare since, and from where."""

    left: bool = False
    bare: bool = False
    origin: URL | None = None  # None: no redirect led here

    def bares(self, call: AsyncCall, url: URL) -> bool:
        """Whether a request for ``url`` carries nobody's headers: once a redirect led to a stranger, to the end."""
        return not call.trusted and self.origin is not None and (self.bare or self.origin != url.origin())


_START: Final = _Hop()


async def _look(response: ClientResponse, call: AsyncCall) -> bytes | None:
    """As much of the body as has to be read here."""
    if response.status >= _CLIENT_ERROR:
        return await _beginning(response)
    if call.reads_success and "json" in response.headers.get("content-type", ""):
        return await response.read()
    return None


async def _beginning(response: ClientResponse) -> bytes:
    """The beginning of an error's body, which is then all there is of it."""
    found = bytearray()
    with contextlib.suppress(aiohttp.ClientPayloadError, TimeoutError):  # an error's body decides nothing by itself
        async with asyncio.timeout(_ERROR_PATIENCE):
            while len(found) < ERROR_BODY.value and (chunk := await response.content.readany()):
                found += chunk
    if not response.content.at_eof():
        _cut(response)
    response._body = bytes(found[: ERROR_BODY.value])  # noqa: SLF001 - there is no public way to give it back
    return response._body  # noqa: SLF001


async def _whole(response: ClientResponse) -> bytes:
    """All of a body, in parts that aiohttp decodes within its own small buffer. Raises `AnswerTooLarge`."""
    found = bytearray()
    async with asyncio.timeout(ANSWER_TIME.value):
        while chunk := await response.content.readany():
            found += chunk
            if len(found) > ANSWER_BODY.value:
                raise AnswerTooLarge(response.status)
    return bytes(found)


def _cut(response: ClientResponse) -> None:
    """Close the connection, but leave the response readable: `ClientResponse.close` forbids that."""
    if response.connection is not None:
        response.connection.close()
        response._connection = None  # noqa: SLF001 - what its own end does


async def _in_memory(request: ClientRequest) -> bytes | None:
    """A body that can be sent twice; None for a stream."""
    body: Any = request.body
    if not body:
        return b""
    return await body.as_bytes() if isinstance(body, BytesPayload) else None


__all__ = ["Middleware", "session"]
