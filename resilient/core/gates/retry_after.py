"""Every dialect of "come back later": which field counts, and what to do with the time it states.

Rules: garbage is no hint (the caller backs off as computed), never zero; zero, negative and past are no
usable hint either, or a request would be repeated at once; a hint is never capped, because that means asking
too early. Absolute times are corrected by the response's own Date. What is waited is a little longer than stated.

How long a throttled resource rests, and which throttles are one and the same (`cooled`): a stated time is waited out
and a little longer. Where none is stated, a resource rests 2 s, and twice as long each time it is throttled again soon
after, with nothing accepted in between. However many requests were in flight, they are one signal: a stated time that
the rest already covers, and a request that was sent before the rest began, change nothing.

Whether throttles of several accounts show one limit of the application (`CommonLimit`) is decided here too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from math import inf
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
_BETWEEN: Final = re.compile(r",(?![ \t]*[0-9]{1,2}[ -][A-Z][a-z]{2}[ -])")  # a comma, but for that of an HTTP-date
_MOST_REPEATED: Final = 20
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
    """Retry-After by its dialect, else as an HTTP-date. Sent several times, the latest one counts."""
    parts = _BETWEEN.split(value, _MOST_REPEATED)
    every = [read(part, word, now, skew) or read(part, Word.HTTP_DATE, now, skew) for part in parts]
    stated = [at for at in every if at is not None]
    return max(stated) if len(stated) == len(every) else None


def _full_again(budget: Budget, now: datetime, cost: float) -> datetime | None:
    """When a spent budget is full again; a whole window from now if the server states no reset."""
    spent = budget.remaining is not None and budget.remaining < cost
    if budget.reset_at is not None and (spent or budget.remaining is None):
        return budget.reset_at
    if spent and budget.window is not None:
        return add_seconds(now, budget.window)
    return None


FIRST: Final = timedelta(seconds=2)  # a resource's first rest, where no time is stated
LONGEST: Final = timedelta(minutes=5)  # its longest
SOON: Final = timedelta(seconds=60)  # after a rest: a throttle within it doubles the next rest
BRIEF: Final = timedelta(seconds=0.5)  # a rest after one request too many at once
PROVEN: Final = 3  # times as many requests passed as fit at once: the limit is one of requests at once


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
    if s is not None and s.kind == "slots" and not s.strikes and s.accepted > PROVEN * s.slots:
        rest = BRIEF  # one too many at once: the others go on
    return now + rest / 2 * (1 + roll)


def _accepted(facts: ResourceFacts, refusal: Refusal | None) -> int:
    """Requests that passed since the last rest, as far as that is known."""
    if facts.learnt is None:
        return 0
    return facts.learnt.accepted + (refusal.accepted if refusal is not None else 0)


# -- a limit of the application --------------------------------------------------------------------------------------

BURST: Final = 5.0  # seconds within which throttles of several accounts are one event
LEAST: Final = 5  # votes for a limit that is not known
FEW: Final = 3  # the same where one is known
LONGEST_WAIT: Final = 10.0  # seconds; a throttle that states a longer one is its account's, or all would rest for it
LONGEST_WAIT_OF_FEW: Final = 3.0
REPEAT: Final = 30.0  # seconds
HOUR: Final = 3600.0
MOST_ACCOUNTS: Final = 20_000  # at work; beyond that the quietest are forgotten
MOST_THROTTLED: Final = 2_000
_MOST_EVENTS: Final = int(HOUR / REPEAT)


@dataclass(slots=True)
class _Record:
    """The throttles of one account: the latest, and when each event of the last hour began."""

    latest: float = -inf
    events: list[float] = field(default_factory=list)

    def count(self, at: float) -> int:
        """Events in the last hour."""
        return len(self.events) - bisect_right(self.events, at - HOUR)


class CommonLimit:
    """Whether throttles of several accounts show one limit of the application: a state machine for each provider.

    A throttle concerns an account. Where several accounts are throttled within moments, it may be the application
    that has a limit. Then the provider's root must learn it, because accounts that learn apart get unequal shares of
    it. But it may also be a few accounts at limits of their own, those of one tenant say, and these must not slow
    down everybody else.

    Each throttled account has a vote. Enough votes within `BURST` are a common limit of all that were throttled then:

    - `LEAST` of them, and no fewer than accounts that were let through meanwhile;
    - where a limit is known already, `FEW`, if the stated wait is short: near a limit that is kept to, hardly
      anything is refused, so that no majority ever comes together.

    An account that was throttled more often in the last hour than half of the accounts at work has no vote. A common
    limit refuses whoever comes at the wrong moment, so that all accounts are throttled about as often; limits of
    their own refuse the same accounts again and again. So a minority of accounts, however often it is throttled
    together, has one vote each, and no other before it was left alone for an hour. An account that is throttled again
    within `REPEAT` has none.

    Where a limit is known, an account that has a vote learns nothing from its throttle: the limit of all may have been
    meant. If it was its own, the next one shows that.

    Times are seconds of any clock that only goes on.
    """

    def __init__(self) -> None:
        self._passed_at: dict[str, float] = {}  # the latest last
        self._records: dict[str, _Record] = {}  # the same
        self._votes: dict[str, float] = {}

    def passed(self, account: str, at: float) -> None:
        """Note that a request of an account was let through."""
        self._passed_at.pop(account, None)
        self._passed_at[account] = at
        if len(self._passed_at) > MOST_ACCOUNTS:
            del self._passed_at[next(iter(self._passed_at))]

    def throttled(self, account: str, at: float, wait: float | None, *, has_limit: bool) -> list[str] | None:
        """Note a throttle; returns the accounts whose throttles, with this one, show a common limit.

        An empty list: it may be the common limit, so it says nothing about the account; None: it is the account's own.
        ``has_limit``: the provider has learnt a limit before.
        """
        self._votes = {name: then for name, then in self._votes.items() if then > at - BURST}
        record = self._records.pop(account, None) or _Record()
        if at - record.latest >= REPEAT:
            if self._is_usual(account, record.count(at), at):
                self._votes[account] = at
            record.events = [*record.events[1 - _MOST_EVENTS :], at]
        record.latest = at
        self._records[account] = record
        if len(self._records) > MOST_THROTTLED:
            del self._records[next(iter(self._records))]
        if not self._is_enough(at, wait or 0.0, has_limit=has_limit):
            return [] if has_limit and account in self._votes and (wait or 0.0) <= LONGEST_WAIT_OF_FEW else None
        return self._throttled_since(at - BURST)

    # -- inside ----------------------------------------------------------------------------------------------

    def _is_enough(self, at: float, wait: float, *, has_limit: bool) -> bool:
        votes = len(self._votes)
        if has_limit and votes >= FEW and wait <= LONGEST_WAIT_OF_FEW:
            return True
        return votes >= LEAST and wait <= LONGEST_WAIT and votes >= self._passing(at)

    def _throttled_since(self, at: float) -> list[str]:
        return sorted(takewhile(lambda account: self._records[account].latest > at, reversed(self._records)))

    def _passing(self, at: float) -> int:
        """How many accounts were let through within the burst, and not throttled since."""
        count = 0
        for account in reversed(self._passed_at):
            passed_at = self._passed_at[account]
            if passed_at <= at - BURST:
                break
            record = self._records.get(account)
            count += record is None or record.latest < passed_at
        return count

    def _is_usual(self, account: str, count: int, at: float) -> bool:
        """Whether half of the other accounts at work, or more, had as many events in the last hour, or more."""
        if not count:
            return True
        self._forget(at)
        counts = [record.count(at) for record in self._records.values()]
        fewer = sum(one < count for one in counts) + len(self._passed_at.keys() - self._records.keys() - {account})
        others = fewer + sum(one >= count for one in counts)
        return 2 * fewer <= others

    def _forget(self, at: float) -> None:
        """Forget the accounts that were not at work for an hour."""
        while self._passed_at and self._passed_at[name := next(iter(self._passed_at))] <= at - HOUR:
            del self._passed_at[name]
        while self._records and self._records[name := next(iter(self._records))].latest <= at - HOUR:
            del self._records[name]
