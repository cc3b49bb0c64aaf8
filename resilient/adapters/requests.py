"""A `requests.Session` for one job: ``stripe.RequestsClient(session=requests.session(job))``.

Each request, and each hop of a redirect, is a call of the job: admitted by gate and limits before any I/O, given the
account's credentials and an idempotency key (a key the SDK made up is replaced, one set by hand stays), classified by
its answer. Credentials refused once are refreshed, and the request is repeated if its body is in memory. Whatever the
SDK raises is read by what lies beneath it, so a handler need not catch it. Leave the SDK's own retries off: longer
waits are the job's.

An adapter that is mounted on the session (for certificates, say) carries the job's requests as ours does. Retries of
its own are turned off: they would send into a provider's pause, and repeat a request blindly.

No proxies, no ``.netrc``: what the environment says is not taken over, as with ``job.client``.
"""

from __future__ import annotations

import ssl
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin, urlsplit

from resilient.core.base.errors import MissingExtra

try:
    import requests
    from requests.adapters import BaseAdapter, HTTPAdapter
    from requests.structures import CaseInsensitiveDict
    from urllib3.exceptions import ConnectTimeoutError, ProtocolError, ReadTimeoutError
    from urllib3.util.retry import Retry
except ModuleNotFoundError as error:
    raise MissingExtra("sessions of requests need it: pip install 'resilient-engine[requests]'") from error

from resilient.core.base.bounds import ANSWER_BODY, ANSWER_TIME, ERROR_BODY
from resilient.core.base.errors import Failure, FailureKind, JobFailure, Permanent
from resilient.core.base.hosts import address, without_secrets
from resilient.engine.run.job import SyncRequests
from resilient.wire.requests import redact
from resilient.wire.requests.answer import DecodingError, Intake, RemoteProtocolError, is_charset, no_room
from resilient.wire.requests.flow import BARE
from resilient.wire.requests.sockets import Line, line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.wire.requests.call import SyncCall

TIMEOUT: Final = (5.0, 30.0)  # seconds to connect, and of silence; for whoever states none
_SLICE: Final = 16 * 1024
_ERROR_TIMEOUT: Final = 5.0  # seconds for the body of an error
_CLIENT_ERROR: Final = 400
_OVER: Final = "the job's time is over, so its connection was shut"
_REMEDIES: Final = "stream it (stream=True), or have fewer at once (concurrency=)"
_LOCK: Final = threading.Lock()
_KEPT: Final = frozenset(name.decode() for name in BARE)
_pool: BaseAdapter | None = None


def session(job: SyncRequests) -> Session:
    """A session for a plain handler's job (or for ``job.through(...)``). Raises `TypeError` for any other."""
    if not isinstance(job, SyncRequests):
        raise TypeError(
            "requests blocks, so it is for plain handlers (`def`): an `async def` one takes resilient.adapters.aiohttp"
        )
    redact.install()  # urllib3 logs paths with their queries
    return Session(job)


class Session(requests.Session):
    """See the top of this file. Connections are shared by all sessions of the process, cookies by none."""

    __attrs__ = [*requests.Session.__attrs__, "_job"]  # noqa: RUF012 - what a copy takes over

    def __init__(self, job: SyncRequests) -> None:
        self._job = job  # before requests mounts its own adapters, for which ours come
        super().__init__()
        self.trust_env = False
        for scheme in ("https://", "http://"):
            super().mount(scheme, JobAdapter(job, _shared()))

    def mount(self, prefix: str | bytes, adapter: BaseAdapter) -> None:
        """An adapter of the caller's own (its certificates, its pool) carries requests of the job, as ours does."""
        if _carries_http(prefix) and not isinstance(adapter, JobAdapter):
            adapter = JobAdapter(self._job, _on_lines(_without_retries(adapter)), owned=True)
        super().mount(prefix, adapter)

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a redirect leads. Raises `requests.exceptions.InvalidURL` for what is no address of HTTP."""
        try:
            target = super().get_redirect_target(resp)
            if target:
                parts = urlsplit(urljoin(resp.url, target))
                address(f"{parts.scheme}://{parts.netloc}/")
        except ValueError as error:  # also `InvalidInput`, and what is no text
            text = f"{resp.url} redirects to what is no address of HTTP: {error}"
            raise requests.exceptions.InvalidURL(without_secrets(text), request=resp.request, response=resp) from None
        return target

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """A redirect: whether it, or a hop before it, has left the provider's hosts."""
        super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]
        before = response.request
        _note_before(prepared_request, getattr(before, "_hop", None) or Hop(origin=_origin(before)))


@dataclass(frozen=True, slots=True)
class Hop:
    """What the next hop of a chain of redirects needs to know of a request.

    It is on the request itself once that is sent (``_hop``), and on the request of the next hop (``_before``).
    """

    went_astray: bool = False  # it, or a hop before it, was at a foreign host: no credentials any more
    bare: bool = False  # it was sent without the caller's headers
    origin: str = ""


_NO_HOP: Final = Hop()  # before the first request of a chain


class AnswerTooLarge(requests.RequestException, Permanent):
    """The body is larger than what is read into memory, or took longer; ``stream=True`` leaves it to the caller."""

    def __init__(self, response: requests.Response, largest: int, seconds: float) -> None:
        text = f"the answer's body is larger than {largest} bytes or took longer than {seconds:g} s: stream it"
        requests.RequestException.__init__(self, text, response=response)
        self.failure = Failure(FailureKind.PERMANENT, code="answer_too_large", status=response.status_code)


class NoRoomForAnswer(requests.RequestException, JobFailure):
    """The process holds so many large bodies that this account may have no more now."""

    def __init__(self, response: requests.Response, explanation: str, *, repeatable: bool) -> None:
        requests.RequestException.__init__(self, explanation, response=response)
        self.failure = no_room(repeatable=repeatable)


class JobAdapter(BaseAdapter):
    """Carries a session's requests over ``inner``, each as a call of the job."""

    def __init__(self, job: SyncRequests, inner: BaseAdapter, *, owned: bool = False) -> None:
        super().__init__()
        self._job, self._inner, self._owned = job, inner, owned

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - as requests calls it
        timeout: Any = None,
        verify: bool | str = True,  # noqa: FBT001, FBT002
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """One request, sent at most twice."""
        options = {"timeout": timeout or TIMEOUT, "verify": verify, "cert": cert, "proxies": proxies}
        body = _in_memory(request.body)
        call, response = self._once(request, body, options, stream=stream)
        if call.renewed and body is not None:
            response.close()
            _, response = self._once(request, body, options, stream=stream)
        return response

    def close(self) -> None:
        """Close ``inner`` if it is ``owned``: our own connections are those of other sessions too."""
        if self._owned:
            self._inner.close()

    def _once(
        self, request: requests.PreparedRequest, body: bytes | None, options: dict[str, Any], *, stream: bool
    ) -> tuple[SyncCall, requests.Response]:
        trusted = not _before(request).went_astray
        with self._job.call(
            request.method or "GET", request.url or "", body=body, headers=request.headers, trusted=trusted
        ) as call:
            sent = _outgoing(request, call)
            try:
                response = self._inner.send(sent, stream=True, **options)
                # Not those with our credentials: errors and logs show them.
                response.request, response.url = request, request.url or ""
                response.connection = _Again(self, request)  # type: ignore[assignment]
                if response.encoding and not is_charset(response.encoding):
                    response.encoding = "utf-8"
                content = _look(response, call, stream=stream)
                if content is not None and line().broke:  # a socket that `cut` shut ends like a complete body
                    response.close()
                    raise requests.ReadTimeout(_OVER, response=response)
            except requests.RequestException as error:
                error.request = request
                raise
            call.report(response.status_code, dict(response.headers), content)
        if content is None:
            response.iter_content = partial(_streamed, call, response.iter_content)  # type: ignore[method-assign]
        return call, response


def _streamed(call: SyncCall, iter_content: Callable[..., Iterator[Any]], *args: Any, **words: Any) -> Iterator[Any]:
    """What `Response.iter_content` gives; a body that breaks off behind its call makes its outcome unknown again."""
    parts = iter_content(*args, **words)  # raises at once for a body that was read

    def watched() -> Iterator[Any]:
        try:
            yield from parts
        except (requests.exceptions.ChunkedEncodingError, requests.ConnectionError) as error:
            call.cut_off(error)
            raise

    return watched()


class _Again(BaseAdapter):
    """The `response.connection` of our answers.

    Auth hooks (Digest, NTLM) send their second request through it, so that request is a call of the job too.
    """

    def __init__(self, adapter: JobAdapter, first: requests.PreparedRequest) -> None:
        super().__init__()
        self._adapter, self._first = adapter, first

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """The hook's copy has lost our notes: put them back, then send it."""
        _note_before(request, _before(self._first))
        return self._adapter.send(request, *args, **options)

    def close(self) -> None:
        """It has nothing of its own."""


def _look(response: requests.Response, call: SyncCall, *, stream: bool) -> bytes | None:
    """As much of the body as has to be read here: within the call, so that a broken one is its failure."""
    if response.status_code >= _CLIENT_ERROR or response.is_redirect:  # requests reads a redirect without a bound
        return _read(response, ERROR_BODY.value, _ERROR_TIMEOUT)
    if not stream or (call.reads_success and "json" in response.headers.get("content-type", "")):
        return _read(response, ANSWER_BODY.value, ANSWER_TIME.value, call)
    if stream and "," in response.headers.get("content-encoding", ""):
        response.close()
        raise requests.exceptions.ContentDecodingError("the answer is encoded more than once", response=response)
    return None


def _read(response: requests.Response, largest: int, seconds: float, call: SyncCall | None = None) -> bytes:
    """The body, decoded and counted here.

    Of an error (without ``call``) only the first bytes are read; ``response.content`` then holds just these.
    Raises `AnswerTooLarge`, `NoRoomForAnswer`, and what requests raises for one that breaks off or cannot be decoded.
    """
    if response.raw is None:  # made by a test, without a connection
        return response.content
    whole, draw = call is not None, None if call is None else _room(response, call)
    intake = Intake(response.headers.get("content-encoding", ""), largest, seconds, draw=draw)
    if (headers := getattr(response.raw, "headers", None)) is not None:
        headers.pop("content-encoding", None)  # urllib3 would decode it, in one piece and through every layer
    try:
        fits = all(intake.take(data) for data in response.iter_content(_SLICE)) and intake.end()
    except (DecodingError, RemoteProtocolError, requests.RequestException, ValueError) as error:
        fits = False
        if whole:
            intake.clear()
            response.close()
            if isinstance(error, requests.exceptions.SSLError):  # the request was answered
                raise requests.exceptions.ChunkedEncodingError(str(error), response=response) from None
            if isinstance(error, requests.RequestException):
                raise
            if isinstance(error, (RemoteProtocolError, ValueError)):  # urllib3 reads a chunk of a negative length so
                raise requests.exceptions.ChunkedEncodingError(str(error), response=response) from None
            raise requests.exceptions.ContentDecodingError(str(error), response=response) from None
    if not fits:
        response.close()
        if whole:
            intake.clear()
            raise AnswerTooLarge(response, largest, seconds)
    response._content, response._content_consumed = intake.content(), True  # type: ignore[attr-defined]  # noqa: SLF001
    return intake.content()


def _room(response: requests.Response, call: SyncCall) -> Callable[[int], None]:
    """What takes room for more of the body, as long as the response is there. It raises `NoRoomForAnswer`."""
    reservation = call.make_reservation()
    response._reservation = reservation  # type: ignore[attr-defined]  # noqa: SLF001 - so that it ends with the answer

    def draw(count: int) -> None:
        if not reservation.grow(count):
            raise NoRoomForAnswer(response, reservation.explanation(_REMEDIES), repeatable=call.repeatable)

    return draw


def _outgoing(request: requests.PreparedRequest, call: SyncCall) -> requests.PreparedRequest:
    """A copy with our credentials. If a redirect left the provider's hosts, it keeps only the headers in `BARE`."""
    sent = request.copy()
    sent.url = call.url
    before, origin = _before(request), _origin(request)
    bare = not call.trusted and (before.bare or before.origin not in ("", origin))
    request._hop = Hop(before.went_astray or not call.trusted, bare, origin)  # type: ignore[attr-defined]  # noqa: SLF001
    if bare:
        sent.headers = CaseInsensitiveDict({k: v for k, v in sent.headers.items() if k.lower() in _KEPT})
    sent.headers.update(call.headers)
    return sent


def _before(request: requests.PreparedRequest) -> Hop:
    hop: Hop = getattr(request, "_before", _NO_HOP)
    return hop


def _note_before(request: requests.PreparedRequest, hop: Hop) -> None:
    request._before = hop  # type: ignore[attr-defined]  # noqa: SLF001 - requests keeps nothing of the kind


def _in_memory(body: Any) -> bytes | None:
    """A body that can be sent twice; None for a stream."""
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode()
    return bytes(body) if isinstance(body, (bytes, bytearray)) else None


def _carries_http(prefix: str | bytes) -> bool:
    """Whether an adapter mounted at this prefix is that of an http or https address; at "" it is that of all."""
    scheme = (prefix.decode() if isinstance(prefix, bytes) else prefix).lower()
    return scheme.startswith("http") or "http".startswith(scheme)


def _without_retries(adapter: BaseAdapter) -> BaseAdapter:
    if isinstance(adapter, HTTPAdapter):
        adapter.max_retries = Retry(0, read=False)  # as requests has it
    return adapter


def _origin(request: requests.PreparedRequest) -> str:
    head, mark, rest = (request.url or "").partition("://")
    return (head + mark + rest.partition("/")[0]).lower()


def _shared() -> BaseAdapter:
    global _pool  # noqa: PLW0603 - one set of connections for the process
    with _LOCK:
        if _pool is None:
            _pool = _on_lines(HTTPAdapter(pool_connections=50, pool_maxsize=50))
        return _pool


def _put_on_lines(manager: Any) -> None:
    classes = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _on_line(pool) for scheme, pool in classes.items()}


@cache
def _on_line(pool: Any) -> Any:
    """The same kind of pool (plain, TLS, SOCKS), whose connections are on lines."""
    if issubclass(pool, _Released):
        return pool
    connection = type(f"OnLine{pool.ConnectionCls.__name__}", (_OnLine, pool.ConnectionCls), {})
    return type(f"OnLine{pool.__name__}", (_Released, pool), {"ConnectionCls": connection})


def _on_lines(adapter: BaseAdapter) -> BaseAdapter:
    """The same adapter, whose connections end with the time of the job that waits for them, through proxies too."""
    if not isinstance(adapter, HTTPAdapter) or hasattr(adapter, "_is_on_lines"):
        return adapter
    made = adapter.proxy_manager_for

    def proxy_manager_for(*args: Any, **options: Any) -> Any:
        manager = made(*args, **options)
        _put_on_lines(manager)
        return manager

    _put_on_lines(adapter.poolmanager)
    adapter.proxy_manager_for, adapter._is_on_lines = proxy_manager_for, True  # type: ignore[method-assign, attr-defined]  # noqa: SLF001
    return adapter


class _OnLine:
    """A connection that is on the line of the thread that uses it, from a request's beginning to its answer's end."""

    sock: Any
    host: str
    _line: Line | None = None
    # Our own reference: urllib3 sets `sock` to None when an answer with `Connection: close` begins.
    _wire: Any = None

    def request(self, *args: Any, **options: Any) -> None:
        self._line = line()
        if self.sock is not None:
            self._join_line()
        with _under_way():
            super().request(*args, **options)  # type: ignore[misc]

    def connect(self) -> None:
        self._line = line()
        if self._line.is_cut:
            raise ConnectTimeoutError(self, _OVER)
        super().connect()  # type: ignore[misc]
        self._join_line()

    def getresponse(self) -> Any:
        with _under_way():
            response = super().getresponse()  # type: ignore[misc]
        if (original := getattr(response, "_original_response", None)) is not None:
            del original.msg["set-cookie2"]  # nobody sends it; Python reads it in quadratic time
        if self._line is not None and self._line.is_cut:  # a socket that `cut` shut ends like a complete header
            response.close()
            self.close()
            raise ReadTimeoutError(None, self.host, _OVER)  # type: ignore[arg-type]
        return response

    def close(self) -> None:
        """Close the connection. It stays on the line while an answer is read from its socket, which is open so long."""
        super().close()  # type: ignore[misc]
        if self._wire is not None and self._wire.fileno() < 0:
            self.leave_line()

    def _join_line(self) -> None:
        """Hold the socket. Raises `ConnectTimeoutError` if the line is cut, because nothing of the request was sent."""
        self._wire = getattr(self.sock, "socket", self.sock)  # TLS within TLS (an HTTPS proxy's) is no socket itself
        if hasattr(self.sock, "suppress_ragged_eofs"):  # an end without close_notify is a cut (RFC 9112, 9.8)
            self.sock.suppress_ragged_eofs = False
        if self._line is not None and not self._line.hold(self._wire):
            self.close()
            raise ConnectTimeoutError(self, _OVER)

    def leave_line(self) -> None:
        """No thread waits for its socket any more."""
        if self._line is not None and self._wire is not None:
            self._line.release(self._wire)
        self._line = self._wire = None


@contextmanager
def _under_way() -> Iterator[None]:
    """Trouble of TLS once a request is on its way. urllib3 would take it for that of a handshake: nothing sent yet."""
    try:
        yield
    except ssl.SSLError as error:
        raise ProtocolError("the TLS connection broke off", error) from error


class _Released:
    """A pool whose connections are on no line while no request uses them."""

    def _put_conn(self, conn: Any) -> None:
        if conn is not None:
            conn.leave_line()
        super()._put_conn(conn)  # type: ignore[misc]


__all__ = ["JobAdapter", "Session", "session"]
