"""What an answer, or its absence, means as a `Failure`: the provider's own dialect decides first, then the status.

`BY_STATUS` lists single statuses. Others follow RFC 9110: an unknown 4xx is the caller's fault, an unknown 5xx the
server's. A status alone never makes a failure ambiguous. It is ambiguous if the request cannot be repeated *and* may
have taken effect: no answer came, or a gateway answered that lost the server's answer (502, 504; Cloudflare's 520 and
524).

A time that the provider states is kept as seconds from now (``retry_in``), so that a wrong clock of this worker makes
no wrong moment of it. It is believed as far as `bounds.believed_wait` says.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base import bounds
from resilient.core.base.body import pick
from resilient.core.base.bounds import believed_wait
from resilient.core.base.errors import Failure, FailureKind, Scope
from resilient.core.base.instants import read
from resilient.core.base.phrases import one_line
from resilient.core.gates.retry_after import WaitDialect, ahead, in_text, when

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.provider.facts import Provider
    from resilient.core.provider.rules import Rule, Wait

_T, _P, _C = FailureKind.TRANSIENT, FailureKind.PERMANENT, FailureKind.CONFLICT
BY_STATUS: Final = {
    401: FailureKind.AUTH,
    408: _T, 425: _T,
    409: _C, 412: _C, 423: _C,
    429: FailureKind.THROTTLED, 509: FailureKind.THROTTLED,
    501: _P, 505: _P, 510: _P,
}  # fmt: skip
LOST_BEHIND_A_GATEWAY: Final = frozenset({502, 504, 520, 524})
LEAST: Final = 100  # no status is smaller; some clients say 0 where no answer came
SERVER_ERROR: Final = 500
CLIENT_ERROR: Final = 400
FORBIDDEN: Final = 403
REQUEST_TIMEOUT: Final = 408
# Problem types of the IETF's RateLimit draft (RFC 9457 bodies), by the end of their URI.
_PROBLEMS: Final = {
    "quota-exceeded": FailureKind.QUOTA,
    "temporary-reduced-capacity": FailureKind.THROTTLED,
    "abnormal-usage-detected": FailureKind.THROTTLED,
}
_WAITS: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})


class Phase(StrEnum):
    """How far a request came before it failed without an answer."""

    POOL = "pool"  # our pool had no free connection: nothing was sent
    CONNECT = "connect"  # refused, unresolved, timed out: nothing was sent
    TLS = "tls"  # the certificate was refused: nothing was sent
    WRITE = "write"  # part of the request may have arrived
    READ = "read"  # the request was sent; the answer did not come, or not whole
    UNSENDABLE = "unsendable"  # a bad URL, scheme or header
    UNREADABLE = "unreadable"  # an answer nobody can read: encoding, size, endless redirects


def classify(answer: AnswerFacts, request: RequestFacts, provider: Provider, now: datetime) -> Failure | None:
    """What an answer means; None is success. ``now`` is when it came."""
    status = answer.status
    if status < LEAST:
        return classify_error(Phase.READ, repeatable=request.repeatable, code=f"http_{status}")
    if status < CLIENT_ERROR and not provider.errors.reads_success:
        return None
    codes = _codes(answer, provider)
    rule = rule_for(answer, request, provider, codes)
    if rule is not None:
        return None if rule.kind is None else _by_rule(rule, rule.kind, answer, request, provider, codes, now)
    if status < CLIENT_ERROR:
        return None
    kind = _by_problem(answer) or BY_STATUS.get(status) or (_T if status >= SERVER_ERROR else _P)
    if status == FORBIDDEN and kind is _P and _spent(answer):
        kind = FailureKind.THROTTLED
    hint = when(answer.headers, now, _dialect(kind, provider), cost=request.cost)
    return _failure(kind, answer, request, codes, _believed(_seconds(hint, now), provider))


def rule_for(
    answer: AnswerFacts, request: RequestFacts, provider: Provider, codes: tuple[str, ...] | None = None
) -> Rule | None:
    """The rule of the provider's dialect that decides about an answer; None if its status does."""
    codes = _codes(answer, provider) if codes is None else codes
    return next((rule for rule in provider.errors.rules if _fits(rule, answer, request, codes)), None)


def classify_error(phase: Phase, *, repeatable: bool, code: str | None = None) -> Failure:
    """The failure of a request without a (whole) answer. ``repeatable``: a repeat has no second effect."""
    code = code or phase.value
    if phase is Phase.POOL:
        return Failure(_T, code=code, counts_for_breaker=False)
    if phase in (Phase.TLS, Phase.UNSENDABLE, Phase.UNREADABLE):
        return Failure(_P, code=code)
    if phase is Phase.CONNECT or repeatable:
        return Failure(_T, code=code, provider_wide=True)
    return Failure(FailureKind.AMBIGUOUS, code=code, provider_wide=True)


def cost_of(answer: AnswerFacts, provider: Provider) -> float | None:
    """What the request really cost, by the provider's function; None if that has nothing to say or fails."""
    if provider.cost is None:
        return None
    try:
        cost = provider.cost(answer)
        return float(cost) if cost is not None and 0 <= cost < float("inf") else None
    except Exception:  # noqa: BLE001 - whatever a provider's function raises, the request was answered
        return None


def message_of(answer: AnswerFacts, provider: Provider) -> str:
    """The provider's own message about an error, in one line; "" if there is none. `redact.scrub` cuts it."""
    for path in provider.errors.message:
        for value in pick(answer.body, path):
            if isinstance(value, str) and value.strip():
                return one_line(value[: bounds.SCRUBBED_TEXT.value])
    return ""


# -- the dialect ---------------------------------------------------------------------------------------------


def _codes(answer: AnswerFacts, provider: Provider) -> tuple[str, ...]:
    errors = provider.errors
    values = [value for path in errors.code for value in pick(answer.body, path)]
    if errors.code_header:
        values.append(answer.headers.get(errors.code_header))
    if errors.code_text and answer.body is None and (m := _search(errors.code_text, answer.text)):
        values.append(m[1])
    codes = [str(c) for c in values if isinstance(c, (str, int)) and not isinstance(c, bool) and c != ""]
    if errors.code_form:
        matches = [_search(errors.code_form, code, bounds.SEARCHED_CODE) for code in codes]
        codes = [(m and m[1]) or code for m, code in zip(matches, codes, strict=True)]
    return tuple(one_line(code[: bounds.ERROR_CODE.value]) for code in codes)


def _fits(rule: Rule, answer: AnswerFacts, request: RequestFacts, codes: tuple[str, ...]) -> bool:
    patterns = (rule.code,) if isinstance(rule.code, str) else rule.code
    return (
        rule.fits_status(answer.status)
        and (not patterns or any(fnmatchcase(code, p) for code in codes for p in patterns))
        and (rule.json is None or rule.json == (answer.body is not None))
        and (not rule.path or fnmatchcase(request.path, rule.path))
        and all(_has(answer.body, path, value) for path, value in rule.where.items())
        and all(
            _search(p, answer.headers.get(name.lower(), ""), bounds.SEARCHED_FIELD) for name, p in rule.header.items()
        )
        and (not rule.text or _search(rule.text, answer.text) is not None)
    )


def _search(pattern: str, text: str, most: bounds.Bound = bounds.SEARCHED_TEXT) -> re.Match[str] | None:
    """The first fit of a fact's pattern in the beginning of a stranger's text."""
    return re.search(pattern, text[: most.value])


def _has(body: Any, path: str, expected: Any) -> bool:
    values = pick(body, path)
    if expected is ...:
        return any(values)
    return any(type(value) is type(expected) and value == expected for value in values)


def _by_rule(
    rule: Rule, kind: FailureKind, answer: AnswerFacts, request: RequestFacts, provider: Provider,
    codes: tuple[str, ...], now: datetime,
) -> Failure:  # fmt: skip
    hint = None
    if rule.wait is not None:
        hint = _wait_of(rule.wait, answer, now)
    if hint is None:
        hint = _seconds(when(answer.headers, now, _dialect(kind, provider), cost=request.cost), now)
    if hint is None and rule.wait is not None:
        hint = rule.wait.fallback
        if hint is None and rule.wait.period:
            hint = (_next(rule.wait.period, now) - now).total_seconds()
    if kind is FailureKind.AMBIGUOUS and request.repeatable:
        kind = _T
    return _failure(kind, answer, request, codes, _believed(hint, provider), rule)


def _wait_of(wait: Wait, answer: AnswerFacts, now: datetime) -> float | None:
    """The seconds to wait that the rule's field, text or function states; None if they state none."""
    skew = answer.headers.skew(now)
    hint = ahead(read(answer.headers.get(wait.header), wait.word, now, skew), now)
    if hint is None and wait.body:
        every = (ahead(read(value, wait.word, now, skew), now) for value in pick(answer.body, wait.body))
        hint = next((one for one in every if one is not None), None)
    if hint is None and wait.text:
        hint = in_text(answer.text, now, re.compile(wait.text), wait.word)
    if hint is not None:
        return _seconds(hint, now)
    return _computed(wait.seconds, answer.body) if wait.seconds is not None and answer.body is not None else None


def _computed(seconds: Callable[[Any], float | None], body: Any) -> float | None:
    """Seconds by the provider's own function; None if that has nothing to say or fails."""
    try:
        value = seconds(body)
        return float(value) if value is not None and 0 < value < float("inf") else None
    except Exception:  # noqa: BLE001 - as in `cost_of`
        return None


# -- the status ----------------------------------------------------------------------------------------------


def _failure(
    kind: FailureKind, answer: AnswerFacts, request: RequestFacts, codes: tuple[str, ...],
    hint: float | None, rule: Rule | None = None,
) -> Failure:  # fmt: skip
    status = answer.status
    ill = status >= SERVER_ERROR or status == REQUEST_TIMEOUT
    if kind is _T and status in LOST_BEHIND_A_GATEWAY and not request.repeatable:
        kind = FailureKind.AMBIGUOUS
    wide = rule.provider_wide if rule is not None else None
    if wide is None:
        wide = ill and kind in (_T, FailureKind.AMBIGUOUS)
    scope = rule.scope if rule is not None and rule.scope is not None else Scope.ACCOUNT
    return Failure(
        kind, scope=scope, retry_in=hint, code=codes[0] if codes else f"http_{status}", status=status,
        counts_for_breaker=None if rule is None else rule.counts_for_breaker, provider_wide=wide,
    )  # fmt: skip


def _by_problem(answer: AnswerFacts) -> FailureKind | None:
    if isinstance(answer.body, dict) and isinstance(name := answer.body.get("type"), str):
        return _PROBLEMS.get(name.rpartition("#")[2])
    return None


def _spent(answer: AnswerFacts) -> bool:
    """Whether some budget is used up: then a 403 is a throttle, as GitHub and others mean it."""
    return any(budget.remaining == 0 and budget.reset_at is not None for budget in answer.budgets)


def _dialect(kind: FailureKind, provider: Provider) -> WaitDialect:
    """The dialect to read a wait in: only a throttle waits for the reset of a budget; no other fault ends then."""
    return provider.waits if kind in _WAITS else provider.floors


def _seconds(hint: datetime | None, now: datetime) -> float | None:
    return None if hint is None else (hint - now).total_seconds()


def _believed(hint: float | None, provider: Provider) -> float | None:
    return None if hint is None else believed_wait(hint, provider.longest_window)


def believed(failure: Failure, provider: Provider | None, now: datetime) -> Failure:
    """``failure``, as a handler raised it, with no longer wait than is believed of the provider."""
    window = 0.0 if provider is None else provider.longest_window
    if failure.kind not in _WAITS:
        return failure
    if failure.retry_in is not None:
        return replace(failure, retry_in=believed_wait(failure.retry_in, window))
    if failure.retry_at is None:
        return failure
    seconds = believed_wait((failure.retry_at - now).total_seconds(), window)
    return replace(failure, retry_at=now + timedelta(seconds=seconds))


def _next(period: str, now: datetime) -> datetime:
    """When the next hour, day or month begins (UTC)."""
    start = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if period == "hour":
        return start + timedelta(hours=1)
    start = start.replace(hour=0)
    if period == "day":
        return start + timedelta(days=1)
    return (start.replace(day=1) + timedelta(days=32)).replace(day=1)
