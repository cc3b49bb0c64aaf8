"""Which alerts are told, and which are told of by another: a thousand accounts failing for one cause are one alert.

Alerts of one sort, provider and code have one *cause*. The first few of a cause are told one by one; when there are
more, one notice stands for all, and another one each time they have become ten times as many. What goes on is told by
one notice a cause, and so is its end, when the last of them is over.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from resilient.core import alert_words
from resilient.core.phrases import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from resilient.core.alerts import AlertInfo, Notice

ALONE: Final = 5  # alerts of one cause, beyond which one stands for all
NAMED: Final = 20  # others that a notice names
_TENFOLD: Final = 10


class Size(NamedTuple):
    """How many alerts a cause has: that go on, that people heard of lately among those, that ended lately."""

    open: int = 0
    told: int = 0
    closed: int = 0


def begun(due: Iterable[tuple[AlertInfo, bool]], sizes: Mapping[str, Size], now: datetime) -> list[Notice]:
    """What is told of alerts that are due, each with whether it is news; ``sizes`` by cause, before they are told."""
    told: list[Notice] = []
    for (cause, new), members in _by_cause(due).items():
        size, state = sizes.get(cause, Size()), "new" if new else "again"
        notices = [alert_words.notice(state, one, now) for one in members]  # type: ignore[arg-type]
        before = size.told if new else 0
        after = before + len(members) if new else max(size.open, len(members))
        if after <= ALONE:
            told += notices
        elif not new or _crosses(before, after):
            told.append(_for_all(notices, after))
    return told


def ended(over: Iterable[AlertInfo], sizes: Mapping[str, Size], now: datetime) -> list[Notice]:
    """What is told of alerts that are over; ``sizes`` by cause, after they were closed."""
    told: list[Notice] = []
    for (cause, _), members in _by_cause((one, False) for one in over).items():
        size = sizes.get(cause, Size(closed=len(members)))
        notices = [alert_words.notice("resolved", one, now) for one in members]
        if size.open + size.closed <= ALONE:
            told += notices
        elif not size.open:
            told.append(_for_all(notices, max(size.closed, len(members))))
    return told


def _by_cause(due: Iterable[tuple[AlertInfo, bool]]) -> Mapping[tuple[str, bool], Sequence[AlertInfo]]:
    found: dict[tuple[str, bool], list[AlertInfo]] = defaultdict(list)
    for one, new in sorted(due, key=lambda d: (d[0].first_at, d[0].subject)):
        found[one.cause or one.fingerprint, new].append(one)
    return found


def _crosses(before: int, after: int) -> bool:
    """Whether so many more are news once more: more than a few, and then ten times as many."""
    mark = ALONE
    while mark < before:
        mark *= _TENFOLD
    return before <= mark < after


def _for_all(notices: Sequence[Notice], count: int) -> Notice:
    first, rest = notices[0], [one.alert.subject for one in notices[1:]]
    root = first.alert.subject.partition("/")[0]
    names = f": {', '.join(rest[:3])}, …" if rest else ""
    text = f"{first.text} (and {counted(count - 1, 'other')} like it at {root}{names})"
    return replace(first, text=text, others=tuple(rest[:NAMED]))
