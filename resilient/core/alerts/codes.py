"""Which error codes get alerts of their own, so that the codes of one account cannot use up the alerts of the others.

The code of an error may be anything: an id that is new in each answer, or one tenant's mischief. So a code is either
shared by all accounts of a kind of job, or it belongs to one account:

- The first new code of an account is shared. Its further new codes belong to it until another account has them too:
  then they are shared.
- One account makes at most `MOST_SECONDED` codes of others shared: else two accounts of one tenant could use up
  `MOST_SHARED`.
- An account that has `MOST_CODES` codes gets one alert for all others: `OTHER`.

A code is forgotten when its alert has ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime, timedelta

OTHER: Final = "other"
MOST_CODES: Final = 50  # codes that belong to one account
MOST_SHARED: Final = 500  # shared codes of a kind of job
MOST_KNOWN: Final = 5_000  # codes of a kind of job in memory
_FIRST_SHARED: Final = 1  # new codes of an account that are shared at once
MOST_SECONDED: Final = 10  # codes of other accounts that one account makes shared


@dataclass(slots=True)
class _Code:
    account: str
    shared: bool
    at: datetime
    seconded_by: str = ""  # the second account that had it and so made it shared


class Codes:
    """The known codes of one kind of job."""

    __slots__ = ("_brought", "_known", "_own", "_seconded", "_swept_at")

    def __init__(self) -> None:
        self._known: dict[str, _Code] = {}
        self._own = Counter[str]()  # by account: codes that belong to it
        self._brought = Counter[str]()  # by account: shared codes that it was the first to have
        self._seconded = Counter[str]()  # by account: codes of others that it made shared
        self._swept_at: datetime | None = None

    def classify(self, code: str, account: str, now: datetime, lasts: timedelta) -> tuple[str, str]:
        """The code that the alert names, and the account that the code belongs to ("": it is shared).

        ``lasts``: how long a code is remembered after it last came.
        """
        if not code:
            return "", ""
        self._sweep(now, lasts)
        entry = self._known.get(code)
        if entry is None:
            return self._add(code, account, now)
        entry.at = now
        if not entry.shared and entry.account != account and self._seconded[account] < MOST_SECONDED:
            entry.shared, entry.seconded_by = True, account  # two accounts have it: it belongs to neither
            self._seconded[account] += 1
            self._own[entry.account] -= 1
            self._brought[entry.account] += 1
        return code, "" if entry.shared else account

    def _add(self, code: str, account: str, now: datetime) -> tuple[str, str]:
        shared = self._brought[account] < _FIRST_SHARED
        if shared and self._brought.total() >= MOST_SHARED:
            return OTHER, ""
        if not shared and (self._own[account] >= MOST_CODES or len(self._known) >= MOST_KNOWN):
            return OTHER, account
        (self._brought if shared else self._own)[account] += 1
        self._known[code] = _Code(account, shared, now)
        return code, "" if shared else account

    def _sweep(self, now: datetime, lasts: timedelta) -> None:
        """Forget the codes that are older than ``lasts``, at most once in a hundredth of that time."""
        if self._swept_at is not None and self._swept_at > now - lasts / 100:
            return
        self._swept_at = now
        self._known = {code: one for code, one in self._known.items() if one.at > now - lasts}
        self._own = Counter(one.account for one in self._known.values() if not one.shared)
        self._brought = Counter(one.account for one in self._known.values() if one.shared)
        self._seconded = Counter(one.seconded_by for one in self._known.values() if one.seconded_by)
