"""Webhooks as Standard Webhooks says (https://www.standardwebhooks.com): signed, retried over days, never redirected.

The signing library holds twenty lines and no dependency; what it leaves to its caller (several secrets while they are
rotated, their length, UTC) is done here. Where a webhook may go is `guard`'s business.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import httpcore
import httpx

from resilient.core.base.bounds import SINK_ANSWER, believed_wait
from resilient.core.base.errors import InvalidInput, JobFailure, Permanent, Throttled
from resilient.core.base.hosts import without_secrets
from resilient.core.base.misfit import explained_class
from resilient.core.events.message import CONTENT_TYPE
from resilient.core.gates.retry_after import when
from resilient.core.jobs.backoff import PlusMinus, Retry
from resilient.wire.publishers.base import Destination, Unsendable, extra, lost, refused
from resilient.wire.requests.guard import PublicNetwork
from resilient.wire.requests.http11 import host_of
from resilient.wire.requests.pool import keep_apart, public_certificates

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Sequence

    from resilient.core.events.message import Message

# -- guard ------------------------------------------------------------------------------------------------------------
#
# Which addresses a webhook may be sent to: public ones, as for hosts that a customer names (`requests/guard.py`).


def _refusal(host: str, address: str) -> Unsendable:
    return Unsendable(
        f"webhook host {host!r} is at {address}, which is not a public address: nothing was sent (for tests: allow=)",
        code="address_denied",
    )


_AT_ONCE: Final = 1_024  # bytes that are read at once
_LONGEST_ANSWER: Final = 64 * 1024  # bytes


class _ShortAnswers(httpcore.AnyIOBackend):
    """Connections over which an answer comes in small portions, and up to a length.

    The receiver is a stranger. Reading costs time by the part, not by the byte: a chunk may have one byte, and before
    the answer any number of interim ones may come. While such parts are here already, nothing else would run.
    """

    async def connect_tcp(self, *args: Any, **words: Any) -> httpcore.AsyncNetworkStream:
        """See httpcore."""
        return _ShortAnswer(await super().connect_tcp(*args, **words))


class _ShortAnswer(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._inner, self._room = stream, _LONGEST_ANSWER

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's
        """See httpcore."""
        await asyncio.sleep(0)  # the others' turn: where something is here already, reading does not wait
        part = await self._inner.read(min(max_bytes, _AT_ONCE), timeout)
        self._room -= len(part)
        if self._room < 0:
            raise httpcore.ReadError(f"its answer is longer than {_LONGEST_ANSWER:,} bytes")
        return part

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's
        """See httpcore."""
        self._room = _LONGEST_ANSWER
        await self._inner.write(buffer, timeout)

    async def start_tls(self, *args: Any, **words: Any) -> httpcore.AsyncNetworkStream:
        """See httpcore."""
        return _ShortAnswer(await self._inner.start_tls(*args, **words))

    async def aclose(self) -> None:
        """See httpcore."""
        await self._inner.aclose()

    def __getattr__(self, name: str) -> Any:
        """The rest is the stream's: also where `resilient.wire.requests.pool` looks for what nobody has read."""
        return getattr(self._inner, name)

    def get_extra_info(self, info: str) -> Any:
        """See httpcore."""
        return self._inner.get_extra_info(info)


def transport(allow: Iterable[str], context: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    """An httpx transport to public addresses: no proxy, nothing from the environment, a connection for each request."""
    made = httpx.AsyncHTTPTransport(verify=context, trust_env=False)
    made._pool = httpcore.AsyncConnectionPool(  # noqa: SLF001 - httpx has no argument for it
        ssl_context=context,
        max_connections=None,  # who waits for one takes that for the silence of the receiver
        keepalive_expiry=4.0,
        network_backend=PublicNetwork(allow, _refusal, _ShortAnswers()),
    )
    keep_apart(made)
    return made


# -- webhook ----------------------------------------------------------------------------------------------------------

# The specification's example: at once, then over some three days; +-20 %, so that not everything comes at one moment.
_SCHEDULE: Final = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
WEBHOOK_RETRY: Final = Retry(
    max_attempts=len(_SCHEDULE) + 1, delay=PlusMinus(lambda attempt: _SCHEDULE[min(attempt, len(_SCHEDULE)) - 1])
)
_BODY_PATIENCE: Final = 1.0  # seconds for the body of an answer
_SECRET_BYTES: Final = range(24, 65)
_UNPRIVILEGED, _HIGHEST_PORT = 1024, 65_535
_OVERLOADED: Final = frozenset({429, 502, 503, 504})
_GONE, _REDIRECT, _ERROR, _SERVER_ERROR = 410, 300, 400, 500


@explained_class
@dataclass(frozen=True)
class StandardWebhook(Destination):
    """A URL that events are posted to, as CloudEvents JSON, signed.

    ``secrets``: ``whsec_...`` (24 to 64 bytes in base64); of several, each signs, the current one first. Only public
    addresses are connected to, over HTTPS; hosts and addresses in ``allow`` are excepted (tests, a receiver in one's
    own network), and over HTTP too. A redirect is a failure. 410 means that the receiver wants no more: such events are
    dead at once. Raises `InvalidInput`.
    """

    url: str = field(repr=False)
    secrets: str | Sequence[str] = field(repr=False)
    allow: Sequence[str] = ()
    retry: Retry = field(default=WEBHOOK_RETRY, repr=False, kw_only=True)
    timeout: float = field(default=20.0, kw_only=True)
    batch: int = field(default=50, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.secrets, str):
            object.__setattr__(self, "secrets", tuple(self.secrets))  # what can be read once would sign nothing later
        object.__setattr__(self, "allow", tuple(self.allow))
        shown = without_secrets(self.url)
        url = _parsed(self.url)  # by the library that will send to it: what it cannot read is refused now
        host = "" if url is None else host_of(url)
        if url is None or not host or url.scheme not in ("https", "http"):
            raise InvalidInput(f"{shown!r} is no webhook: write 'https://example.com/hook'")
        if url.scheme == "http" and host not in {name.lower() for name in self.allow}:
            raise InvalidInput(f"webhook {shown!r}: use https; without it anybody on the way reads and forges events")
        if url.userinfo:
            raise InvalidInput(f"webhook {shown!r} holds a user or password: receivers check the signature")
        if url.port is not None and url.port < _UNPRIVILEGED and url.port not in (80, 443):
            raise InvalidInput(f"webhook {shown!r}: port {url.port} is another service's")
        if not self.signing:
            raise InvalidInput(f"webhook {shown!r}: its events would be signed by no secret: give it secrets=")
        for secret in self.signing:
            _key(secret)

    @property
    def signing(self) -> tuple[str, ...]:
        """The secrets, the current one first."""
        return (self.secrets,) if isinstance(self.secrets, str) else tuple(self.secrets)

    @property
    def at_once(self) -> int:
        """What one worker takes at once: a receiver is not flooded because many workers have much to tell."""
        return self.batch

    def require(self) -> None:
        """See `Destination`."""
        extra("standardwebhooks", "webhooks")

    async def connect(self) -> _Poster:
        """See `Destination`; a connection is opened with the first event."""
        standard = extra("standardwebhooks", "webhooks")
        return _Poster(self, [standard.Webhook(_key(secret)) for secret in self.signing])


class _Poster:
    """Posts straight over its transport: httpx's client would log the whole URL, whose path may be a secret."""

    mends = True

    def __init__(self, destination: StandardWebhook, signers: Sequence[Any]) -> None:
        self._destination, self._signers = destination, signers
        self._transport = transport(destination.allow, public_certificates())
        self._times = {"timeout": httpx.Timeout(destination.timeout).as_dict()}

    async def publish(self, message: Message) -> None:
        """Post it; a 2xx answer is the confirm."""
        request = httpx.Request(
            "POST", self._destination.url, content=message.body, headers=self._headers(message), extensions=self._times
        )
        try:
            answer = await self._transport.handle_async_request(request)
            await _end(answer)
        except httpx.HTTPError as error:
            raise lost(
                f"the webhook at {host_of(request.url)} does not answer: {type(error).__name__}", "no_answer"
            ) from error
        if (failure := _failure(answer)) is not None:
            raise failure

    def _headers(self, message: Message) -> dict[str, str]:
        now, text = datetime.now(UTC), message.body.decode()
        return {
            **message.headers,
            "content-type": f"{CONTENT_TYPE}; charset=utf-8",
            "accept-encoding": "identity",
            "user-agent": "resilient",
            "webhook-id": message.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signer.sign(message.id, now, text) for signer in self._signers),
        }

    async def close(self) -> None:
        """See `Publisher`."""
        with contextlib.suppress(Exception):
            await self._transport.aclose()


def _parsed(url: str) -> httpx.URL | None:
    with contextlib.suppress(httpx.InvalidURL):
        parsed = httpx.URL(url)
        return parsed if parsed.port is None or parsed.port <= _HIGHEST_PORT else None
    return None


async def _end(answer: httpx.Response) -> None:
    """Read the beginning of an answer's body: a short one leaves the connection usable, any other is cut off.

    Its status is what counts, so a body that breaks off or does not come is no error.
    """
    read = 0
    try:
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(_BODY_PATIENCE):
                async for part in answer.aiter_raw():
                    read += len(part)
                    if read > SINK_ANSWER.value:
                        return
    finally:
        await answer.aclose()


def _failure(answer: httpx.Response) -> JobFailure | None:
    status = answer.status_code
    if status < _REDIRECT:
        return None
    if status < _ERROR:
        return refused(f"the webhook answered {status}: redirects are not followed, correct its URL", f"http_{status}")
    if status == _GONE:
        return Permanent("the webhook answered 410: its receiver wants no more events", code="gone")
    now = datetime.now(UTC)
    if status in _OVERLOADED and (until := when(answer.headers, now)) is not None:
        # As seconds, because this host's clock is not the database's; bounded, because its receiver is a stranger.
        seconds = believed_wait((until - now).total_seconds())
        return Throttled(retry_after=seconds, message=f"the webhook answered {status} and asked to wait")
    ill = status >= _SERVER_ERROR or status in _OVERLOADED
    return refused(f"the webhook answered {status}", f"http_{status}", ill=ill)


def _key(secret: str) -> bytes:
    """The key of a secret; raises `InvalidInput`."""
    bare = secret.strip().removeprefix("whsec_").rstrip("=")
    try:  # strictly: a character that is left out would give another key than the receiver's
        raw = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not secret.startswith("whsec_") or len(raw) not in _SECRET_BYTES:
        raise InvalidInput("a webhook's secret is 'whsec_' and 24 to 64 bytes in base64")
    return raw
