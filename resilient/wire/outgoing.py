"""What really goes over the wire: the caller's request, plus credentials and key where they may go.

The caller's request object is never changed, so httpx cannot copy our headers along a redirect, and no error
or log that shows the request shows a token. A hop from the provider to a foreign host is sent bare; once a
chain of redirects has left the provider's hosts, it gets no credentials even if it comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx

from resilient.core.errors import InvalidInput
from resilient.core.plain_text import fits_header
from resilient.wire.answer import KEY
from resilient.wire.guard import GUARDED
from resilient.wire.trail import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.core.exchange import RequestFacts
    from resilient.core.failure import Failure
    from resilient.wire.conduct import Permit
    from resilient.wire.trail import Trail

# What a stranger gets of a redirected request's headers.
BARE: Final = frozenset({
    b"host", b"accept", b"accept-encoding", b"accept-language", b"user-agent", b"connection", b"range",
    b"content-type", b"content-length", b"content-encoding", b"transfer-encoding",
    b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since", b"if-range",
})  # fmt: skip


class Passage:
    """One call on its way; kept in ``request.extensions`` to be found again after a redirect."""

    __slots__ = ("asked", "bare", "failure", "left", "origin", "resendable")

    def __init__(self, asked: RequestFacts, origin: tuple[str, str, int | None], *, resendable: bool) -> None:
        self.asked, self.origin, self.resendable = asked, origin, resendable
        self.bare = False  # came here by a redirect that has led to a foreign host, this hop or one before
        self.left = False  # some hop before was at a foreign host
        self.failure: Failure | None = None


def plan(trail: Trail, request: httpx.Request) -> Passage:
    """Find out what ``request`` is, and note it on the request."""
    url, ext = request.url, request.extensions
    if not url.scheme and not trail.base_url and trail.provider.base_url:
        raise InvalidInput(f"{request.method} {url.path}: {trail.without_address()}")
    if not url.scheme:
        raise httpx.UnsupportedProtocol(f"{request.method} {url.path}: {trail.without_address()}", request=request)
    target = Target(str(url), url.scheme, url.host, url.port, url.path)
    origin = (target.scheme, target.host, target.port)
    before = ext.get(KEY)
    hop = before if isinstance(before, Passage) and before.asked.url != target.url else None
    left = hop is not None and (hop.left or not hop.asked.trusted)
    whole = isinstance(request.stream, httpx.ByteStream)
    asked = trail.facts(
        request.method, target, request.headers, request.read() if whole else None, ext,
        before=hop.asked if hop else None, trust=not left,
    )  # fmt: skip
    passage = Passage(asked, origin, resendable=whole)
    passage.left = left
    passage.bare = hop is not None and not asked.trusted and (hop.bare or hop.origin != origin)
    ext[KEY] = passage
    if trail.guards(url.host):
        ext[GUARDED] = True
    else:
        ext.pop(GUARDED, None)
    return passage


def outgoing(request: httpx.Request, passage: Passage, permit: Permit, trail: Trail) -> httpx.Request:
    """The request to send."""
    asked = passage.asked
    url, added = request.url, dict[str, str]()
    if asked.trusted:
        added |= permit.headers
        trail.keep_secret(permit)
        if permit.params:
            url = url.copy_merge_params(permit.params)
    if asked.idempotency_key and (idem := trail.provider.idempotency) is not None:
        if idem.query:
            url = url.copy_merge_params({idem.query: asked.idempotency_key})
        else:
            added[idem.header] = f'"{asked.idempotency_key}"' if idem.quoted else asked.idempotency_key
    own = trail.own_headers if asked.trusted else ()
    if not added and not own and not passage.bare and url is request.url:
        return request
    names = {name.lower().encode("ascii") for name in added}
    kept = [
        pair for pair in request.headers.raw
        if (lower := pair[0].lower()) not in names and (not passage.bare or lower in BARE)
    ]  # fmt: skip
    if own:
        _complete(kept, own, names)
    if wrong := [name for name, value in added.items() if not fits_header(value)]:
        raise httpx.LocalProtocolError(f"the value for header {wrong[0]} has a character that no header can hold")
    kept += [(name.encode("ascii"), value.encode("latin-1")) for name, value in added.items()]
    return httpx.Request(request.method, url, headers=kept, stream=request.stream, extensions=request.extensions)


def _complete(kept: list[tuple[bytes, bytes]], own: Sequence[tuple[bytes, bytes, bytes]], names: set[bytes]) -> None:
    """Add what every request of the account carries, where the caller did not say otherwise."""
    said = {pair[0].lower(): n for n, pair in enumerate(kept)}
    for lower, name, value in own:
        at = said.get(lower)
        if at is None and lower not in names:
            kept.append((name, value))
        elif at is not None and lower == b"accept" and kept[at][1] == b"*/*":  # httpx's own word
            kept[at] = (name, value)
