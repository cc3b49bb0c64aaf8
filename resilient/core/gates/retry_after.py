"""Every dialect of "come back later": which field counts, and what to do with the time it states.

Rules: garbage is no hint (the caller backs off as computed), never zero; zero, negative and past are no
usable hint either, or a request would be repeated at once; a hint is never capped, because that means asking
too early. Absolute times are corrected by the response's own Date. What is waited is a little longer than stated.

How long a throttled resource rests, and which throttles are one and the same (`cooled`): a stated time is waited out
and a little longer. Where none is stated, a resource rests 2 s, and twice as long each time it is throttled again soon
after, with nothing accepted in between. However many requests were in flight, they are one signal: a stated time that
the rest already covers, and a request that was sent before the rest began, change nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.base.budgets import GENERIC, Budget, BudgetFields, Fields, budgets
from resilient.core.base.instants import Word, add_seconds, read
from resilient.core.base.misfit import check_word, explained_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.gates.admission import ResourceFacts
    from resilient.core.gates.learnt import Refusal


GRAIN: Final = 1.0  # seconds added: headers are whole seconds, and the server's clock may be just behind
JITTER: Final = 0.1  # of the wait, so that not everybody returns in the same second
MOST_JITTER: Final = 30.0

_TEXT: Final = 4096  # characters of a message that are searched
_REPEATED: Final = re.compile(r"[0-9]+(?:[ \t]*,[ \t]*[0-9]+)+")
_IN_TEXT: Final = re.compile(
    r"(?:retry|try again|wait)(?:[ ]+(?:after|in|at|until|for))?:?[ ]+"
    r"(?P<value>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{5,20}(?:Z|[+-][0-9:]{4,6})"  # Gmail: Retry after 2025-...Z
    r"|(?:[0-9]+(?:\.[0-9]+)?(?:ms|[dhms]))+(?![a-z])"  # OpenAI: try again in 1m2.5s
    r"|[0-9]+(?:\.[0-9]+)?(?=[ ]?(?P<unit>milliseconds?|seconds?|secs?|minutes?|mins?|hours?|hrs?)\b))",
    re.IGNORECASE | re.ASCII,
)
_WORDED: Final = {"mil": "ms", "sec": "s", "min": "m", "hou": "h", "hr": "h", "hrs": "h"}


@explained_class
@dataclass(frozen=True, slots=True)
class WaitDialect:
    """How one provider says "come back later".

    ``retry_after``: what Retry-After holds besides an HTTP-date (whole seconds by RFC 9110, 10.2.3; Zoom
    sends a date-time). ``hints``: the provider's own fields, read first, in this order. ``budgets``: where it
    states what is left; the reset of a spent one is a hint.
    """

    retry_after: Word = Word.DELTA_S
    hints: tuple[tuple[str, Word], ...] = ()
    budgets: tuple[BudgetFields, ...] = GENERIC

    def __post_init__(self) -> None:
        check_word("WaitDialect", "retry_after", self.retry_after, Word)
        for name, word in self.hints:
            check_word("WaitDialect", f"hints: {name}", word, Word)
        object.__setattr__(self, "hints", tuple((name.lower(), word) for name, word in self.hints))


STANDARD: Final = WaitDialect()
_MILLISECONDS: Final = (("retry-after-ms", Word.DELTA_MS), ("x-ms-retry-after-ms", Word.DELTA_MS))


def when(
    headers: Mapping[str, str], now: datetime, dialect: WaitDialect = STANDARD, *, cost: float = 1.0
) -> datetime | None:
    """When the server wants to be asked again, or None if it says nothing usable. Never raises.

    ``cost`` is what the refused request would have drawn: a budget with less than that left counts as spent.
    """
    fields = Fields.of(headers)
    skew = fields.skew(now)
    for name, word in (*dialect.hints, *_MILLISECONDS):
        if (value := fields.get(name)) is not None:
            hint = ahead(read(value, word, now, skew), now)
            if hint is not None:
                return hint
    if (value := fields.get("retry-after")) is not None:
        hint = ahead(_retry_after(value, dialect.retry_after, now, skew), now)
        if hint is not None:
            return hint
    spent = [_full_again(b, now, cost) for b in budgets(fields, now, fields=dialect.budgets)]
    return ahead(max((at for at in spent if at is not None), default=None), now)


def in_text(
    text: str,
    now: datetime,
    pattern: re.Pattern[str] | None = None,
    word: Word = Word.AUTO,
) -> datetime | None:
    """The time that an error message states: "Retry after 2025-11-02T10:00:00Z", "try again in 1m2s".

    ``pattern`` (a provider's own) has the time in its group ``value``, or else its first, in the dialect
    ``word``.
    """
    if pattern is None:
        return ahead(_plain_text(text[:_TEXT], now), now)
    if (m := pattern.search(text[:_TEXT])) is None:
        return None
    value = m["value"] if "value" in pattern.groupindex else m[1] if pattern.groups else m[0]
    return ahead(read(value, word, now), now)


def ahead(at: datetime | None, now: datetime) -> datetime | None:
    """``at``, if it is a usable hint: neither absent nor past."""
    return None if at is None or at <= now else at


def resume_at(at: datetime, now: datetime, roll: float) -> datetime:
    """When to go on: the stated time, plus 1 s, plus up to 10 % of the wait (at most 30 s)."""
    wait = max(0.0, (at - now).total_seconds())
    return add_seconds(max(at, now), GRAIN + roll * min(wait * JITTER, MOST_JITTER))


def _plain_text(text: str, now: datetime) -> datetime | None:
    """A date-time, or a duration with units of one letter or in words."""
    if (m := _IN_TEXT.search(text)) is None:
        return None
    value = m["value"].lower()
    if "t" in value:
        return read(value, Word.ISO8601, now)
    unit = _WORDED[m["unit"][:3].lower()] if m["unit"] else ""
    return read(value + unit, Word.DURATION, now)


def _retry_after(value: str, word: Word, now: datetime, skew: timedelta) -> datetime | None:
    """Retry-After by its dialect, else as an HTTP-date. Sent twice, the later one counts."""
    if _REPEATED.fullmatch(value.strip(" \t")):
        every = [read(part, word, now, skew) for part in value.split(",")]
        return max((at for at in every if at is not None), default=None)
    return read(value, word, now, skew) or read(value, Word.HTTP_DATE, now, skew)


def _full_again(budget: Budget, now: datetime, cost: float) -> datetime | None:
    """When a spent budget is full again; a whole window from now if the server states no reset."""
    spent = budget.remaining is not None and budget.remaining < cost
    if budget.reset_at is not None and (spent or budget.remaining is None):
        return budget.reset_at
    if spent and budget.window is not None:
        return add_seconds(now, budget.window)
    return None


FIRST: Final = timedelta(seconds=2)
LONGEST: Final = timedelta(minutes=5)
SOON: Final = timedelta(seconds=60)
BRIEF: Final = timedelta(seconds=0.5)
PROVEN: Final = 3  # times as many passed as fit at once


def cooled(
    facts: ResourceFacts,
    retry_at: datetime | None,
    now: datetime,
    roll: float,
    sent_at: datetime | None = None,
    *,
    refusal: Refusal | None = None,
) -> datetime | None:
    """Until when a throttle makes the resource rest; None if it changes nothing.

    ``refusal``: what the process that got it knows besides (`learnt`).
    """
    until, since = facts.blocked_until, facts.blocked_since
    active = until is not None and until > now
    if retry_at is not None and retry_at > now:
        return None if active and until is not None and retry_at <= until else resume_at(retry_at, now, roll)
    if active or (sent_at is not None and since is not None and sent_at <= since):
        return None
    rest = FIRST
    if until is not None and since is not None and now - until < SOON and not _accepted(facts, refusal):
        rest = min(LONGEST, max(FIRST, 2 * (until - since)))
    s = facts.learnt
    if s is not None and s.kind == "slots" and s.accepted > PROVEN * s.slots:
        rest = BRIEF  # one too many at once: the others go on
    return now + rest / 2 * (1 + roll)


def _accepted(facts: ResourceFacts, refusal: Refusal | None) -> int:
    """Requests that passed since the last rest, as far as that is known."""
    if facts.learnt is None:
        return 0
    return facts.learnt.accepted + (refusal.accepted if refusal is not None else 0)
