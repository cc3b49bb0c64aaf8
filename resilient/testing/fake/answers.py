"""Answers in a provider's own dialect, made from its facts and checked against them.

Its rules are read backwards: for the failure that is wanted, each rule of that kind gives an answer that should
fit it, and the usual status of that kind gives others; the first that the dialect reads as that failure is taken.
So an answer made here can be odd, but always means the failure that is wanted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from resilient.core.base.body import pick
from resilient.core.base.budgets import Fields, budgets
from resilient.core.base.errors import Failure, FailureKind, InvalidInput, Scope
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.instants import Word
from resilient.core.events.webhook import Delivery, Received, items_of, key_bytes, signed_text, verify
from resilient.testing.fake.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from resilient.core.events.webhook import Signature, Webhook
    from resilient.core.gates.retry_after import WaitDialect
    from resilient.core.provider.facts import Provider
    from resilient.core.provider.rules import Errors, Rule, Wait

# -- shapes -----------------------------------------------------------------------------------------------------------
#
# Facts read backwards: a text that fits a pattern, a body with a value at a path, a time in a dialect's word.

_STEP: Final = re.compile(r"\[(?:(\d+)|'([^']*)')?\]|([^.\[\]]+)")
_WHOLE: Final = frozenset({Word.DELTA_S, Word.EPOCH_S, Word.AUTO})
_NAMED: Final = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_NOT_SPACE": "x", "CATEGORY_WORD": "x"}


def fitting(pattern: str, groups: Mapping[int | str, str] | None = None) -> str:
    """A text that ``pattern`` matches somewhere; ``groups``: the texts of some of its groups.

    Look-arounds and back references are ignored: the caller checks the result.
    """
    parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public one
    names = {number: name for name, number in parsed.state.groupdict.items()}
    values = groups or {}
    return _all(parsed, names, values)


def _text(item: Any, names: Mapping[int, str], values: Mapping[int | str, str]) -> str:
    word, value = str(item[0]), item[1]
    if word == "SUBPATTERN":
        number, inside = value[0], value[3]
        text = values.get(number, values.get(names.get(number, "")))
        return _all(inside, names, values) if text is None else text
    if word == "BRANCH":
        return _all(value[1][0], names, values)
    if word in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _all(value[2], names, values) * max(1, int(value[0]))
    if word == "IN":
        return _member(value)
    return chr(value) if word == "LITERAL" else "x" if word in ("ANY", "NOT_LITERAL") else ""


def _all(items: Any, names: Mapping[int, str], values: Mapping[int | str, str]) -> str:
    return "".join(_text(one, names, values) for one in items)


def _member(members: Any) -> str:
    if str(members[0][0]) == "NEGATE":
        return "x"
    word, value = str(members[0][0]), members[0][1]
    if word == "RANGE":
        return chr(value[0])
    return chr(value) if word == "LITERAL" else _NAMED.get(str(value), "x")


def plain(pattern: str) -> str:
    """A text that matches an fnmatch pattern."""
    return re.sub(r"\[(.)[^\]]*\]", r"\1", pattern).replace("*", "x").replace("?", "x")


def put(body: Any, path: str, value: Any) -> Any:
    """``body`` with ``value`` at a path (as `Provider` writes them); what is missing on the way is made."""
    steps = [(int(index) if index else name or quoted or None) for index, quoted, name in _STEP.findall(path)]
    return _put(body, steps, value)


def _put(body: Any, steps: list[int | str | None], value: Any) -> Any:
    if not steps:
        return value
    head, *rest = steps
    if head is None or isinstance(head, int):
        items = list(body) if isinstance(body, list) else []
        index = head or 0
        items += [None] * (index + 1 - len(items))
        items[index] = _put(items[index], rest, value)
        return items
    name = "items" if head == "*" else head
    made: dict[Any, Any] = dict(body) if isinstance(body, dict) else {}
    made[name] = _put(made.get(name), rest, value)
    return made


def spell(word: Word, seconds: float, now: datetime) -> str:
    """``seconds`` from ``now`` as the dialect ``word`` writes it, rounded up."""
    at = now.astimezone(UTC) + timedelta(seconds=seconds)
    whole = at if at.microsecond == 0 else at.replace(microsecond=0) + timedelta(seconds=1)
    written = {
        Word.DELTA_S: lambda: str(math.ceil(seconds)),
        Word.AUTO: lambda: str(math.ceil(seconds)),
        Word.DELTA_S_FLOAT: lambda: f"{math.ceil(seconds * 1000) / 1000:g}",
        Word.DELTA_MS: lambda: str(math.ceil(seconds * 1000)),
        Word.DURATION: lambda: f"{math.ceil(seconds)}s",
        Word.EPOCH_S: lambda: str(int(whole.timestamp())),
        Word.EPOCH_S_FLOAT: lambda: f"{at.timestamp():.3f}",
        Word.EPOCH_MS: lambda: str(math.ceil(at.timestamp() * 1000)),
        Word.ISO8601: lambda: whole.strftime("%Y-%m-%dT%H:%M:%SZ"),
        Word.HTTP_DATE: lambda: format_datetime(whole, usegmt=True),
    }
    return written[word]() if word in written else ""


def spell_in_json(word: Word, seconds: float, now: datetime) -> Any:
    """`spell` for JSON: numbers as numbers."""
    text = spell(word, seconds, now)
    if word in _WHOLE or word in (Word.DELTA_MS, Word.EPOCH_MS):
        return int(text)
    return float(text) if word in (Word.DELTA_S_FLOAT, Word.EPOCH_S_FLOAT) else text


def http_date(now: datetime) -> str:
    """A Date header."""
    return format_datetime(now.astimezone(UTC).replace(microsecond=0), usegmt=True)


# -- answers ----------------------------------------------------------------------------------------------------------

K = FailureKind
STATUSES: Final[dict[FailureKind, tuple[int, ...]]] = {
    K.THROTTLED: (429,), K.QUOTA: (429, 403), K.AUTH: (401, 400, 403), K.TRANSIENT: (503,), K.AMBIGUOUS: (502, 504),
    K.CONFLICT: (409,), K.PERMANENT: (422, 400, 403, 404), K.RESET_CURSOR: (410, 400, 404),
}  # fmt: skip
MESSAGES: Final[dict[FailureKind, str]] = {
    K.THROTTLED: "Too many requests", K.QUOTA: "Your quota is used up", K.AUTH: "These credentials are not valid",
    K.TRANSIENT: "Something went wrong here", K.AMBIGUOUS: "Something may have happened",
    K.CONFLICT: "Somebody else is changing this", K.PERMANENT: "This request is not acceptable",
    K.RESET_CURSOR: "This cursor is not known any more",
}  # fmt: skip
CODES: Final[dict[FailureKind, str]] = {
    K.THROTTLED: "too_many_requests", K.QUOTA: "quota_exceeded", K.AUTH: "unauthorized", K.TRANSIENT: "unavailable",
    K.AMBIGUOUS: "bad_gateway", K.CONFLICT: "conflict", K.PERMANENT: "invalid_request", K.RESET_CURSOR: "gone",
}  # fmt: skip
_NEED_WORDS: Final = frozenset({K.THROTTLED, K.QUOTA, K.RESET_CURSOR, K.AMBIGUOUS})
PAGE: Final = "<html><head><title>{status}</title></head><body><h1>{status}</h1><hr>nginx</body></html>"
_CLOSE: Final = 1.5  # seconds by which the wait of an answer may differ from the one that is wanted


@dataclass(frozen=True, slots=True)
class ErrorDialect:
    """The dialect of an API or of a token endpoint. ``judge``: what an answer means there."""

    errors: Errors
    waits: WaitDialect
    judge: Callable[[AnswerFacts], Failure | None]
    now: datetime
    headers: Mapping[str, str] = field(default_factory=dict)  # of every answer, such as budgets
    rejected: Mapping[str, str] = field(default_factory=dict)  # headers of an answer whose budget is spent
    refused: tuple[int, ...] = STATUSES[K.AUTH]  # the statuses of refused credentials

    def statuses(self, kind: FailureKind) -> tuple[int, ...]:
        """The statuses that a kind usually has, the most usual first."""
        return self.refused if kind is K.AUTH else STATUSES.get(kind, ())


def compose(
    dialect: ErrorDialect, kind: FailureKind, *, wait: float | None = None, scope: Scope | None = None, code: str = ""
) -> tuple[Reply, Failure]:
    """An answer that means ``kind``, telling to wait ``wait`` seconds, about ``scope``: as near as the dialect can.

    ``code``: the provider's word for it. Raises `InvalidInput` where its dialect has no such answer.
    """
    best: tuple[tuple[bool, ...], Reply, Failure] | None = None
    for reply in _candidates(dialect, kind, wait, code):
        failure = dialect.judge(facts_of(reply, dialect))
        if failure is None or failure.kind is not kind:
            continue
        announced = failure.retry_in
        off = (
            bool(code) and failure.code != code,
            scope is not None and failure.scope is not scope,
            (announced is not None) if wait is None else (announced is None or abs(announced - wait) > _CLOSE),
            scope is None and failure.scope is not Scope.ACCOUNT,
        )
        if not any(off):
            return reply, failure
        if best is None or off < best[0]:
            best = off, reply, failure
    if best is None:
        raise InvalidInput(f"this provider has no answer that means {kind}: give one with Reply(status, body, headers)")
    return best[1], best[2]


def facts_of(reply: Reply, dialect: ErrorDialect) -> AnswerFacts:
    """A reply as the wire would hand it on."""
    fields = Fields.of({**dialect.headers, **reply.headers, "date": http_date(dialect.now)})
    text = reply.content().decode("utf-8", "replace")
    body = None if isinstance(reply.body, (str, bytes)) else reply.body
    rest = budgets(fields, dialect.now, fields=dialect.waits.budgets)
    return AnswerFacts(reply.status, fields, body=body, text=text, budgets=rest)


def _candidates(dialect: ErrorDialect, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    """Possible answers: those of rules first where an error of this kind needs words, else those of usual statuses."""
    if kind in _NEED_WORDS or dialect.errors.reads_success:
        yield from _by_rules(dialect, kind, wait, code)
        yield from _plain(dialect, kind, wait, code)
    else:
        yield from _plain(dialect, kind, wait, code)
        yield from _by_rules(dialect, kind, wait, code)


def _by_rules(dialect: ErrorDialect, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    spent = dialect.rejected if kind in (K.THROTTLED, K.QUOTA) else {}
    for rule in dialect.errors.rules:
        if rule.kind is kind:
            for status in _statuses(rule, dialect.statuses(kind)):
                if rule.header and spent:
                    yield _by_rule(dialect, rule, status, wait, code, spent)
                yield _by_rule(dialect, rule, status, wait, code)


def _plain(dialect: ErrorDialect, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    spent = dialect.rejected if kind in (K.THROTTLED, K.QUOTA) else {}
    for status in dialect.statuses(kind):
        body = _body(dialect, kind, code or CODES[kind])
        yield Reply(status, body, _wait_headers(dialect, wait))
        yield Reply(status, body, {**spent, **_wait_headers(dialect, wait)})
        yield Reply(status, _body(dialect, kind, ""), _wait_headers(dialect, wait))
        yield Reply(status, PAGE.format(status=status), _wait_headers(dialect, wait))


def _statuses(rule: Rule, usual: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(rule.status, int):
        return (rule.status,)
    if rule.status is None:
        return (*usual, 400)
    if isinstance(rule.status, range):
        return (rule.status[0],)
    return tuple(sorted(rule.status, key=lambda status: status not in usual))


def _by_rule(
    dialect: ErrorDialect,
    rule: Rule,
    status: int,
    wait: float | None,
    code: str,
    spent: Mapping[str, str] | None = None,
) -> Reply:
    assert rule.kind is not None  # noqa: S101 - asked for by its kind
    codes = (rule.code,) if isinstance(rule.code, str) else rule.code
    headers = {**(spent or {})}
    if rule.wait is None or not _in_body(rule.wait):
        headers |= _wait_headers(dialect, wait)
    body: Any = _body(dialect, rule.kind, code or (plain(codes[0]) if codes else ""))
    message = MESSAGES[rule.kind]
    if rule.text:
        message = f"{message}: {fitting(rule.text)}"
    for path, value in rule.where.items():
        body = put(body, path, "said" if value is ... else value)
    for name, pattern in rule.header.items():
        if not re.search(pattern, headers.get(name, dialect.headers.get(name, ""))):
            headers[name] = fitting(pattern)
    if codes and dialect.errors.code_header and not dialect.errors.code:
        headers[dialect.errors.code_header] = plain(codes[0])
    if rule.wait is not None and wait is not None:
        body, message = _wait_in(dialect, rule.wait, wait, body, message, headers)
    if rule.json is False:
        return Reply(status, f"{message}\n", headers)
    return Reply(status, _with_message(dialect, body, message), headers)


def _body(dialect: ErrorDialect, kind: FailureKind, code: str) -> Any:
    body: Any = {}
    for rule in dialect.errors.rules:  # such as Slack's "ok": false, which every error of its has
        if not rule.code and not rule.header:
            for path, value in rule.where.items():
                body = put(body, path, value) if value is False else body
    body = _with_message(dialect, body, MESSAGES.get(kind, str(kind)))
    return put(body, dialect.errors.code[0], code) if code and dialect.errors.code else body


def _with_message(dialect: ErrorDialect, body: Any, message: str) -> Any:
    path = next((one for one in dialect.errors.message if one not in dialect.errors.code), "")
    return put(body, path, message) if path else body


def _in_body(wait: Wait) -> bool:
    return bool(wait.body or wait.text or wait.seconds)


def _wait_in(
    dialect: ErrorDialect, wait: Wait, seconds: float, body: Any, message: str, headers: dict[str, str]
) -> tuple[Any, str]:
    if wait.header:
        headers[wait.header] = spell(wait.word, seconds, dialect.now)
    if wait.body:
        body = put(body, wait.body, spell_in_json(wait.word, seconds, dialect.now))
    if wait.text:
        text = spell(wait.word, seconds, dialect.now)
        message = f"{message}. {fitting(wait.text, {'value': text, 1: text})}"
    if wait.seconds is not None:
        body = put(body, "extensions.cost", points(seconds))
    return body, message


def points(seconds: float) -> dict[str, Any]:
    """The cost of a GraphQL query that is refused until a bucket has been filled for ``seconds``."""
    cost, rate = 10.0 + seconds * 50.0, 50.0
    status = {"maximumAvailable": cost, "currentlyAvailable": 10.0, "restoreRate": rate}
    return {"requestedQueryCost": cost, "actualQueryCost": None, "throttleStatus": status}


def _wait_headers(dialect: ErrorDialect, wait: float | None) -> dict[str, str]:
    """A wait in the provider's general dialect."""
    if wait is None:
        return {}
    if dialect.waits.hints:
        name, word = dialect.waits.hints[0]
        return {name: spell(word, wait, dialect.now)}
    return {"retry-after": spell(dialect.waits.retry_after, wait, dialect.now)}


# -- webhooks ---------------------------------------------------------------------------------------------------------
#
# Webhooks as a provider sends them: signed by its scheme, over the very bytes that are sent.

_SEED: Final = hashlib.sha256(b"resilient.testing").digest()


def secret_of(provider: Provider) -> str:
    """A secret as this provider writes them: for Ed25519 the public key."""
    signature = provider.webhook.signatures[0] if provider.webhook and provider.webhook.signatures else None
    if signature is not None and signature.scheme == "ed25519":
        return str(_private().public_key().public_bytes_raw().hex())
    raw = hashlib.sha256(provider.name.encode()).digest()
    if signature is None or signature.key == "text":
        return f"secret-of-{provider.name}"
    return raw.hex() if signature.key == "hex" else base64.b64encode(raw).decode()


def deliver(
    provider: Provider, url: str, body: Any, now: datetime, *, secret: str, event: str = "", delivery: str | None = None
) -> Delivery:
    """A genuine delivery. Raises `InvalidInput` where the facts allow none.

    ``body``: JSON, or bytes as they are; where the provider sends several events in one delivery, the whole body or
    one event of it. Of several events the first has the id ``delivery``, the others that and their number; None keeps
    the id that the body has (else it is "1"), "" puts none anywhere.
    """
    webhook = provider.webhook
    if webhook is None:
        raise InvalidInput(f"provider {provider.name!r} declares no webhook")
    headers: dict[str, str] = {"content-type": "application/json"}
    if webhook.events is not None and not isinstance(body, bytes) and items_of(webhook, body) is None:
        body = put(None, webhook.events, [body]) if webhook.events else [body]
    delivery = _id_of(webhook, body) if delivery is None else delivery
    places = [*((place, delivery) for place in webhook.delivery.split()), ((*webhook.event.split(), "")[0], event)]
    places += [] if webhook.signatures else [(webhook.token, secret)]
    for place, value in places:
        if place and value:
            url, body = _place(place, value, url, body, headers, webhook)
    signature = webhook.signatures[0] if webhook.signatures else None
    if signature is not None and signature.timestamp.startswith("body:"):
        _, body = _place(signature.timestamp, spell(signature.word, 0, now), url, body, headers, webhook)
    if signature is not None and "{form}" in signature.signed and isinstance(body, dict):
        headers["content-type"] = "application/x-www-form-urlencoded"
        body = urlencode(body).encode()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if signature is not None and signature.body_hash and "form" not in headers["content-type"]:
        url, _ = _place(signature.body_hash, hashlib.sha256(raw).hexdigest(), url, raw, headers, webhook)
    if signature is not None:
        _sign(signature, headers, raw, url, secret, now, delivery)
    made = Delivery(headers, raw, url)
    parsed = None if isinstance(body, bytes) else body
    if reason := verify(webhook, made, [secret], now, body=parsed, ed25519=_check):
        raise InvalidInput(f"provider {provider.name!r}: its webhook's facts cannot be signed backwards: {reason}")
    return made


def _id_of(webhook: Webhook, body: Any) -> str:
    """The id that the body has, else "1"."""
    return next((text for place in webhook.delivery.split() if (text := _id_at(place, body))), "1")


def _id_at(place: str, body: Any) -> str:
    """The id that the body has at this place; empty if none."""
    kind, _, path = place.partition(":")
    values = pick(body, path) if kind == "body" and not isinstance(body, bytes) else []
    return next((str(one) for one in values if isinstance(one, (str, int))), "")


def _place(place: str, value: str, url: str, body: Any, headers: dict[str, str], webhook: Webhook) -> tuple[str, Any]:
    kind, colon, name = place.partition(":")
    if kind == "item" and (items := items_of(webhook, body)) is not None:
        numbered = place in webhook.delivery.split()
        each = [
            put(item, name, f"{value}-{number}" if numbered and number else value) for number, item in enumerate(items)
        ]
        return url, put(body, webhook.events, each) if webhook.events else each
    if not colon:
        headers[place] = value
    elif kind == "query":
        url += f"{'&' if '?' in url else '?'}{urlencode({name: value})}"
    elif not isinstance(body, bytes):
        body = put(body, name, value)
    return url, body


def _sign(
    signature: Signature, headers: dict[str, str], raw: bytes, url: str, secret: str, now: datetime, delivery: str
) -> None:
    stamp = ""
    if signature.timestamp and ":" not in signature.timestamp:
        stamp = fitting(signature.timestamp_pattern, {1: spell(signature.word, 0, now)})
        headers[signature.timestamp] = stamp
    body = json.loads(raw) if raw[:1] in (b"{", b"[") else None
    text = signed_text(signature, Received(Fields.of(headers), raw, body, url, "POST", delivery), secret)
    written = fitting(signature.pattern, {1: _signature(signature, secret, text)})
    shared = signature.header.lower() == signature.timestamp.lower()
    headers[signature.header] = f"{stamp},{written}" if shared else written


def _signature(signature: Signature, secret: str, text: bytes) -> str:
    if signature.scheme == "equal":
        return secret
    if signature.scheme == "ed25519":
        digest = _private().sign(text)
    elif signature.scheme == "sha256":
        digest = hashlib.sha256(text).digest()
    else:
        digest = hmac.new(key_bytes(signature, secret) or b"", text, signature.scheme.removeprefix("hmac-")).digest()
    return digest.hex() if signature.encoding == "hex" else base64.b64encode(digest).decode()


def _private() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - for few

    return Ed25519PrivateKey.from_private_bytes(_SEED)


def _check(key: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - for few providers only
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
