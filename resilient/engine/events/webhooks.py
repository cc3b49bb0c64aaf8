"""Inbound webhooks: a delivery is verified, stored as a job and answered; a worker runs the job afterwards.

A success is answered only after the commit: what was acknowledged is not lost. A repeated delivery is acknowledged and
dropped; it is recognised by the provider's id if that is signed, else by its signed content. Where a provider only says
that something changed (`Webhook.ping`), equal deliveries are merged as long as the first one's job has not begun. A
delivery of several events makes a job of each, in one transaction; there is a bound on how many (`WEBHOOK_EVENTS`).

Anybody may send. So nothing is decoded before its size is checked and, where the facts allow it, its signature; a
refusal is logged once a minute for each reason, of which there are few.

No framework is needed: `receive` takes a `Delivery` and gives a `WebhookAnswer`. `resilient.web.webhook_routes` has the
routes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - pydantic reads annotations at run time
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pydantic import BaseModel, Field

from resilient.core.base.bounds import (
    WEBHOOK_EVENTS,
    WEBHOOK_HEADER,
    WEBHOOK_HEADERS,
    WEBHOOK_NAME,
    WEBHOOK_SHOWN,
)
from resilient.core.base.budgets import Fields
from resilient.core.base.errors import (
    BadPayload,
    BadResourceKey,
    DatabaseUnreachable,
    InvalidInput,
    PayloadTooLarge,
    SetupError,
)
from resilient.core.base.frames import frameless, frameless_calls
from resilient.core.base.loggers import logger
from resilient.core.base.misfit import explained_class
from resilient.core.base.phrases import plain
from resilient.core.base.resource_key import check
from resilient.core.events.webhook import (
    challenge,
    event_name,
    form_fields,
    identity,
    items_of,
    key_bytes,
    prove,
    repeat_key,
    without_token,
)
from resilient.engine.ground.encoder import with_trace
from resilient.engine.ground.kinds import Kind
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking
from resilient.engine.jobs import queue
from resilient.store import events as store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.events.webhook import Challenge, Delivery, Proof, Webhook
    from resilient.core.provider.facts import Provider
    from resilient.engine.ground.encoder import JobRequest
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect

log = logger("webhooks")
_EventJob: TypeAlias = "tuple[str, JobRequest]"  # the key by which a repeat is recognised ("": none), and the job
Secrets: TypeAlias = "Sequence[str] | Callable[[str], Sequence[str] | Awaitable[Sequence[str]]]"
_LOG_EVERY: Final = 60.0  # seconds between two lines of the log about one reason
_RETRY: Final = "10"  # seconds a provider is asked to wait while the database is away
_HIDDEN: Final = frozenset({"authorization", "proxy-authorization", "cookie"})


class WebhookEvent(BaseModel):
    """The payload of a webhook's job.

    ``event``: what happened, in the provider's word; ``delivery``: the id that a repeat carries again (each "" where
    the provider says nothing of the kind). ``account``: the last part of the address that was called; only a secret of
    that account's own proves it. ``body``: the decoded JSON (of a delivery that holds several events, one of them; its
    text, if it holds what no payload can: half a character, too many levels), the fields of a form, or the text.
    ``headers``: in small letters, without signatures and credentials; most providers do not sign them.
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
    """What to answer the provider. ``jobs``: the ids of those it made; ``job``: the first of them, or None."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    jobs: tuple[UUID, ...] = ()

    @property
    def job(self) -> UUID | None:
        """The id of the first job, if one was made."""
        return self.jobs[0] if self.jobs else None


_AnswerAndLabel: TypeAlias = tuple[WebhookAnswer, str]  # the label: what became of the delivery, for the metrics


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """What one provider may call, and which jobs that makes.

    ``provider``: its name. ``secrets``: what deliveries are signed with, several while they rotate; or a function of
    the account (the last part of the address) that gives them. ``jobs``: the kind of job, or kinds by event
    (``"issues"``, ``"customer.*"``, ``"*"`` for all others); events that fit none are acknowledged and dropped.
    ``resource_key``: what the job goes through, or a function of the event that says so (None: drop it); by default
    the account that is part of the address, else ``{provider}/webhooks``. ``handshake(account, secret)``: keep the
    secret a provider sends once (Asana), or show it to whoever has to type it in there (Notion), and say whether it
    was expected: it is not signed, so anybody may send one. Raises `SetupError`.
    """

    provider: str
    secrets: Secrets
    jobs: Kind[Any] | Mapping[str, Kind[Any]]
    resource_key: str | Callable[[WebhookEvent], str | None] = ""
    handshake: Callable[[str, str], bool | Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.secrets, (str, bytes)) or not (callable(self.secrets) or isinstance(self.secrets, Iterable)):
            raise SetupError(f"Inbound({self.provider!r}): secrets= takes a list of text, so that they can rotate")
        if not callable(self.secrets) and not any(self.secrets) and self.handshake is None:
            raise SetupError(f"Inbound({self.provider!r}): without a secret no delivery can be told from a forged one")

        kinds = [self.jobs] if isinstance(self.jobs, Kind) else list(self.jobs.values())
        if wrong := [one for one in kinds if not isinstance(one, Kind)]:
            raise SetupError(f"Inbound({self.provider!r}): jobs= takes handlers or Kind(...), not {wrong[0]!r}")

    def __repr__(self) -> str:
        return f"<Inbound {self.provider}>"

    def kind_of(self, event: str) -> Kind[Any] | None:
        """The kind of job an event makes: by its name, else by the first pattern that fits."""
        if isinstance(self.jobs, Kind):
            return self.jobs
        exact = self.jobs.get(event)
        return exact or next((kind for pattern, kind in self.jobs.items() if fnmatchcase(event, pattern)), None)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A delivery, decoded."""

    fields: Fields
    body: Any
    delivery: Delivery
    proof: Proof


class Webhooks:
    """The webhooks of one app: verifies, stores and answers deliveries."""

    def __init__(self, ground: Ground, declared: Iterable[Inbound], *, here: bool = False) -> None:
        self._ground, self._here = ground, here
        self.ground_of: Callable[[str], Ground] = lambda _key: ground  # where jobs of this resource are stored
        self.declared: dict[str, tuple[Inbound, Provider, Webhook]] = {}
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}  # of the log: the last one's time, equal ones since
        for one in declared:
            provider = ground.providers.get(one.provider)
            if provider is None or provider.webhook is None:
                why = "is not listed in Resilient(providers=[...])" if provider is None else "has no webhooks"
                raise SetupError(f"Inbound({one.provider!r}): the provider {why}")
            if one.provider in self.declared:
                raise SetupError(f"two Inbound() are for {one.provider!r}: give one of them both")
            _check_secrets(one, provider.webhook)
            self.declared[one.provider] = (one, provider, provider.webhook)

    @property
    def sync(self) -> SyncWebhooks:
        """The same for synchronous programs."""
        inner = Webhooks(self._ground, (), here=True)
        inner.declared, inner._lines, inner.ground_of = self.declared, self._lines, self.ground_of
        return SyncWebhooks(inner)

    @frameless
    async def receive(self, provider: str, delivery: Delivery, *, account: str = "") -> WebhookAnswer:
        """Verify a delivery and store its job; returns the answer. Errors of the app's own functions are raised.

        200 or the like: stored, or a repeat; 401: not genuine; 404: no such provider, or no account; 413: too large,
        or too many events; 503: not stored, the provider is to send it again.
        """
        try:
            answer, what = await self._answer(provider, delivery, account)
        except Exception:
            self.count(provider, "failed")
            raise
        self.count(provider, what)
        return answer

    def count(self, provider: str, answer: str) -> None:
        """Count a delivery by what became of it (`resilient_webhooks_received_total`)."""
        self._ground.counts.webhook(provider, answer)

    async def _answer(self, provider: str, delivery: Delivery, account: str) -> _AnswerAndLabel:
        if provider not in self.declared or not is_account(provider, account):
            return WebhookAnswer(404), "unknown"
        one, _, webhook = self.declared[provider]
        fields, most = Fields.of(delivery.headers), self._ground.encoder.max_payload
        if len(delivery.body) > most:
            self.say(provider, "too large", f"a body of more than {most:,} bytes: see Resilient(max_payload=)")
            return WebhookAnswer(413), "too_large"
        question = challenge(webhook, fields, None, delivery.url, ())
        if question.is_open:  # it cannot be signed yet, and is only sent back
            return _answer_to(question), "handshake"
        if delivery.method != "POST":
            return WebhookAnswer(405, headers={"Allow": "POST"}), "wrong_method"
        return await self._receive(one, webhook, fields, delivery, account)

    async def _receive(
        self, one: Inbound, webhook: Webhook, fields: Fields, delivery: Delivery, account: str
    ) -> _AnswerAndLabel:
        """Verify and store a delivery, or answer a handshake."""
        early = webhook.needs_body or webhook.challenge == "secret"
        body = _decoded(delivery) if early else None
        question = challenge(webhook, fields, body, delivery.url, ())
        if question.is_secret:
            return await self._handshake(one, question, account)
        secrets = await self._secrets(one, account)
        proof = prove(webhook, delivery, secrets, self._ground.now(), body=body, ed25519=_is_signed)
        if proof.reason:
            self.say(one.provider, "refused", proof.reason)
            return WebhookAnswer(401), "refused"
        read = _Decoded(fields, body if early else _decoded(delivery), delivery, proof)
        question = challenge(webhook, fields, read.body, delivery.url, secrets)
        if question.text:
            return _answer_to(question), "handshake"
        return await self._accept(one, webhook, read, account)

    def say(self, provider: str, what: str, why: str) -> None:
        """Write a line to the log; equal lines once a minute, with the number of those since the last one."""
        now, never = time.monotonic(), (-_LOG_EVERY, 0)
        at, more = self._lines.get((provider, what + why), never)
        if now - at < _LOG_EVERY:
            self._lines[provider, what + why] = at, more + 1
            return
        self._lines[provider, what + why] = now, 0
        log.warning("a webhook of %s is %s: %s%s", provider, what, why, f" (and {more} more before)" if more else "")

    # -- inside ----------------------------------------------------------------------------------------------

    async def _accept(self, one: Inbound, webhook: Webhook, read: _Decoded, account: str) -> _AnswerAndLabel:
        """Store a genuine delivery."""
        items, most = items_of(webhook, read.body), WEBHOOK_EVENTS.value
        if items is not None and len(items) > most:  # one transaction of as many jobs would hold up all others
            self.say(one.provider, "too large", f"more than {most:,} events")
            return WebhookAnswer(413, f"more than {most:,} events in one delivery: none was stored"), "too_large"
        try:
            events = [None] if items is None else items
            shown = _job_headers(webhook, read.fields, len(events))
            every = [self._event_job_of(one, webhook, read, account, item, shown) for item in events]
            event_jobs = _distinct([event_job for event_job in every if event_job is not None])
            jobs = await self._store_all(f"webhook:{one.provider}", event_jobs)
        except PayloadTooLarge as error:
            self.say(one.provider, "too large", f"no job can hold it: {type(error).__name__}: see max_payload=")
            return WebhookAnswer(413), "too_large"
        except DatabaseUnreachable:
            self.say(one.provider, "not stored", "the database does not answer")
            return WebhookAnswer(503, headers={"Retry-After": _RETRY}), "not_stored"
        return WebhookAnswer(webhook.status, jobs=jobs), "stored" if jobs else "repeated" if event_jobs else "ignored"

    async def _store_all(self, consumer: str, event_jobs: Sequence[_EventJob]) -> tuple[UUID, ...]:
        """Store jobs, those of each database in one transaction; returns the ids of those that are no repeats.

        If the second database is away the delivery comes again, and the first one recognises its part.
        """
        by_ground: dict[Ground, list[_EventJob]] = {}
        for event_job in event_jobs:
            by_ground.setdefault(self.ground_of(event_job[1].row.resource_key), []).append(event_job)
        jobs: tuple[UUID, ...] = ()
        for ground, some in by_ground.items():
            jobs += await Transactions(ground, here=self._here).write(None, _store, consumer, some)
        return jobs

    def _event_job_of(
        self, one: Inbound, webhook: Webhook, read: _Decoded, account: str, item: Any, shown: dict[str, str]
    ) -> _EventJob | None:
        """The job of an event, and the key by which a repeat is recognised; None if no kind or no resource fits it."""
        event = self._event(one, webhook, read, account, item, shown)
        kind = one.kind_of(event.event)
        if kind is None:  # nor is the program asked about it: GitHub's ping names no account
            return None
        key = self._key(one, event)
        if key is None:
            return None
        repeat = repeat_key(webhook, read.proof, read.delivery, read.body, account, item)
        return repeat, self._encode(kind, event, key, webhook, read, item)

    def _event(
        self, one: Inbound, webhook: Webhook, read: _Decoded, account: str, item: Any, shown: dict[str, str]
    ) -> WebhookEvent:
        at = (webhook, read.fields, read.body, read.delivery.url, item)
        return WebhookEvent(
            provider=one.provider,
            event=event_name(*at)[: WEBHOOK_NAME.value],
            delivery=identity(*at)[: WEBHOOK_NAME.value],
            account=account,
            body=without_token(webhook, read.body, item),
            headers=shown,
            received_at=self._ground.now(),
        )

    def _key(self, one: Inbound, event: WebhookEvent) -> str | None:
        if callable(one.resource_key):
            return one.resource_key(event)
        return one.resource_key or f"{one.provider}/{event.account or 'webhooks'}"

    def _encode(
        self, kind: Kind[Any], event: WebhookEvent, key: str, webhook: Webhook, read: _Decoded, item: Any
    ) -> JobRequest:
        unique_key = None
        if webhook.ping and not event.delivery:
            alike = read.delivery.body if item is None else json.dumps(item, sort_keys=True).encode()
            unique_key = f"webhook:{event.provider}:{key}:{hashlib.sha256(alike).hexdigest()}"
        encode = self._ground.encoder.encode
        try:
            request = encode(kind, event, key, unique_key=unique_key)
        except BadPayload:  # refused, it would be sent again for ever; as text it fits
            as_text = event.model_copy(update={"body": json.dumps(event.body)})
            request = encode(kind, as_text, key, unique_key=unique_key)
        return with_trace([request], self._ground.tracing)[0]

    async def _handshake(self, one: Inbound, question: Challenge, account: str) -> _AnswerAndLabel:
        if one.handshake is None or not await self._value_of(one.handshake(account, question.text)):
            self.say(one.provider, "refused", "a handshake that nobody expected: see Inbound(handshake=)")
            return WebhookAnswer(403), "refused"
        return WebhookAnswer(200, headers={question.header: question.text} if question.header else {}), "handshake"

    async def _secrets(self, one: Inbound, account: str) -> Sequence[str]:
        value = one.secrets(account) if callable(one.secrets) else one.secrets
        secrets: Sequence[str] = await self._value_of(value)
        return secrets

    async def _value_of(self, value: Any) -> Any:
        """The result of a hook, which may be ``async def``."""
        if not inspect.isawaitable(value):
            return value
        if self._here:
            raise InvalidInput("app.sync.webhooks: secrets= and handshake= must be plain functions, not async def")
        return await value


@frameless_calls
class SyncWebhooks(SyncFacade[Webhooks]):
    """`Webhooks` for synchronous programs: the same method, without ``await``."""

    receive = blocking(Webhooks.receive)


def _store(c: Connection, d: Dialect, consumer: str, event_jobs: Sequence[_EventJob]) -> tuple[UUID, ...]:
    """Insert the jobs of events that are no repeats; returns their ids."""
    now = d.now(c)
    # In one order, so that two deliveries wait in no circle.
    keys = sorted(repeat for repeat, _ in event_jobs if repeat)
    new = {repeat for repeat in keys if store.first_seen(c, d, consumer, repeat, now)}
    jobs = queue.write_many(c, d, [request for repeat, request in event_jobs if not repeat or repeat in new])
    return tuple(job.id for job in jobs if job.created)


def _distinct(event_jobs: Sequence[_EventJob]) -> list[_EventJob]:
    """The jobs of one delivery: each id once; equal events without an id get a key of their own each."""
    count: Counter[str] = Counter()
    distinct = []
    for repeat, request in event_jobs:
        count[repeat] += 1
        if repeat and count[repeat] > 1:
            if repeat.startswith('["id"'):
                continue
            repeat = f"{repeat} {count[repeat]}"  # noqa: PLW2901 - the same event, numbered
        distinct.append((repeat, request))
    return distinct


def _job_headers(webhook: Webhook, fields: Fields, events: int) -> dict[str, str]:
    """The headers that the job of each event is shown: every one keeps them all, so together they are bounded."""
    secret = {signature.header.lower() for signature in webhook.signatures} | _HIDDEN | {webhook.token.lower()}
    room = WEBHOOK_SHOWN.value // max(1, events)
    shown: dict[str, str] = {}
    for name, text in islice((one for one in fields.items() if one[0] not in secret), WEBHOOK_HEADERS.value):
        pair = plain(name), plain(text[: WEBHOOK_HEADER.value])
        room -= len(json.dumps(pair))  # as many bytes as its row has of it
        if room < 0:
            break
        shown.update([pair])
    return shown


def is_account(provider: str, account: str) -> bool:
    """Whether the last part of an address can be an account's name."""
    if "/" in account or account in (".", ".."):
        return False
    try:
        return bool(check(f"{provider}/{account}" if account else provider))
    except BadResourceKey:
        return False


def _check_secrets(one: Inbound, webhook: Webhook) -> None:
    """Raise `SetupError` for a secret that is not written as the provider writes them: no signature would fit."""
    if callable(one.secrets) or not webhook.signatures:
        return
    for number, secret in enumerate(one.secrets, 1):
        if secret and not any(key_bytes(signature, secret) for signature in webhook.signatures):
            forms = " or ".join(dict.fromkeys(signature.key for signature in webhook.signatures))
            raise SetupError(
                f"Inbound({one.provider!r}): secret {number} is not written as {forms}, as its webhooks need"
            )


def _answer_to(question: Challenge) -> WebhookAnswer:
    return WebhookAnswer(200, question.text, {"Content-Type": f"{question.media}; charset=utf-8"})


def _decoded(delivery: Delivery) -> Any:
    """A body's JSON, the fields of its form, or its text; None if it is empty."""
    media = Fields.of(delivery.headers).get("content-type", "").partition(";")[0].strip().lower()
    if not delivery.body:
        return None
    text = delivery.body.decode("utf-8", "replace")
    if media == "application/x-www-form-urlencoded":
        try:
            return dict(form_fields(text))
        except ValueError:
            return text
    try:
        return json.loads(text.removeprefix("\ufeff"))  # RFC 8259, 8.1
    except (ValueError, RecursionError):
        return text


def _is_signed(key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether an Ed25519 signature fits."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - only where there is one
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
