"""The contract every provider keeps: its facts are well formed, and they read its own answers rightly.

A provider comes with a `Dialect`: sample answers as the API gives them and what each must mean. The contract
runs them through the engine's own decisions, and asks that no rule goes untested: each line of an error
dialect must decide some sample.

    from resilient.testing.contract import Dialect, Sample, problems

    def test_acme():
        assert problems(acme.provider(), DIALECT) == []
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from resilient.core.accounts.tokens import RFC_6749, Credentials, classify_token, merge
from resilient.core.base.budgets import Fields, budgets
from resilient.core.base.errors import FailureKind, InvalidInput, Scope
from resilient.core.base.exchange import IDEMPOTENT, AnswerFacts, RequestFacts
from resilient.core.base.resource_key import check
from resilient.core.events.webhook import Delivery, verify
from resilient.core.gates.policy import Policies
from resilient.core.provider.auth import OAuth2, Rotation
from resilient.core.provider.classify import classify, rule_for
from resilient.core.provider.facts import Provider
from resilient.core.sync.paging import Loop, PageRequest, PagingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.core.base.errors import Failure
    from resilient.core.provider.rules import Rule
    from resilient.core.sync.paging import Paginator


NOW: Final = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)  # when every sample was received
_AT: Final = " (if it is a sample, say when it was sent: Hook(..., at=datetime(..., tzinfo=UTC)))"
_NONE: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer and what it must mean.

    ``about`` names it; ``kind``: the failure it is, None for success. ``body``: JSON, or text. ``on``: the
    request, as ``"POST /path"``; ``sent``: its JSON body. ``repeatable``: whether that request has one effect
    however often it is sent (None: by its method and the provider's idempotency key). ``wait``: the seconds
    it tells to wait, None for none, ``...``: not compared. ``key``: the suffix its route must give.
    """

    about: str
    status: int
    kind: FailureKind | None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)
    on: str = "GET /"
    sent: Any = None
    scope: Scope = Scope.ACCOUNT
    wait: Any = ...
    repeatable: bool | None = None
    key: str | None = None

    def answer(self, provider: Provider | None = None) -> AnswerFacts:
        """The answer as the wire hands it on."""
        fields = Fields.of(self.headers)
        text = self.body if isinstance(self.body, str) else "" if self.body is None else json.dumps(self.body)
        rest = budgets(fields, NOW, fields=provider.waits.budgets) if provider is not None else ()
        body = None if isinstance(self.body, str) else self.body
        return AnswerFacts(self.status, fields, body=body, text=text, budgets=rest)

    def request_facts(self, provider: Provider) -> RequestFacts:
        """The request it answers, as the wire describes it."""
        method, _, target = self.on.partition(" ")
        path = urlsplit(target).path
        keyed = provider.idempotency is not None and provider.idempotency.covers(method, path)
        safe = method in IDEMPOTENT or keyed or provider.is_read(method, path)
        sent = None if self.sent is None else json.dumps(self.sent).encode()
        return RequestFacts(
            method, target, "api.example.com", path, key=f"{provider.name}/account", body=sent,
            repeatable=safe if self.repeatable is None else self.repeatable,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A good answer of the token endpoint, and what it must be read as.

    ``token``, ``refresh_token`` ("" if it has none); ``lasts``: seconds until the token ends, None if nothing says so;
    ``values``: what the connection stores of it.
    """

    about: str
    body: Any
    token: str
    refresh_token: str = ""
    lasts: float | None = None
    values: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Page:
    """One page: ``asks``: what its request must contain, as ``"after=abc"`` (in URL or body); its answer."""

    asks: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Pages:
    """A whole pass. ``of``: which pagination; ``items``: records of all pages; ``resume``: where the next begins."""

    of: str
    first: PageRequest
    pages: Sequence[Page]
    items: int
    resume: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # what a stream overrides, such as items=


@dataclass(frozen=True, slots=True)
class Hook:
    """A genuine delivery, signed with ``secret`` by something other than the code under test.

    ``at``: when it was sent, where the time is signed: a sample is of another day. ``delivery``: the id it carries.
    """

    secret: str
    body: bytes
    headers: Mapping[str, str]
    url: str = "https://hooks.example.com/in"
    at: datetime = NOW
    delivery: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Sample answers of one provider.

    ``throttled``: in each shape it uses. ``refused``: permission errors, which no waiting heals. ``expired``:
    an access token that needs a refresh. ``reset``: a cursor it no longer accepts; where it has no such answer,
    ``no_reset`` says why. ``others``: whatever else its rules decide. ``dead_grant``: of the token endpoint;
    ``token_errors``: its other answers; ``tokens``: its good ones. ``pages``: each pagination to its end.
    """

    throttled: Sequence[Sample]
    refused: Sequence[Sample]
    expired: Sequence[Sample] = ()
    reset: Sequence[Sample] = ()
    no_reset: str = ""
    others: Sequence[Sample] = ()
    dead_grant: Sequence[Sample] = ()
    token_errors: Sequence[Sample] = ()
    tokens: Sequence[Token] = ()
    pages: Sequence[Pages] = ()
    hooks: Sequence[Hook] = ()

    def answers(self) -> tuple[Sample, ...]:
        """Every sample of the API itself."""
        return (*self.throttled, *self.refused, *self.expired, *self.reset, *self.others)


# -- fact checks ------------------------------------------------------------------------------------------------------
#
# What a declaration cannot refuse by itself: facts that are missing, not dated, or without their counterpart.

_WHOLE: Final = re.compile(r"\{\w+\}")  # the whole host is a placeholder: each account has a host of its own
_FIELDS: Final = frozenset(field.name for field in fields(Provider))


def fact_problems(provider: Provider, now: datetime) -> Iterator[str]:
    """What is missing, malformed or not dated."""
    yield from _origin_problems(provider)
    yield from _date_problems(provider, now)
    yield from _limit_problems(provider)


def _origin_problems(provider: Provider) -> Iterator[str]:
    if not provider.title:
        yield "title: give its name for people"
    if not provider.base_url:
        yield "base_url: give the API's address"
    elif not provider.base_url.startswith(("https://", "{")):
        yield f"base_url: {provider.base_url!r} is not https"
    for host in provider.hosts:
        if host.startswith("http:"):
            yield f"hosts: {host!r} is not https"
    host = provider.base_url.partition("//")[2].partition("/")[0]
    if "{" in host and not _WHOLE.fullmatch(host) and not provider.hosts:
        yield "hosts: the host differs per account, so declare its pattern, such as '*.example.com'"
    oauth = provider.oauth
    if oauth is not None and oauth.client_id:
        yield "auth: a client's id belongs to the app, not to the facts"


def _date_problems(provider: Provider, now: datetime) -> Iterator[str]:
    if provider.verified_on is None or provider.verified_on > now.date():
        yield "verified_on: say on which day these facts were read"
    if not provider.sources or any(not source.strip() for source in provider.sources):
        yield "sources: say where these facts were read"
    for name in provider.unverified:
        head = re.split(r"[.:\[ ]", name, maxsplit=1)[0]
        if head not in _FIELDS:
            yield f"unverified: {name!r} does not begin with a field of Provider, such as 'webhook'"


def _limit_problems(provider: Provider) -> Iterator[str]:
    try:
        policies = Policies(provider.limit_patterns(), provider.concurrency_patterns())
        policies.for_key(f"{provider.name}/account")
    except InvalidInput as error:
        yield f"limits: {error}"
    if any(level.startswith("account/") for level in provider.limits) and provider.route is None:
        yield "limits: an endpoint's limits need route=, or no request draws them"


# -- contract ---------------------------------------------------------------------------------------------------------

_EXACT: Final = 0.001  # seconds
_LONGEST_LOOP: Final = 12  # pages within which a repeated page must be noticed


def problems(provider: Provider, dialect: Dialect) -> list[str]:
    """Everything in which a provider breaks its contract; empty if nothing."""
    sentences = list(fact_problems(provider, datetime.now(UTC)))
    for look in (sample_problems, token_problems, page_problems, hook_problems):
        try:
            sentences += look(provider, dialect)
        except (InvalidInput, re.error) as error:
            sentences.append(f"{look.__name__.replace('_', ' ')}: {error}")
    return sentences


# -- answers of the API --------------------------------------------------------------------------------------


def sample_problems(provider: Provider, dialect: Dialect) -> Iterator[str]:
    """Samples that do not mean what their group says, groups without samples, and rules that no sample reaches."""
    used: list[Rule] = []
    for sample in dialect.answers():
        request, answer = sample.request_facts(provider), sample.answer(provider)
        yield from _compare(sample, classify(answer, request, provider, NOW))
        if sample.status >= 400 or provider.errors.reads_success:  # noqa: PLR2004 - HTTP's own border of failure
            rule = rule_for(answer, request, provider)
            used += [] if rule is None else [rule]
        yield from _route_problems(provider, sample, request)
    for rule in provider.errors.rules:
        if not any(rule is one for one in used):
            yield f"no sample is decided by the rule {_brief(rule)}"
    yield from _group_problems(provider, dialect)


def _group_problems(provider: Provider, dialect: Dialect) -> Iterator[str]:
    """Groups of samples that are empty, or hold a sample of another group."""
    waits = {FailureKind.THROTTLED, FailureKind.QUOTA}
    if not dialect.throttled or any(s.kind not in waits | {FailureKind.CONFLICT} for s in dialect.throttled):
        yield "throttled: give at least one sample, each throttled, quota or conflict"
    if not dialect.refused or any(s.kind in waits or s.kind is None for s in dialect.refused):
        yield "refused: give at least one permission error, none of which is a throttle"
    if provider.auth and (not dialect.expired or any(s.kind is not FailureKind.AUTH for s in dialect.expired)):
        yield "expired: give at least one answer to a token that is refused"
    if provider.incremental and not dialect.no_reset and not dialect.reset:
        yield "reset: give the answer to a cursor that is refused, or say in no_reset why there is none"
    if any(s.kind is not FailureKind.RESET_CURSOR for s in dialect.reset):
        yield "reset: a refused cursor must start a full pass"


def _compare(sample: Sample, failure: Failure | None) -> Iterator[str]:
    kind = None if failure is None else failure.kind
    if kind is not sample.kind:
        yield f"{sample.about}: means {kind or 'success'}, not {sample.kind or 'success'}"
        return
    if failure is None:
        return
    if failure.scope is not sample.scope:
        yield f"{sample.about}: concerns the {failure.scope}, not the {sample.scope}"
    if sample.wait is ...:
        return
    wait = failure.retry_in
    if wait is not sample.wait and (wait is None or sample.wait is None or abs(wait - sample.wait) > _EXACT):
        yield f"{sample.about}: tells to wait {wait} s, not {sample.wait}"


def _route_problems(provider: Provider, sample: Sample, request: RequestFacts) -> Iterator[str]:
    suffix = ""
    if provider.route is not None:
        suffix, cost = provider.route(request)
        if cost < 0:
            yield f"{sample.about}: its route costs {cost}"
        if suffix:
            check(f"{provider.name}/account/{suffix}")
    if sample.key is not None and sample.key != suffix:
        yield f"{sample.about}: is routed to {suffix!r}, not {sample.key!r}"


def _brief(rule: Rule) -> str:
    conditions = {name: getattr(rule, name) for name in ("kind", "status", "code", "where", "header", "text", "path")}
    return ", ".join(f"{name}={value!r}" for name, value in conditions.items() if value)


# -- answers of the token endpoint ---------------------------------------------------------------------------


def token_problems(provider: Provider, dialect: Dialect) -> Iterator[str]:
    """The token endpoint's dialect, and what holds for every token endpoint."""
    oauth = provider.oauth
    if oauth is None:
        return
    samples = (*dialect.dead_grant, *dialect.token_errors)
    for sample in samples:
        yield from _compare(sample, classify_token(sample.answer(), oauth, NOW))
    for rule in oauth.errors.rules:
        judge = Provider(name="token", errors=replace(oauth.errors, rules=(*oauth.errors.rules, *RFC_6749)))
        rules = [rule_for(_as_error(s.answer()), s.request_facts(judge), judge) for s in samples]
        if not any(rule is one for one in rules):
            yield f"no sample of the token endpoint is decided by the rule {_brief(rule)}"
    if oauth.refreshes and not dialect.dead_grant:
        yield "dead_grant: give the answer to a refresh whose grant is gone"
    dead = FailureKind.AUTH, Scope.ACCOUNT
    if any((s.kind, s.scope) != dead for s in dialect.dead_grant):
        yield "dead_grant: must concern this account's credentials only"
    for token in dialect.tokens:
        yield from _reading_problems(oauth, token)
    yield from _common_token_problems(oauth)


def _as_error(answer: AnswerFacts) -> AnswerFacts:
    return replace(answer, status=400) if answer.status < 400 else answer  # noqa: PLR2004 - HTTP's own border


def _reading_problems(oauth: OAuth2, sample: Token) -> Iterator[str]:
    """Which parts of a good answer are not read as the sample says: token, refresh token, end, values."""
    if (failure := classify_token(AnswerFacts(200, body=sample.body), oauth, NOW)) is not None:
        yield f"{sample.about}: means {failure.kind}, not a token"
        return
    made = merge(Credentials(), sample.body, oauth, NOW)
    if made is None:
        yield f"{sample.about}: no token is found at {' or '.join(oauth.success)}"
        return
    lasts = None if made.expires_at is None else (made.expires_at - NOW).total_seconds()
    read = {"token": made.token, "refresh_token": made.refresh_token, "lasts": lasts, "values": dict(made.values)}
    for name, value in read.items():
        expected = getattr(sample, name)
        if value != (dict(expected) if name == "values" else expected):
            yield f"{sample.about}: its {name} is read as {value!r}, not {expected!r}"
    if oauth.refreshes and oauth.rotation in (Rotation.SINGLE_USE, Rotation.GRACE) and not made.refresh_token:
        yield f"{sample.about}: has no refresh token, though one comes with each ({oauth.rotation})"


def _common_token_problems(oauth: OAuth2) -> Iterator[str]:
    good: dict[str, Any] = {}
    *parents, name = oauth.success[0].split(".")
    inner = good
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[name] = "token"
    lost = FailureKind.TRANSIENT if oauth.replayable else FailureKind.AMBIGUOUS
    every = (
        Sample("a token", 200, None, good),
        Sample("an empty token", 200, FailureKind.TRANSIENT, {oauth.success[0]: ""}),
        Sample("an answer that is no token", 200, FailureKind.TRANSIENT, {"message": "slow down"}),
        Sample("a page of HTML", 200, FailureKind.TRANSIENT, "<html>"),
        Sample("a lost answer", 502, lost, "<html>"),
        Sample("an outage", 503, FailureKind.TRANSIENT, "<html>"),
        Sample("a throttle", 429, FailureKind.THROTTLED, "", {"Retry-After": "30"}, wait=30),
    )
    for sample in every:
        for problem in _compare(sample, classify_token(sample.answer(), oauth, NOW)):
            yield f"token endpoint: {problem}"
    if oauth.rotation is Rotation.GRACE and oauth.lifetime is None and not oauth.lifetime_field:
        yield "token endpoint: nothing says how long an access token lasts"


# -- pages ---------------------------------------------------------------------------------------------------


def page_problems(provider: Provider, dialect: Dialect) -> Iterator[str]:
    """Each pagination to its end, and with a first page that is repeated."""
    for missing in set(provider.pagination) - {one.of for one in dialect.pages}:
        yield f"pages: no sample pages through {missing!r}"
    for sample_pass in dialect.pages:
        if sample_pass.of not in provider.pagination:
            yield f"pages: there is no pagination {sample_pass.of!r}"
            continue
        paginator = replace(provider.pagination[sample_pass.of], **sample_pass.changes)
        yield from (f"pages of {sample_pass.of}: {problem}" for problem in _pass_problems(paginator, sample_pass))
        yield from (f"pages of {sample_pass.of}: {problem}" for problem in _loop_problems(paginator, sample_pass))


def _pass_problems(paginator: Paginator, sample_pass: Pages) -> Iterator[str]:
    request: PageRequest | None = paginator.first(sample_pass.first)
    loop, count, resume = Loop(), 0, None
    for number, page in enumerate(sample_pass.pages, 1):
        if request is None:
            yield f"ends after {number - 1} of {len(sample_pass.pages)} pages"
            return
        if not _contains(request, page.asks):
            yield f"page {number} is asked for as {request.to_json()}, without {page.asks!r}"
        if PageRequest.from_json(json.loads(json.dumps(request.to_json()))) != request:
            yield f"page {number} cannot be stored"
        try:
            read = paginator.read(request, AnswerFacts(200, Fields.of(page.headers), body=page.body))
            loop = loop.step(request, read)
        except PagingError as error:
            yield f"page {number}: {error}"
            return
        count, request, resume = count + len(read.items), read.next, read.resume
    if request is not None:
        yield f"does not end, but asks for {request.to_json()}"
    if count != sample_pass.items:
        yield f"gives {count} records, not {sample_pass.items}"
    if resume != sample_pass.resume:
        yield f"the next pass begins at {resume!r}, not {sample_pass.resume!r}"


def _contains(request: PageRequest, expected: str) -> bool:
    name, _, value = expected.partition("=")
    if not value:
        return expected in request.url
    return request.query(name) == value or str(request.in_body(name)) == value


def _loop_problems(paginator: Paginator, sample_pass: Pages) -> Iterator[str]:
    """Whether a server that repeats its first page goes unnoticed."""
    if len(sample_pass.pages) < 2:  # noqa: PLR2004 - nothing to go round
        return
    request, loop = paginator.first(sample_pass.first), Loop()
    page = sample_pass.pages[0]
    for _ in range(_LONGEST_LOOP):
        try:
            read = paginator.read(request, AnswerFacts(200, Fields.of(page.headers), body=page.body))
            loop = loop.step(request, read)
        except PagingError:
            return
        if read.next is None:
            return
        request = read.next
    yield "goes round for ever when the server repeats its first page"


# -- webhooks ------------------------------------------------------------------------------------------------


def hook_problems(provider: Provider, dialect: Dialect) -> Iterator[str]:
    """Genuine deliveries that are refused, and forged ones that are accepted."""
    webhook = provider.webhook
    if webhook is None:
        return
    if webhook.signatures and not dialect.hooks:
        yield "hooks: give a delivery as the provider sent it: Dialect(hooks=[Hook(secret, body, headers)])"
    for number, hook in enumerate(dialect.hooks, 1):
        genuine = Delivery(hook.headers, hook.body, hook.url)
        try:
            body = json.loads(hook.body)
        except ValueError:
            body = None
        signed = any(one.scheme != "equal" for one in webhook.signatures)
        tries = [("a genuine one", genuine, hook.secret, hook.at, True), ("no secret", genuine, "", hook.at, False)]
        if signed:
            changed = Delivery(hook.headers, hook.body + b" ", hook.url)
            tries.append(("a changed body", changed, hook.secret, hook.at, False))
        tries.append(("another secret", genuine, _other(hook.secret), hook.at, False))
        for about, delivery, secret, at, accepted in tries:
            reason = verify(webhook, delivery, [secret], at, body=body, ed25519=_ed25519)
            if (reason == "") is not accepted:
                remedy = _AT if hook.at == NOW and "too long ago" in reason else ""
                yield f"hook {number}, {about}: {reason or 'is taken'}{remedy}"


def _other(secret: str) -> str:
    """A secret of the same form (text, hex, base64) that differs in one character."""
    middle = len(secret) // 2
    return f"{secret[:middle]}{'1' if secret[middle : middle + 1] == '0' else '0'}{secret[middle + 1 :]}"


def _ed25519(key: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - for few providers only
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


__all__ = ["NOW", "Dialect", "Hook", "Page", "Pages", "Sample", "Token", "problems"]
