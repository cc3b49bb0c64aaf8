"""Answers in a provider's own dialect, made from its facts and checked against them.

Its rules are read backwards: for the failure that is wanted, each rule of that kind gives an answer that should
fit it, the plain status of that kind comes last, and the first one that the dialect really reads as meant is
taken. So an answer made here can be odd, but never means something else than what was asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.budgets import Fields, budgets
from resilient.core.errors import InvalidInput
from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind, Scope
from resilient.testing.fake.log import Reply
from resilient.testing.fake.shapes import fitting, http_date, plain, put, said, said_in_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from resilient.core.retry_after import WaitDialect
    from resilient.core.rules import Errors, Rule, Wait

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
_WORDED: Final = frozenset({K.THROTTLED, K.QUOTA, K.RESET_CURSOR, K.AMBIGUOUS})
PAGE: Final = "<html><head><title>{status}</title></head><body><h1>{status}</h1><hr>nginx</body></html>"
_CLOSE: Final = 1.5  # seconds within which a told wait is the one that was asked for


@dataclass(frozen=True, slots=True)
class Voice:
    """Whose dialect is spoken: of an API or of a token endpoint. ``judge``: what an answer means there."""

    errors: Errors
    waits: WaitDialect
    judge: Callable[[AnswerFacts], Failure | None]
    now: datetime
    headers: Mapping[str, str] = field(default_factory=dict)  # of every answer, such as budgets
    rejected: Mapping[str, str] = field(default_factory=dict)  # of a spent budget
    refused: tuple[int, ...] = STATUSES[K.AUTH]  # the statuses of refused credentials

    def statuses(self, kind: FailureKind) -> tuple[int, ...]:
        """The usual ones of a kind, the most usual first."""
        return self.refused if kind is K.AUTH else STATUSES.get(kind, ())


def compose(
    voice: Voice, kind: FailureKind, *, wait: float | None = None, scope: Scope | None = None, code: str = ""
) -> tuple[Reply, Failure]:
    """An answer that means ``kind``, telling to wait ``wait`` seconds, about ``scope``: as near as the dialect can.

    ``code``: the provider's word for it. Raises `InvalidInput` where its dialect has no such answer.
    """
    best: tuple[tuple[bool, ...], Reply, Failure] | None = None
    for reply in _candidates(voice, kind, wait, code):
        failure = voice.judge(facts_of(reply, voice))
        if failure is None or failure.kind is not kind:
            continue
        told = failure.retry_in
        off = (
            bool(code) and failure.code != code,
            scope is not None and failure.scope is not scope,
            (told is not None) if wait is None else (told is None or abs(told - wait) > _CLOSE),
            scope is None and failure.scope is not Scope.ACCOUNT,
        )
        if not any(off):
            return reply, failure
        if best is None or off < best[0]:
            best = off, reply, failure
    if best is None:
        raise InvalidInput(f"this provider has no answer that means {kind}: give one with Reply(status, body, headers)")
    return best[1], best[2]


def facts_of(reply: Reply, voice: Voice) -> AnswerFacts:
    """A reply as the wire would hand it on."""
    fields = Fields.of({**voice.headers, **reply.headers, "date": http_date(voice.now)})
    text = reply.content().decode("utf-8", "replace")
    body = None if isinstance(reply.body, (str, bytes)) else reply.body
    left = budgets(fields, voice.now, fields=voice.waits.budgets)
    return AnswerFacts(reply.status, fields, body=body, text=text, budgets=left)


def _candidates(voice: Voice, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    """Its rules first where a dialect has words of its own for this, else the status that everybody knows."""
    if kind in _WORDED or voice.errors.reads_success:
        yield from _ruled(voice, kind, wait, code)
        yield from _plain(voice, kind, wait, code)
    else:
        yield from _plain(voice, kind, wait, code)
        yield from _ruled(voice, kind, wait, code)


def _ruled(voice: Voice, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    spent = voice.rejected if kind in (K.THROTTLED, K.QUOTA) else {}
    for rule in voice.errors.rules:
        if rule.kind is kind:
            for status in _statuses(rule, voice.statuses(kind)):
                if rule.header and spent:
                    yield _by_rule(voice, rule, status, wait, code, spent)
                yield _by_rule(voice, rule, status, wait, code)


def _plain(voice: Voice, kind: FailureKind, wait: float | None, code: str) -> Iterator[Reply]:
    spent = voice.rejected if kind in (K.THROTTLED, K.QUOTA) else {}
    for status in voice.statuses(kind):
        body = _body(voice, kind, code or CODES[kind])
        yield Reply(status, body, _told(voice, wait))
        yield Reply(status, body, {**spent, **_told(voice, wait)})
        yield Reply(status, _body(voice, kind, ""), _told(voice, wait))
        yield Reply(status, PAGE.format(status=status), _told(voice, wait))


def _statuses(rule: Rule, usual: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(rule.status, int):
        return (rule.status,)
    if rule.status is None:
        return (*usual, 400)
    if isinstance(rule.status, range):
        return (rule.status[0],)
    return tuple(sorted(rule.status, key=lambda status: status not in usual))


def _by_rule(
    voice: Voice, rule: Rule, status: int, wait: float | None, code: str, spent: Mapping[str, str] | None = None
) -> Reply:
    assert rule.kind is not None  # noqa: S101 - asked for by its kind
    codes = (rule.code,) if isinstance(rule.code, str) else rule.code
    headers = {**(spent or {})}
    if rule.wait is None or not _in_body(rule.wait):
        headers |= _told(voice, wait)
    body: Any = _body(voice, rule.kind, code or (plain(codes[0]) if codes else ""))
    message = MESSAGES[rule.kind]
    if rule.text:
        message = f"{message}: {fitting(rule.text)}"
    for path, value in rule.where.items():
        body = put(body, path, "said" if value is ... else value)
    for name, pattern in rule.header.items():
        if not re.search(pattern, headers.get(name, voice.headers.get(name, ""))):
            headers[name] = fitting(pattern)
    if codes and voice.errors.code_header and not voice.errors.code:
        headers[voice.errors.code_header] = plain(codes[0])
    if rule.wait is not None and wait is not None:
        body, message = _wait_in(voice, rule.wait, wait, body, message, headers)
    if rule.json is False:
        return Reply(status, f"{message}\n", headers)
    return Reply(status, _with_message(voice, body, message), headers)


def _body(voice: Voice, kind: FailureKind, code: str) -> Any:
    body: Any = {}
    for rule in voice.errors.rules:  # such as Slack's "ok": false, which every error of its has
        if not rule.code and not rule.header:
            for path, value in rule.where.items():
                body = put(body, path, value) if value is False else body
    body = _with_message(voice, body, MESSAGES.get(kind, str(kind)))
    return put(body, voice.errors.code[0], code) if code and voice.errors.code else body


def _with_message(voice: Voice, body: Any, message: str) -> Any:
    path = next((one for one in voice.errors.message if one not in voice.errors.code), "")
    return put(body, path, message) if path else body


def _in_body(wait: Wait) -> bool:
    return bool(wait.body or wait.text or wait.seconds)


def _wait_in(
    voice: Voice, wait: Wait, seconds: float, body: Any, message: str, headers: dict[str, str]
) -> tuple[Any, str]:
    if wait.header:
        headers[wait.header] = said(wait.word, seconds, voice.now)
    if wait.body:
        body = put(body, wait.body, said_in_json(wait.word, seconds, voice.now))
    if wait.text:
        text = said(wait.word, seconds, voice.now)
        message = f"{message}. {fitting(wait.text, {'value': text, 1: text})}"
    if wait.seconds is not None:
        body = put(body, "extensions.cost", points(seconds))
    return body, message


def points(seconds: float) -> dict[str, Any]:
    """The cost of a GraphQL query that is refused until a bucket has been filled for ``seconds``."""
    asked, rate = 10.0 + seconds * 50.0, 50.0
    status = {"maximumAvailable": asked, "currentlyAvailable": 10.0, "restoreRate": rate}
    return {"requestedQueryCost": asked, "actualQueryCost": None, "throttleStatus": status}


def _told(voice: Voice, wait: float | None) -> dict[str, str]:
    """A wait in the provider's general dialect."""
    if wait is None:
        return {}
    if voice.waits.hints:
        name, word = voice.waits.hints[0]
        return {name: said(word, wait, voice.now)}
    return {"retry-after": said(voice.waits.retry_after, wait, voice.now)}
