"""A response that knows its classification and keeps its body within bounds, and the errors it raises.

It is httpx's own Response: `Answer.of` sets ``__class__`` on the one that the pool returned, because building a second
one costs more than the whole classification.

Bounds: `aread`/`read` stop at the pool's ``largest`` and ``whole``, and where its account may hold no more of the
process's ``bodies`` (`body_budget`). Streaming (``client.stream``) has no such bounds, but what it reads is decoded in
small pieces too (see `Intake`).

The errors::

    httpx.HTTPStatusError + JobFailure
    +-- FailedAnswer                  an answer the provider's dialect or its status calls a failure
        +-- TransientAnswer (Transient), PermanentAnswer (Permanent)
        +-- ThrottledAnswer (Throttled), AmbiguousAnswer (Ambiguous)
    httpx.RequestError + Permanent
    +-- AnswerTooLarge                a body beyond the pool's bound
    httpx.RequestError + JobFailure
    +-- NoRoomForAnswer               no room for a body: transient, or ambiguous if a repeat may have a second effect

They are httpx errors, so an SDK and existing code treat them as ever, and job failures, so ``except Permanent`` works
and nothing has to be translated when they leave the handler. Requests without an answer raise httpx's own errors; the
classification is found through their request (see `explain`).
"""

from __future__ import annotations

import codecs
import json
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx
from httpx import DecodingError, RemoteProtocolError

from resilient.core.base.body import BOM
from resilient.core.base.bounds import COOKIE, COOKIES, ERROR_MESSAGE
from resilient.core.base.errors import Ambiguous, Failure, FailureKind, JobFailure, Permanent, Throttled, Transient
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.hosts import without_secrets
from resilient.core.base.phrases import span
from resilient.wire.requests import redact
from resilient.wire.requests.body_budget import FREE, STEP, Reservation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from resilient.core.base.budgets import Budget, Fields
    from resilient.wire.requests.pool import PoolSettings

T = TypeVar("T")

# -- errors -----------------------------------------------------------------------------------------------------------


class FailedAnswer(httpx.HTTPStatusError, JobFailure):
    """An answer that ``failure`` classifies; ``request`` and ``response`` are httpx's."""

    def __init__(self, message: str, *, request: httpx.Request, response: httpx.Response, failure: Failure) -> None:
        Exception.__init__(self, message)
        self.request, self.response, self.failure = request, response, failure


class TransientAnswer(FailedAnswer, Transient):
    """The same request may succeed later."""


class PermanentAnswer(FailedAnswer, Permanent):
    """The same request will never succeed."""


class ThrottledAnswer(FailedAnswer, Throttled):
    """The account must wait."""


class AmbiguousAnswer(FailedAnswer, Ambiguous):
    """A gateway lost the server's answer: the request may have taken effect."""


class AnswerTooLarge(httpx.RequestError, Permanent):
    """The body is larger than the pool's bound, or took longer."""

    def __init__(self, message: str, *, request: httpx.Request | None = None) -> None:
        Exception.__init__(self, message)
        self._request = request
        self.failure = Failure(FailureKind.PERMANENT, code="answer_too_large")


class NoRoomForAnswer(httpx.RequestError, JobFailure):
    """The process holds so many large bodies that this account may have no more now."""

    def __init__(self, message: str, *, repeatable: bool, request: httpx.Request | None = None) -> None:
        Exception.__init__(self, message)
        self._request = request
        self.failure = no_room(repeatable=repeatable)


def no_room(*, repeatable: bool) -> Failure:
    """The failure of an answer whose body had no room; ``repeatable``: asking once more has no second effect."""
    kind = FailureKind.TRANSIENT if repeatable else FailureKind.AMBIGUOUS
    return Failure(kind, code="no_room_for_answer", counts_for_breaker=False)


_CLASSES: Final = {
    FailureKind.TRANSIENT: TransientAnswer,
    FailureKind.PERMANENT: PermanentAnswer,
    FailureKind.THROTTLED: ThrottledAnswer,
    FailureKind.QUOTA: ThrottledAnswer,
    FailureKind.AMBIGUOUS: AmbiguousAnswer,
}


def failed_answer(
    response: httpx.Response, failure: Failure, message: str = "", secrets: Iterable[str] = ()
) -> FailedAnswer:
    """The error for an answer; ``message`` is the provider's own, shown without ``secrets``."""
    request = response.request
    parts = [f"{request.method} {without_secrets(str(request.url))} answered {response.status_code}"]
    named = failure.code not in (None, f"http_{response.status_code}")
    word = f"{failure.kind} ({failure.code})" if named else failure.kind
    if message:
        parts.append(redact.scrub(message, secrets, ERROR_MESSAGE.value))
    if failure.retry_in is not None:
        parts.append(f"told to wait {span(failure.retry_in)}")
    cls = _CLASSES.get(failure.kind, FailedAnswer)
    error = cls(": ".join([parts[0], word, *parts[1:]]), request=request, response=response, failure=failure)
    error.bare_message = ": ".join(parts)
    return error


# -- the response -----------------------------------------------------------------------------------------------------

KEY: Final = "resilient"  # in response.extensions: the Failure, or None
_MISSING: Final = object()
_REMEDIES: Final = "stream it (client.stream), have fewer at once (concurrency=), or raise http=PoolSettings(bodies=)"
_LONGEST_CHARSET: Final = 40  # characters; Python remembers each name that it looked for
_NO_CHARSETS: Final = frozenset({"punycode", "unicode-escape", "raw-unicode-escape"})
_WIDE: Final = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}  # marks of their order of bytes
_READ: Final = httpx.ByteStream(b"")  # the stream of an answer whose body was read


class Answer(httpx.Response):
    """An ``httpx.Response`` whose ``raise_for_status`` raises what the provider meant."""

    bounds: PoolSettings
    account: str  # whose request it answers: its resource key
    repeatable: bool  # that request may be sent again without a second effect
    message: str  # the provider's
    secrets: tuple[str, ...]
    parsed: Any  # the decoded body, if the classification read it
    cut: Callable[..., None] | None  # called when the body breaks off; with ``by_us`` if there was no room for it
    reservation: Reservation | None = None  # of a large body

    @classmethod
    def of(
        cls, response: httpx.Response, bounds: PoolSettings, account: str = "", *, repeatable: bool = False
    ) -> Answer:
        """``response`` itself, with this class and its attributes."""
        response.__class__ = cls
        assert isinstance(response, Answer)  # noqa: S101 - for the type checker
        response.bounds, response.message, response.secrets, response.parsed = bounds, "", (), _MISSING
        response.cut, response.account, response.repeatable = None, account, repeatable
        return response

    def raise_for_status(self) -> Answer:
        """Raise the classified failure: also for a 200 the provider's dialect calls an error."""
        failure: Failure | None = self.extensions.get(KEY)
        if failure is None:
            if self.is_success:
                return self
            failure = Failure(FailureKind.PERMANENT, code=f"http_{self.status_code}", status=self.status_code)
        raise failed_answer(self, failure, self.message, self.secrets)

    @property
    def charset_encoding(self) -> str | None:
        """The charset that its header names; None for one that is none, so that ``text`` fails for no answer."""
        name = super().charset_encoding
        if name is None or not is_charset(name):
            return None
        wide = _WIDE.get(codecs.lookup(name).name)
        has_mark = wide is None or self._content.startswith(wide) if hasattr(self, "_content") else True
        return name if has_mark else f"{codecs.lookup(name).name}-le"  # https://encoding.spec.whatwg.org/#utf-16le

    def json(self, **kwargs: Any) -> Any:
        """The body as JSON; the first call returns what the classification decoded, if it did."""
        if self.parsed is not _MISSING and not kwargs:
            parsed, self.parsed = self.parsed, _MISSING
            return parsed
        return super().json(**kwargs)

    async def aread(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`, `NoRoomForAnswer`."""
        if not hasattr(self, "_content"):
            intake = self._intake(self.bounds.largest, self.bounds.whole, self._draw)
            try:
                async for data in self.aiter_raw():
                    self._take(intake, data)
                self._content = self._whole(intake)
            except BaseException:
                self._drop(intake)
                await self.aclose()
                raise
        self._free_stream()
        return self._content

    def read(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`, `NoRoomForAnswer`."""
        if not hasattr(self, "_content"):
            intake = self._intake(self.bounds.largest, self.bounds.whole, self._draw)
            try:
                for data in self.iter_raw():
                    self._take(intake, data)
                self._content = self._whole(intake)
            except BaseException:
                self._drop(intake)
                self.close()
                raise
        self._free_stream()
        return self._content

    async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As httpx's: decoded, in pieces of bounded size."""
        if hasattr(self, "_content"):
            async for part in super().aiter_bytes(chunk_size):
                yield part
            return
        decoder, rest = self._decoding(), b""
        async for data in self.aiter_raw():
            for part in decoder.feed(data):
                if chunk_size is None:
                    yield part
                    continue
                *chunks, rest = cut(rest + part, chunk_size)
                for chunk in chunks:
                    yield chunk
        for chunk in cut(rest + self._last(decoder.rest), chunk_size or PIECE):
            if chunk:
                yield chunk

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """As httpx's: decoded, in pieces of bounded size."""
        if hasattr(self, "_content"):
            yield from super().iter_bytes(chunk_size)
            return
        decoder, rest = self._decoding(), b""
        for data in self.iter_raw():
            for part in decoder.feed(data):
                if chunk_size is None:
                    yield part
                    continue
                *chunks, rest = cut(rest + part, chunk_size)
                yield from chunks
        yield from filter(None, cut(rest + self._last(decoder.rest), chunk_size or PIECE))

    def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As httpx's."""
        raw = super().aiter_raw(chunk_size)
        return raw if self.cut is None else self._watch(raw, self.cut)

    def iter_raw(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """As httpx's."""
        raw = super().iter_raw(chunk_size)
        return raw if self.cut is None else self._watch_sync(raw, self.cut)

    async def _watch(self, raw: AsyncIterator[bytes], cut: Callable[[], None]) -> AsyncIterator[bytes]:
        try:
            async for chunk in raw:
                yield chunk
        except httpx.RequestError:
            cut()
            raise

    def _watch_sync(self, raw: Iterator[bytes], cut: Callable[[], None]) -> Iterator[bytes]:
        try:
            yield from raw
        except httpx.RequestError:
            cut()
            raise

    async def aread_error(self) -> None:
        """Read the beginning of an error's body, as much as comes in time. No error of the server's is raised."""
        intake = self._intake(self.bounds.error_largest, self.bounds.error_whole)
        try:
            async for data in self.aiter_raw():
                if not intake.take(data):
                    break
        except httpx.HTTPError:
            pass
        finally:
            self._content = intake.content()
        await self.aclose()

    def read_error(self) -> None:
        """`aread_error` for a thread."""
        intake = self._intake(self.bounds.error_largest, self.bounds.error_whole)
        try:
            for data in self.iter_raw():
                if not intake.take(data):
                    break
        except httpx.HTTPError:
            pass
        finally:
            self._content = intake.content()
        self.close()

    def facts(self, headers: Fields, budgets: tuple[Budget, ...] = ()) -> AnswerFacts:
        """The answer as values; the body only if it has been read."""
        if not hasattr(self, "_content"):
            return AnswerFacts(self.status_code, headers, budgets=budgets)
        body = None
        if self._content[:64].removeprefix(BOM).lstrip()[:1] in (b"{", b"["):
            try:
                self.parsed = body = json.loads(self._content)
            except (ValueError, RecursionError):
                body = None
        text = self._content[: self.bounds.error_largest].decode("utf-8", "replace")
        return AnswerFacts(self.status_code, headers, body=body, text=text, budgets=budgets)

    def _coding(self) -> str:
        return ",".join(self.headers.get_list("content-encoding"))

    def _decoding(self) -> Decoder:
        return Decoder(self._coding(), self._request)

    def _intake(self, largest: int, seconds: float, draw: Callable[[int], None] | None = None) -> Intake:
        return Intake(self._coding(), largest, seconds, self._request, draw)

    def _draw(self, count: int) -> None:
        """Take room for ``count`` bytes more of the body. Raises `NoRoomForAnswer`."""
        if self.reservation is None:
            self.reservation = Reservation(self.account, max(self.bounds.bodies, 2 * self.bounds.largest))
        if self.reservation.grow(count):
            return
        if self.cut is not None:
            self.cut(by_us=True)
        explanation = self.reservation.explanation(_REMEDIES)
        raise NoRoomForAnswer(explanation, repeatable=self.repeatable, request=self._request)

    def _drop(self, intake: Intake) -> None:
        """Free the memory of a body that was not read to its end: the error's frames would keep it."""
        intake.clear()
        self.reservation = None

    def _free_stream(self) -> None:
        """Let go of the stream of a body that was read.

        httpx's stream refers to its answer: only the cyclic collector would free the two, and that counts objects, not
        bytes.
        """
        if self.is_closed:
            self.stream = _READ

    def _take(self, intake: Intake, data: bytes) -> None:
        if not intake.take(data):
            raise self._too_large()

    def _whole(self, intake: Intake) -> bytes:
        """The whole body that ``intake`` has read. Raises `AnswerTooLarge`."""
        if not self._last(intake.end):
            raise self._too_large()
        return intake.content()

    def _last(self, end: Callable[[], T]) -> T:
        """What ``end`` returns; if it finds that the body was cut, that is reported like a body that breaks off."""
        try:
            return end()
        except RemoteProtocolError:
            if self.cut is not None:
                self.cut()
            raise

    def _too_large(self) -> AnswerTooLarge:
        return AnswerTooLarge(
            f"the answer's body is larger than {self.bounds.largest} bytes or took longer than"
            f" {self.bounds.whole:g} s: stream it (client.stream), or raise the pool's bounds",
            request=self._request,
        )


class Cookies(httpx.Cookies):
    """The cookies of one execution, within bounds.

    Httpx's own would take as much CPU time as h11 for an answer that sets none, a second for one with a long
    ``Set-Cookie2``, and memory without end.
    """

    def extract_cookies(self, response: httpx.Response) -> None:
        """Keep the cookies that an answer sets: the first of one answer, the latest of all."""
        values = response.headers.get_list("set-cookie")
        if not values:
            return
        headers = [("set-cookie", value) for value in values[: COOKIES.value] if len(value) <= COOKIE.value]
        super().extract_cookies(httpx.Response(200, headers=headers, request=response.request))
        for cookie in list(self.jar)[: -COOKIES.value]:
            self.jar.clear(cookie.domain, cookie.path, cookie.name)


class NoCookies(httpx.Cookies):
    """For a client that many accounts share: no cookie is kept."""

    def extract_cookies(self, response: httpx.Response) -> None:
        """Keep none."""


def is_charset(name: str) -> bool:
    """Whether a charset that an answer names is one: Python also knows packers, escapes, and one of quadratic time."""
    if len(name) > _LONGEST_CHARSET:
        return False
    try:
        b"x".decode(name, "replace")
    except (LookupError, ValueError):
        return False
    return codecs.lookup(name).name not in _NO_CHARSETS


# -- bodies -----------------------------------------------------------------------------------------------------------
#
# Bodies of answers, decoded piece by piece and counted while they come, so that no server fills our memory.
#
# One coding and no more: a coding within a coding multiplies (a kilobyte becomes a gigabyte before its outer layer is
# done), no API needs it, and we ask for none. Every body that is read goes through `Intake`: it counts what came over
# the wire and what was made of it, and looks at the clock with each part, because a compressed body may also say
# nothing for ever.

__all__ = ["ASKED_FOR", "PIECE", "Cookies", "Decoder", "DecodingError", "Intake", "RemoteProtocolError", "cut"]
PIECE: Final = 64 * 1024  # bytes that are decoded at once
ASKED_FOR: Final = "gzip, deflate"
_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})
_SLICE: Final = 4 * 1024  # bytes of a body that zlib gets at once: for each member of gzip it copies what follows
_FRAME: Final = 2  # bytes that begin zlib's frame around deflate (RFC 1950, 2.2)
_MEMBER: Final = b"\x1f\x8b"  # the beginning of each member of gzip
_OTHERS: Final = frozenset({"br", "zstd", "compress", "x-compress", "dcb", "dcz"})


class Decoder:
    """Undoes the coding that ``Content-Encoding`` names; ``identity``, ``utf-8`` and the like name none."""

    __slots__ = ("_coding", "_has_begun", "_head", "_inflate", "_refusal", "_request", "_tail")

    def __init__(self, content_encoding: str = "", request: httpx.Request | None = None) -> None:
        self._request = request  # what its errors name
        named = [word.strip().lower() for word in content_encoding.split(",")]
        codings = [word for word in named if word in _CODINGS or word in _OTHERS]
        self._coding = codings[0] if codings else ""
        self._refusal = ""
        if len(codings) > 1:
            self._refusal = f"the answer is encoded {len(codings)} times: one coding is decoded"
        elif self._coding in _OTHERS:
            self._refusal = f"the answer is encoded as {self._coding}: {ASKED_FOR} are decoded"
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._head = b""  # the beginning of a body in deflate, until it shows whether there is a frame
        self._tail = b""  # the first bytes behind the end
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What some more bytes decode to, in pieces of at most `PIECE`. Raises `DecodingError`."""
        if not data:
            return
        if self._refusal:
            raise DecodingError(self._refusal, request=self._request)
        self._has_begun = True
        if not self._coding:
            yield from (data[at : at + PIECE] for at in range(0, len(data), PIECE))
            return
        for at in range(0, len(data), _SLICE):
            yield from self._decoded(data[at : at + _SLICE])

    def _decoded(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof and not (data := self._next_member(data)):
                return
            part = self._decompress(data)
            data = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            if part:
                yield part

    def _next_member(self, data: bytes) -> bytes:
        """The data behind an end if it begins another member of gzip (RFC 1952, 2.2): nothing else is decoded."""
        data = self._tail + data
        self._tail = data[: len(_MEMBER)]
        if self._tail != _MEMBER or "gzip" not in self._coding:
            return b""
        self._tail, self._inflate = b"", zlib.decompressobj(zlib.MAX_WBITS | 16)
        return data

    def rest(self) -> bytes:
        """What is left at the end. Raises `DecodingError`, `RemoteProtocolError` for a body that was cut."""
        if not self._coding or self._refusal or not self._has_begun:
            return b""
        try:
            rest = self._inflate.flush()
        except zlib.error as error:
            raise DecodingError(f"the answer is no {self._coding}: {error}", request=self._request) from None
        if not self._inflate.eof:  # by a server, behind the one that answers, which did not say so
            raise RemoteProtocolError(f"the answer's body ends within its {self._coding}", request=self._request)
        return rest

    def _decompress(self, data: bytes) -> bytes:
        if self._coding == "deflate":  # RFC 9110, 8.4.1.2: some send it without zlib's frame
            data, self._head = self._head + data, b""
            if len(data) < _FRAME:
                self._head = data
                return b""
            has_frame = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:_FRAME], "big") % 31 == 0
            self._coding = "deflate (zlib)" if has_frame else "raw deflate"
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if has_frame else -zlib.MAX_WBITS)
        try:
            return self._inflate.decompress(data, PIECE)
        except zlib.error as error:
            raise DecodingError(f"the answer is no {self._coding}: {error}", request=self._request) from None


def cut(data: bytes, size: int) -> list[bytes]:
    """``data`` in chunks of ``size`` bytes and a shorter one, perhaps empty."""
    whole = len(data) - len(data) % size
    return [*(data[at : at + size] for at in range(0, whole, size)), data[whole:]]


class Intake:
    """A body up to a size (bytes, on the wire and decoded) and a time (seconds).

    ``draw`` takes room for so many bytes of what is beyond `FREE`; what it raises leaves `take` and `end`.
    """

    __slots__ = ("_chunks", "_decoder", "_draw", "_end", "_raw", "_rest", "_room")

    def __init__(
        self,
        content_encoding: str,
        largest: int,
        seconds: float,
        request: httpx.Request | None = None,
        draw: Callable[[int], None] | None = None,
    ) -> None:
        self._decoder = Decoder(content_encoding, request)
        self._chunks: list[bytes] = []
        self._room = self._raw = largest
        self._rest, self._draw = 0, draw  # bytes that may still be drawn
        if draw is not None and largest > FREE:
            self._room, self._rest = FREE, largest - FREE
        self._end = time.monotonic() + seconds

    def take(self, data: bytes) -> bool:
        """Take some bytes from the wire; False once a bound is passed. Raises `DecodingError`."""
        self._raw -= len(data)
        if self._raw < 0 or time.monotonic() >= self._end:
            self._keep(data)
            return False
        return all(self._add(part) for part in self._decoder.feed(data))

    def end(self) -> bool:
        """Take what the decoder has left; False if that passes a bound. Raises as `Decoder.rest` does."""
        return self._add(self._decoder.rest())

    def content(self) -> bytes:
        """The decoded body, as much of it as fits."""
        return b"".join(self._chunks)

    def clear(self) -> None:
        """Forget what was taken."""
        self._chunks.clear()

    def _widen(self, count: int) -> None:
        """Draw room for ``count`` bytes more, in steps."""
        step = min(self._rest, max(count, STEP))
        if self._draw is not None:
            self._draw(step)
        self._rest -= step
        self._room += step

    def _keep(self, data: bytes) -> None:
        """Keep what still fits of the bytes that passed a bound."""
        for part in self._decoder.feed(data):
            if not self._add(part):
                return

    def _add(self, part: bytes) -> bool:
        """Keep a decoded part, as much of it as fits; False if it does not fit whole."""
        if self._rest and len(part) > self._room:
            self._widen(len(part) - self._room)
        self._chunks.append(part[: max(0, self._room)])
        self._room -= len(part)
        return self._room >= 0
