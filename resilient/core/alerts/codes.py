"""Which error codes are alerts of their own: what one account answers must not spend what the others need.

A provider's code may be anything, an id in disguise or one tenant's mischief. So each account brings one code that
nobody had into what all accounts of a kind of job share; what it brings beyond that is told apart, as its own, until
another account has it too. A few codes become shared by the word of one other account, or two of one tenant would fill
what all share. An account with too many codes of its own has one alert for the rest. Codes are forgotten when their
alerts are over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime, timedelta

OTHER: Final = "other"
MOST_CODES: Final = 50  # of one account alone
MOST_SHARED: Final = 500  # of all accounts of a kind
MOST_KNOWN: Final = 5_000  # of a kind, in memory
_SHARE: Final = 1  # codes that one account alone brings into what all share
MOST_SECONDED: Final = 10  # codes of others that one account makes shared by having them too


@dataclass(slots=True)
class _Code:
    account: str
    shared: bool
    at: datetime
    seconded_by: str = ""  # the account by whose having it, too, it became shared


class Codes:
    """The codes of one kind of job that are known."""

    __slots__ = ("_brought", "_known", "_own", "_seconded", "_swept_at")

    def __init__(self) -> None:
        self._known: dict[str, _Code] = {}
        self._own = Counter[str]()  # codes by account
        self._brought = Counter[str]()
        self._seconded = Counter[str]()
        self._swept_at: datetime | None = None

    def sort(self, code: str, account: str, now: datetime, lasts: timedelta) -> tuple[str, str]:
        """The code as alerts have it, and the account that it is told apart for ("": all have it together).

        ``lasts``: for how long a code is known that does not come again.
        """
        if not code:
            return "", ""
        self._sweep(now, lasts)
        entry = self._known.get(code)
        if entry is None:
            return self._bring(code, account, now)
        entry.at = now
        if not entry.shared and entry.account != account and self._seconded[account] < MOST_SECONDED:
            entry.shared, entry.seconded_by = True, account  # two have it: it is nobody's own
            self._seconded[account] += 1
            self._own[entry.account] -= 1
            self._brought[entry.account] += 1
        return code, "" if entry.shared else account

    def _bring(self, code: str, account: str, now: datetime) -> tuple[str, str]:
        shared = self._brought[account] < _SHARE
        if shared and self._brought.total() >= MOST_SHARED:
            return OTHER, ""
        if not shared and (self._own[account] >= MOST_CODES or len(self._known) >= MOST_KNOWN):
            return OTHER, account
        (self._brought if shared else self._own)[account] += 1
        self._known[code] = _Code(account, shared, now)
        return code, "" if shared else account

    def _sweep(self, now: datetime, lasts: timedelta) -> None:
        """Forget the codes that are too old; it looks once in a hundredth of their time."""
        if self._swept_at is not None and self._swept_at > now - lasts / 100:
            return
        self._swept_at = now
        self._known = {code: one for code, one in self._known.items() if one.at > now - lasts}
        self._own = Counter(one.account for one in self._known.values() if not one.shared)
        self._brought = Counter(one.account for one in self._known.values() if one.shared)
        self._seconded = Counter(one.seconded_by for one in self._known.values() if one.seconded_by)
