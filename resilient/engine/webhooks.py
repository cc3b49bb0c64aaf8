"""What providers call: verified, stored as a job, answered; the work is done afterwards.

An answer of success is given after the commit, never before: what was acknowledged is not lost. A delivery that comes
again is acknowledged and dropped, by the provider's id for it, else by its body; where a provider only says that
something changed (`Webhook.ping`), alike ones are merged as long as the first one's job has not begun.

No framework is needed: `receive` takes a `Delivery` and gives a `WebhookAnswer`. `resilient.web.webhook_routes` has the
routes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - pydantic reads annotations at run time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, Field

from resilient.core.budgets import Fields
from resilient.core.errors import BadPayload, DatabaseUnreachable, InvalidInput, PayloadTooLarge, SetupError
from resilient.core.webhook import challenge, identity, value_at, verify, without_token
from resilient.engine import writing
from resilient.engine.handler import Kind
from resilient.engine.sessions import Face, Transactions, blocking
from resilient.store import inbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.provider import Provider
    from resilient.core.webhook import Challenge, Delivery, Webhook
    from resilient.engine.app import Resilient
    from resilient.engine.enqueue import Ordered
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.webhooks")
Secrets: TypeAlias = "Sequence[str] | Callable[[str], Sequence[str] | Awaitable[Sequence[str]]]"
_TELL_EVERY: Final = 60.0  # seconds between two lines of the log about one reason
_RETRY: Final = "10"  # seconds a provider is asked to wait while the database is away
_HIDDEN: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_MOST_HEADERS, _LONGEST_HEADER = 64, 1_000


class WebhookEvent(BaseModel):
    """The payload of a webhook's job.

    ``event``: what happened, in the provider's word; ``delivery``: the id that a repeat carries again (each "" where
    the provider says nothing of the kind). ``account``: the last part of the address that was called. ``body``: the
    decoded JSON (its text, if it holds what no payload can: half a character, too many levels), the fields of a form,
    or the text. ``headers``: in small letters, without signatures and
    credentials.
    """

    provider: str
    event: str = ""
    delivery: str = ""
    account: str = ""
    body: Any = None
    headers: dict[str, str] = Field(default_factory=dict)
    received_at: datetime


@dataclass(frozen=True, slots=True)
class WebhookAnswer:
    """What to answer the provider."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    job: UUID | None = None  # that was made, if one was


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """What one provider may call, and which jobs that makes.

    ``secrets``: what deliveries are signed with, several while they rotate; or a function of the account (the last part
    of the address) that gives them. ``jobs``: the kind of job, or kinds by event (``"issues"``, ``"customer.*"``,
    ``"*"`` for all others); events that fit none are acknowledged and dropped. ``resource_key``: what the job goes
    through, or a function of the event that says so (None: drop it); by default the account that is part of the
    address, else ``{provider}/webhooks``. ``handshake(account, secret)``: keep the secret a provider sends once
    (Asana), and say whether it was expected. Raises `SetupError`.
    """

    provider: str
    secrets: Secrets
    jobs: Kind[Any] | Mapping[str, Kind[Any]]
    resource_key: str | Callable[[WebhookEvent], str | None] = ""
    handshake: Callable[[str, str], bool | Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.secrets, str):
            raise SetupError(f"Inbound({self.provider!r}): secrets= takes a list, so that they can rotate")
        if not callable(self.secrets) and not any(self.secrets) and self.handshake is None:
            raise SetupError(f"Inbound({self.provider!r}): without a secret no delivery can be told from a forged one")

    def __repr__(self) -> str:
        return f"<Inbound {self.provider}>"

    def kind_of(self, event: str) -> Kind[Any] | None:
        """The kind of job an event makes: by its name, else by the first pattern that fits."""
        if isinstance(self.jobs, Kind):
            return self.jobs
        found = self.jobs.get(event)
        return found or next((kind for pattern, kind in self.jobs.items() if fnmatchcase(event, pattern)), None)


@dataclass(frozen=True, slots=True)
class _Read:
    """A delivery, taken apart."""

    fields: Fields
    body: Any
    delivery: Delivery


class Webhooks:
    """``app.webhooks``."""

    def __init__(self, app: Resilient, declared: Iterable[Inbound], *, here: bool = False) -> None:
        self._app, self._db, self._here = app, Transactions(app, here=here), here
        self.declared: dict[str, tuple[Inbound, Provider, Webhook]] = {}
        self._told: dict[tuple[str, str], float] = {}
        for one in declared:
            provider = app.providers.get(one.provider)
            if provider is None or provider.webhook is None:
                why = "is not listed in Resilient(providers=[...])" if provider is None else "has no webhooks"
                raise SetupError(f"Inbound({one.provider!r}): the provider {why}")
            if one.provider in self.declared:
                raise SetupError(f"two Inbound() are for {one.provider!r}: give one of them both")
            self.declared[one.provider] = (one, provider, provider.webhook)

    @property
    def sync(self) -> SyncWebhooks:
        """The same for synchronous programs."""
        made = Webhooks(self._app, (), here=True)
        made.declared = self.declared
        return SyncWebhooks(made)

    async def receive(self, provider: str, delivery: Delivery, *, account: str = "") -> WebhookAnswer:
        """Verify a delivery and store its job; what to answer. Errors of the app's own functions are raised.

        200 or the like: stored, or known already; 401: not genuine; 413: too large; 503: not stored, it comes again.
        """
        if provider not in self.declared:
            return WebhookAnswer(404)
        one, _, webhook = self.declared[provider]
        body = _decoded(delivery)
        read = _Read(Fields.of(delivery.headers), body, delivery)
        asked = challenge(webhook, read.fields, body, delivery.url, ())
        if asked.is_open:  # it cannot be signed yet, and is only sent back
            return _echoed(asked)
        if delivery.method != "POST":
            return WebhookAnswer(405, headers={"Allow": "POST"})
        if asked.header:
            return await self._handshake(one, asked, account)
        secrets = await self._secrets(one, account)
        reason = verify(webhook, delivery, secrets, self._app.now(), body=body, ed25519=_proves)
        if reason:
            self._say(provider, f"refused: {reason}")
            return WebhookAnswer(401)
        asked = challenge(webhook, read.fields, body, delivery.url, secrets)
        return _echoed(asked) if asked.text else await self._take(one, webhook, read, account)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _take(self, one: Inbound, webhook: Webhook, read: _Read, account: str) -> WebhookAnswer:
        """Store a genuine delivery."""
        done, event = WebhookAnswer(webhook.status), self._event(one, webhook, read, account)
        kind, key = one.kind_of(event.event), self._key(one, event)
        if kind is None or key is None:
            return done
        try:
            ordered = self._ordered(kind, event, key, webhook, read)
            job = await self._db.write(None, _store, f"webhook:{one.provider}", _once(webhook, event, read), ordered)
        except PayloadTooLarge as error:
            self._say(one.provider, f"too large: {error}")
            return WebhookAnswer(413)
        except DatabaseUnreachable as error:
            self._say(one.provider, f"not stored: {error}")
            return WebhookAnswer(503, headers={"Retry-After": _RETRY})
        return WebhookAnswer(webhook.status, job=job)

    def _event(self, one: Inbound, webhook: Webhook, read: _Read, account: str) -> WebhookEvent:
        secret = {signature.header.lower() for signature in webhook.signatures} | _HIDDEN | {webhook.token.lower()}
        shown = [(name, text) for name, text in read.fields.items() if name not in secret]
        return WebhookEvent(
            provider=one.provider,
            event=value_at(webhook.event, read.fields, read.body, read.delivery.url),
            delivery=identity(webhook, read.fields, read.body, read.delivery.url),
            account=account,
            body=without_token(webhook, read.body),
            headers={name: text[:_LONGEST_HEADER] for name, text in shown[:_MOST_HEADERS]},
            received_at=self._app.now(),
        )

    def _key(self, one: Inbound, event: WebhookEvent) -> str | None:
        if callable(one.resource_key):
            return one.resource_key(event)
        return one.resource_key or f"{one.provider}/{event.account or 'webhooks'}"

    def _ordered(self, kind: Kind[Any], event: WebhookEvent, key: str, webhook: Webhook, read: _Read) -> Ordered:
        merged = webhook.ping and not event.delivery
        unique_key = f"webhook:{event.provider}:{key}:{_hashed(read.delivery.body)}" if merged else None
        encode = self._app._encoder.encode  # noqa: SLF001 - of this app
        try:
            return encode(kind, event, key, unique_key=unique_key)
        except BadPayload:  # refused, it would come again for ever
            as_text = event.model_copy(update={"body": json.dumps(event.body)})
            return encode(kind, as_text, key, unique_key=unique_key)

    async def _handshake(self, one: Inbound, asked: Challenge, account: str) -> WebhookAnswer:
        if one.handshake is None or not await self._got(one.handshake(account, asked.text)):
            self._say(one.provider, "refused: a handshake that nobody expected")
            return WebhookAnswer(403)
        return WebhookAnswer(200, headers={asked.header: asked.text})

    async def _secrets(self, one: Inbound, account: str) -> Sequence[str]:
        found = one.secrets(account) if callable(one.secrets) else one.secrets
        known: Sequence[str] = await self._got(found)
        return known

    async def _got(self, value: Any) -> Any:
        """What a hook gives, whether it is ``async def`` or not."""
        if not inspect.isawaitable(value):
            return value
        if self._here:
            raise InvalidInput("app.sync.webhooks: secrets= and handshake= must be plain functions, not async def")
        return await value

    def _say(self, provider: str, what: str) -> None:
        """A line in the log; of many alike only the first within a minute."""
        now = time.monotonic()
        if now - self._told.get((provider, what), -_TELL_EVERY) >= _TELL_EVERY:
            self._told = {known: at for known, at in self._told.items() if now - at < _TELL_EVERY}
            self._told[provider, what] = now
            log.warning("a webhook of %s is %s", provider, what)


class SyncWebhooks(Face[Webhooks]):
    """`Webhooks` for synchronous programs: the same method, without ``await``."""

    receive = blocking(Webhooks.receive)


def _store(c: Connection, d: Dialect, consumer: str, once: str, ordered: Ordered) -> UUID | None:
    """The job's id; None for a delivery that was taken before."""
    if once and not inbox.first_seen(c, d, consumer, once, d.now(c)):
        return None
    (made,) = writing.write(c, d, [ordered])
    return made.id if made.created else None


def _once(webhook: Webhook, event: WebhookEvent, read: _Read) -> str:
    """By what a repeat is known; "" where two alike may be two events."""
    if event.delivery:
        return f"{event.account}:{event.delivery}"
    return "" if webhook.ping else f"{event.account}:sha256:{_hashed(read.delivery.body)}"


def _hashed(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _echoed(asked: Challenge) -> WebhookAnswer:
    return WebhookAnswer(200, asked.text, {"Content-Type": f"{asked.media}; charset=utf-8"})


def _decoded(delivery: Delivery) -> Any:
    """JSON, a form's fields, or text; None for an empty body."""
    media = Fields.of(delivery.headers).get("content-type", "").partition(";")[0].strip().lower()
    if not delivery.body:
        return None
    text = delivery.body.decode("utf-8", "replace")
    if media == "application/x-www-form-urlencoded":
        return dict(parse_qsl(text, keep_blank_values=True))
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _proves(key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether an Ed25519 signature fits."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
