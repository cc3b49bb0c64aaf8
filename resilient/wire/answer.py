"""A response that knows its classification and keeps its body within bounds.

It is httpx's own Response, made over after the fact: the transport sets ``__class__`` on what the pool
returned, because building a second Response costs more than the whole classification.

Bounds: `aread`/`read` stop at the pool's ``largest`` and ``whole``; streaming (``client.stream``) is the
caller's own business. Compressed bodies are fed to the decoder in small slices, so that a few kilobytes
cannot become gigabytes before anybody counts.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind
from resilient.wire.failures import AnswerTooLarge, failed_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from resilient.core.budgets import Budget, Fields
    from resilient.wire.pool import PoolSettings

KEY: Final = "resilient"  # in response.extensions: the Failure, or None
SLICE: Final = 16 * 1024
_MISSING: Final = object()


class Answer(httpx.Response):
    """An ``httpx.Response`` whose ``raise_for_status`` raises what the provider meant."""

    bounds: PoolSettings
    said: str  # the provider's message
    secrets: tuple[str, ...]
    parsed: Any  # the decoded body, if it had to be read anyway
    cut: Callable[[], None] | None  # who wants to hear that the body broke off

    @classmethod
    def of(cls, response: httpx.Response, bounds: PoolSettings) -> Answer:
        """``response`` made over."""
        response.__class__ = cls
        assert isinstance(response, Answer)  # noqa: S101 - for the type checker
        response.bounds, response.said, response.secrets, response.parsed = bounds, "", (), _MISSING
        response.cut = None
        if "content-encoding" in response.headers:
            if isinstance(response.stream, httpx.AsyncByteStream):
                response.stream = _AsyncSlices(response.stream)
            elif isinstance(response.stream, httpx.SyncByteStream):
                response.stream = _Slices(response.stream)
        return response

    def raise_for_status(self) -> Answer:
        """Raise the classified failure: also for a 200 the provider's dialect calls an error."""
        failure: Failure | None = self.extensions.get(KEY)
        if failure is None:
            if self.is_success:
                return self
            failure = Failure(FailureKind.PERMANENT, code=f"http_{self.status_code}", status=self.status_code)
        raise failed_answer(self, failure, self.said, self.secrets)

    def json(self, **kwargs: Any) -> Any:
        """The body as JSON; decoded only once if the classification needed it."""
        if self.parsed is not _MISSING and not kwargs:
            parsed, self.parsed = self.parsed, _MISSING
            return parsed
        return super().json(**kwargs)

    async def aread(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`."""
        if not hasattr(self, "_content"):
            bound = _Bound(self.bounds.largest, self.bounds.whole)
            async for chunk in self.aiter_bytes():
                if not bound.take(chunk):
                    await self.aclose()
                    raise self._too_large()
            self._content = bound.content()
        return self._content

    def read(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`."""
        if not hasattr(self, "_content"):
            bound = _Bound(self.bounds.largest, self.bounds.whole)
            for chunk in self.iter_bytes():
                if not bound.take(chunk):
                    self.close()
                    raise self._too_large()
            self._content = bound.content()
        return self._content

    def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As httpx's."""
        raw = super().aiter_raw(chunk_size)
        return raw if self.cut is None else self._watched(raw, self.cut)

    def iter_raw(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """As httpx's."""
        raw = super().iter_raw(chunk_size)
        return raw if self.cut is None else self._watched_sync(raw, self.cut)

    async def _watched(self, raw: AsyncIterator[bytes], cut: Callable[[], None]) -> AsyncIterator[bytes]:
        try:
            async for chunk in raw:
                yield chunk
        except httpx.RequestError:
            cut()
            raise

    def _watched_sync(self, raw: Iterator[bytes], cut: Callable[[], None]) -> Iterator[bytes]:
        try:
            yield from raw
        except httpx.RequestError:
            cut()
            raise

    async def aread_error(self) -> None:
        """The beginning of an error's body, as much as comes in time. The server cannot make it raise."""
        bound = _Bound(self.bounds.error_largest, self.bounds.error_whole)
        try:
            async for chunk in self.aiter_bytes():
                if not bound.take(chunk):
                    break
        except httpx.HTTPError:
            pass
        finally:
            self._content = bound.content()
        await self.aclose()

    def read_error(self) -> None:
        """`aread_error` for threads."""
        bound = _Bound(self.bounds.error_largest, self.bounds.error_whole)
        try:
            for chunk in self.iter_bytes():
                if not bound.take(chunk):
                    break
        except httpx.HTTPError:
            pass
        finally:
            self._content = bound.content()
        self.close()

    def facts(self, headers: Fields, budgets: tuple[Budget, ...] = ()) -> AnswerFacts:
        """The answer as values; the body only if it has been read."""
        if not hasattr(self, "_content"):
            return AnswerFacts(self.status_code, headers, budgets=budgets)
        body = None
        if self._content[:64].lstrip()[:1] in (b"{", b"["):
            try:
                self.parsed = body = json.loads(self._content)
            except (ValueError, RecursionError):
                body = None
        text = self._content[: self.bounds.error_largest].decode("utf-8", "replace")
        return AnswerFacts(self.status_code, headers, body=body, text=text, budgets=budgets)

    def _too_large(self) -> AnswerTooLarge:
        return AnswerTooLarge(
            f"the answer's body is larger than {self.bounds.largest} bytes or took longer than"
            f" {self.bounds.whole:g} s: stream it (client.stream), or raise the pool's bounds",
            request=self._request,
        )


class _Bound:
    """Collects chunks up to a size and a time."""

    __slots__ = ("_chunks", "_end", "_left")

    def __init__(self, largest: int, seconds: float) -> None:
        self._chunks: list[bytes] = []
        self._left, self._end = largest, time.monotonic() + seconds

    def take(self, chunk: bytes) -> bool:
        """Keep a chunk; False once a bound is passed (what fits is kept)."""
        self._chunks.append(chunk[: max(0, self._left)])
        self._left -= len(chunk)
        return self._left >= 0 and time.monotonic() < self._end

    def content(self) -> bytes:
        return b"".join(self._chunks)


class _AsyncSlices(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            for start in range(0, len(chunk), SLICE):
                yield chunk[start : start + SLICE]

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Slices(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            for start in range(0, len(chunk), SLICE):
                yield chunk[start : start + SLICE]

    def close(self) -> None:
        self._stream.close()
