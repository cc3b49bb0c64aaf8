"""Bodies of answers, decoded piece by piece and counted while they come, so that no server fills our memory.

One coding and no more: a coding within a coding multiplies (a kilobyte becomes a gigabyte before its outer layer is
done), no API needs it, and we ask for none. Every body that is read goes through `Intake`: it counts what came over the
wire and what was made of it, and looks at the clock with each part, because a compressed body may also say nothing for
ever.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Final

import httpx
from httpx import DecodingError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ASKED_FOR", "PIECE", "Decoder", "DecodingError", "Intake", "cut"]
PIECE: Final = 64 * 1024  # bytes that are decoded at once
ASKED_FOR: Final = "gzip, deflate"
_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})
_OTHERS: Final = frozenset({"br", "zstd", "compress", "x-compress", "dcb", "dcz"})


class Decoder:
    """Undoes the coding that ``Content-Encoding`` names; ``identity``, ``utf-8`` and the like name none."""

    __slots__ = ("_coding", "_inflate", "_refusal", "_request")

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
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | (32 if self._coding != "deflate" else 0))

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What some more bytes decode to, in pieces of at most `PIECE`. Raises `DecodingError`."""
        if not data:
            return
        if self._refusal:
            raise DecodingError(self._refusal, request=self._request)
        if not self._coding:
            yield from (data[at : at + PIECE] for at in range(0, len(data), PIECE))
            return
        while data and not self._inflate.eof:  # what follows the end of the stream is nobody's
            part = self._decompress(data)
            data = self._inflate.unconsumed_tail
            if part:
                yield part

    def rest(self) -> bytes:
        """What is left when all has come. Raises `DecodingError`."""
        if not self._coding or self._refusal:
            return b""
        try:
            return self._inflate.flush()
        except zlib.error as error:
            raise DecodingError(f"the answer is no {self._coding}: {error}", request=self._request) from None

    def _decompress(self, data: bytes) -> bytes:
        try:
            return self._inflate.decompress(data, PIECE)
        except zlib.error as error:
            if self._coding == "deflate":  # RFC 9110, 8.4.1.2: some send it without zlib's frame
                self._coding, self._inflate = "raw deflate", zlib.decompressobj(-zlib.MAX_WBITS)
                return self._decompress(data)
            raise DecodingError(f"the answer is no {self._coding}: {error}", request=self._request) from None


def cut(data: bytes, size: int) -> list[bytes]:
    """``data`` in chunks of ``size`` bytes and a shorter one, perhaps empty."""
    whole = len(data) - len(data) % size
    return [*(data[at : at + size] for at in range(0, whole, size)), data[whole:]]


class Intake:
    """A body up to a size (bytes, on the wire and decoded) and a time (seconds)."""

    __slots__ = ("_chunks", "_decoder", "_end", "_left", "_raw")

    def __init__(
        self, content_encoding: str, largest: int, seconds: float, request: httpx.Request | None = None
    ) -> None:
        self._decoder = Decoder(content_encoding, request)
        self._chunks: list[bytes] = []
        self._left = self._raw = largest
        self._end = time.monotonic() + seconds

    def take(self, data: bytes) -> bool:
        """Take some bytes from the wire; False once a bound is passed. Raises `DecodingError`."""
        self._raw -= len(data)
        if self._raw < 0 or time.monotonic() >= self._end:
            self._keep(data)
            return False
        return all(self._kept(part) for part in self._decoder.feed(data))

    def end(self) -> bool:
        """All has come; False if a bound is passed. Raises `DecodingError`."""
        return self._kept(self._decoder.rest())

    def content(self) -> bytes:
        """What fits."""
        return b"".join(self._chunks)

    def _keep(self, data: bytes) -> None:
        """Of the bytes that passed a bound what still fits."""
        for part in self._decoder.feed(data):
            if not self._kept(part):
                return

    def _kept(self, part: bytes) -> bool:
        self._chunks.append(part[: max(0, self._left)])
        self._left -= len(part)
        return self._left >= 0
