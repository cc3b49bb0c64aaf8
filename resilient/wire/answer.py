"""A response that knows its classification and keeps its body within bounds.

It is httpx's own Response, made over after the fact: the transport sets ``__class__`` on what the pool
returned, because building a second Response costs more than the whole classification.

Bounds: `aread`/`read` stop at the pool's ``largest`` and ``whole``; streaming (``client.stream``) is the
caller's own business, but it too is decoded in small pieces (see `decoding`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind
from resilient.wire.decoding import PIECE, Decoder, Intake, cut
from resilient.wire.failures import AnswerTooLarge, failed_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from resilient.core.budgets import Budget, Fields
    from resilient.wire.pool import PoolSettings

KEY: Final = "resilient"  # in response.extensions: the Failure, or None
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
            intake = self._intake(self.bounds.largest, self.bounds.whole)
            try:
                async for data in self.aiter_raw():
                    self._take(intake, data)
                self._content = self._whole(intake)
            except BaseException:
                await self.aclose()
                raise
        return self._content

    def read(self) -> bytes:
        """The whole body. Raises `AnswerTooLarge`."""
        if not hasattr(self, "_content"):
            intake = self._intake(self.bounds.largest, self.bounds.whole)
            try:
                for data in self.iter_raw():
                    self._take(intake, data)
                self._content = self._whole(intake)
            except BaseException:
                self.close()
                raise
        return self._content

    async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """As httpx's: decoded, in pieces of bounded size."""
        if hasattr(self, "_content"):
            async for part in super().aiter_bytes(chunk_size):
                yield part
            return
        decoder, left = self._decoding(), b""
        async for data in self.aiter_raw():
            for part in decoder.feed(data):
                if chunk_size is None:
                    yield part
                    continue
                *chunks, left = cut(left + part, chunk_size)
                for chunk in chunks:
                    yield chunk
        for chunk in cut(left + decoder.rest(), chunk_size or PIECE):
            if chunk:
                yield chunk

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """As httpx's: decoded, in pieces of bounded size."""
        if hasattr(self, "_content"):
            yield from super().iter_bytes(chunk_size)
            return
        decoder, left = self._decoding(), b""
        for data in self.iter_raw():
            for part in decoder.feed(data):
                if chunk_size is None:
                    yield part
                    continue
                *chunks, left = cut(left + part, chunk_size)
                yield from chunks
        yield from filter(None, cut(left + decoder.rest(), chunk_size or PIECE))

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
        """`aread_error` for threads."""
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
        if self._content[:64].lstrip()[:1] in (b"{", b"["):
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

    def _intake(self, largest: int, seconds: float) -> Intake:
        return Intake(self._coding(), largest, seconds, self._request)

    def _take(self, intake: Intake, data: bytes) -> None:
        if not intake.take(data):
            raise self._too_large()

    def _whole(self, intake: Intake) -> bytes:
        """All that was taken in. Raises `AnswerTooLarge`."""
        if not intake.end():
            raise self._too_large()
        return intake.content()

    def _too_large(self) -> AnswerTooLarge:
        return AnswerTooLarge(
            f"the answer's body is larger than {self.bounds.largest} bytes or took longer than"
            f" {self.bounds.whole:g} s: stream it (client.stream), or raise the pool's bounds",
            request=self._request,
        )
