"""Alerts in words: one line each, that says what is wrong, with what, since when, and what to do.

Many alerts of one cause share one notice: see the end of this file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from resilient.core.accounts.fuse import APP_REFUSED, SUSPECT_AUTH
from resilient.core.accounts.tokens import NOT_CONNECTED, UNREADABLE
from resilient.core.alerts.rules import CONDITIONS, AlertInfo, Notice
from resilient.core.base.phrases import counted, moment, span, when

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


_STALE: Final = timedelta(seconds=90)  # three looks of the elected worker: what it still finds is younger


def is_stale(alert: AlertInfo, now: datetime) -> bool:
    """Whether a condition was not found by the latest looks: it seems to be over, or no worker looks."""
    return alert.name in CONDITIONS and now - alert.last_at > _STALE


def notice(state: Literal["new", "again", "resolved"], alert: AlertInfo, now: datetime) -> Notice:
    """An alert in words."""
    if state == "resolved":
        lasted = span((now - alert.first_at).total_seconds())
        return Notice(state, alert, f"resolved after {lasted}: {alert.subject}: {_OVER.get(alert.name, alert.name)}")
    if (phrase := _WORDS.get(alert.name)) is None:
        text = f"{alert.subject}: {alert.name} (an alert of a newer version, which has the words for it)"
    else:
        text = f"{alert.subject}: {phrase(alert.detail, alert.count, now)}"
    if is_stale(alert, now):
        text += f" (last found at {moment(alert.last_at, now)})"
    if state == "again":
        times = "" if alert.count == 1 else f", {alert.count:,} times"
        text = f"still, since {moment(alert.first_at, now)}{times}: {text}"
    return Notice(state, alert, text)


# -- one phrase each ---------------------------------------------------------------------------------------------------


def _new_error(d: Mapping[str, Any], _count: int, _now: datetime) -> str:
    return f"fails with {_what(d)} on {d.get('resource')} (job {d.get('job')}){_error(d)}"


def _dead(d: Mapping[str, Any], count: int, _now: datetime) -> str:
    number = "a job is dead" if count == 1 else f"{count:,} jobs are dead"
    return f"{number}, {_what(d)} (job {d.get('job')}){_error(d)}"


def _invariant(d: Mapping[str, Any], _count: int, _now: datetime) -> str:
    if "lanes" in d:
        wrong = f"{counted(d['lanes'], 'ordering key')} stood still and went on by repair"
    elif "jobs" in d:
        wrong = f"{counted(d['jobs'], 'job')} waited for others that were over and went on by repair"
    elif "workflows" in d:
        wrong = f"{counted(d['workflows'], 'workflow')} stood still and went on by repair"
    else:
        lost = counted(d.get("turns", 1), "resource")
        wrong = f"{lost} with ready jobs fell out of the line for the workers, and went on by repair"
    return f"{wrong}. This is a bug: please report it"


def _stuck_workflow(d: Mapping[str, Any], count: int, _now: datetime) -> str:
    others = f" (and {counted(count - 1, 'other')} of that name)" if count > 1 else ""
    return (
        f"workflow {d.get('workflow')}{others} cannot be undone, an undo of it is dead: see `resilient workflows show"
        f" {d.get('workflow')}`, then retry or discard that job"
    )


def _circuit_open(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    return f"its circuit is open{_since(d, now)}{_until(d, now)}, its jobs wait{_error(d)}"


def _long_throttle(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    code = f" ({d['code']})" if d.get("code") else ""
    return f"the provider asked to wait{_until(d, now)}{code}; if that cannot be meant, reset the resource"


def _needs_reauth(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    if d.get("auth") == "needs_reauth":
        return f"the account must be connected again{_since(d, now)}; until then its jobs wait"
    if (what := _SHUT.get(str(d.get("auth")))) is not None:
        return f"{what}{_since(d, now)}"
    return f"its credentials are {d.get('auth')}{_since(d, now)}; its jobs wait"


def _failure_rate(d: Mapping[str, Any], _count: int, _now: datetime) -> str:
    failed, of = d.get("failed", 0), d.get("executions", 1)
    return f"{failed / of:.0%} of its last {counted(of, 'execution')} failed"


def _backlog(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    since = datetime.fromisoformat(d["since"])
    waits = span((now - since).total_seconds())
    return (
        f"job {d.get('job')} on {d.get('resource')} is ready for {waits} and nothing stops it: workers are missing,"
        " too slow, or do not know its kind"
    )


def _stuck_handler(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    jobs = d.get("jobs", 1)
    number = "a handler of it does not end" if jobs == 1 else f"{jobs:,} handlers of it do not end"
    return (
        f"{number} after its time (job {d.get('job')} on {d.get('resource')}{_since(d, now)}): until then the job stays"
        " running and counts against caps; if it hangs for good, restart that worker"
    )


def _database_unreachable(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    return (
        f"the engine's database does not answer worker {d.get('worker')}{_since(d, now)}: no job begins, and results"
        f" are kept until it does{_error(d)}"
    )


def _no_success(d: Mapping[str, Any], _count: int, now: datetime) -> str:
    since = when(datetime.fromisoformat(d["since"]), now)
    accounts = d.get("accounts", 0)
    if d.get("stream"):
        worst = "the last one of" if d.get("ever") else "none ever of"
        when_ = f" ended at {since}" if d.get("ever") else f", begun at {since}"
        return (
            f"no pass of this stream ended in time for {counted(accounts, 'account')}, {d.get('periods', 1)} times as"
            f" long as expected; {worst} {d.get('resource')}{when_}"
        )
    if accounts:
        worst = (
            f"{d.get('resource')}'s last job succeeded at" if d.get("ever") else f"{d.get('resource')} had none since"
        )
        ticks = counted(d.get("periods", 1), "tick")
        return f"{counted(accounts, 'account')} had no success for {ticks} in a row; {worst} {since}"
    last = f"its last job succeeded at {since}" if d.get("ever") else f"no job of it succeeded since {since}"
    return f"{last}; {counted(d.get('periods', 1), 'tick')} in a row brought no success"


_WORDS: Final[Mapping[str, Callable[[Mapping[str, Any], int, datetime], str]]] = {
    "new_error": _new_error,
    "dead": _dead,
    "invariant": _invariant,
    "stuck_workflow": _stuck_workflow,
    "circuit_open": _circuit_open,
    "long_throttle": _long_throttle,
    "needs_reauth": _needs_reauth,
    "failure_rate": _failure_rate,
    "backlog": _backlog,
    "no_success": _no_success,
    "stuck_handler": _stuck_handler,
    "database_unreachable": _database_unreachable,
}
_SHUT: Final[Mapping[str, str]] = {
    NOT_CONNECTED: "it was never connected (`resilient connect`), and its jobs wait for that,",
    UNREADABLE: (
        "its secrets are encrypted with a key that is missing (RESILIENT_SECRETS), or its connection was changed in the"
        " database (the log says which), and its jobs wait,"
    ),
    APP_REFUSED: "it refuses the application: check client_id and client_secret; no account is marked, all wait,",
    SUSPECT_AUTH: (
        "it calls too many accounts dead at once: none is marked, all wait until a probe decides, or somebody does"
        " (`resilient connections release` or `confirm`),"
    ),
}
_OVER: Final[Mapping[str, str]] = {
    "new_error": "fails no more",
    "dead": "no more dead jobs",
    "invariant": "nothing more had to be repaired",
    "stuck_workflow": "no more stuck workflows",
    "circuit_open": "its circuit is closed",
    "long_throttle": "its wait is over",
    "needs_reauth": "its credentials are good",
    "failure_rate": "most executions succeed",
    "backlog": "no job waits too long",
    "no_success": "succeeded, or is no longer expected to",
    "stuck_handler": "its handlers end",
    "database_unreachable": "the engine's database answers",
}


def _what(d: Mapping[str, Any]) -> str:
    return f"{d.get('error_kind')} {d['error_code']}" if d.get("error_code") else str(d.get("error_kind"))


def _error(d: Mapping[str, Any]) -> str:
    """Without the exception's type, which is the code of a bug."""
    message = (d.get("error") or "").removeprefix(f"{d.get('error_code')}: ")
    return f": {message}" if message else ""


def _since(d: Mapping[str, Any], now: datetime) -> str:
    return f" since {moment(datetime.fromisoformat(d['since']), now)}" if d.get("since") else ""


def _until(d: Mapping[str, Any], now: datetime) -> str:
    return f" until {when(datetime.fromisoformat(d['until']), now)}" if d.get("until") else ""


# -- groups -----------------------------------------------------------------------------------------------------------
#
# Which alerts are told, and which are told of by another: a thousand accounts failing for one cause are one alert.
#
# Alerts of one sort, provider and code have one *cause*. The first few of a cause are told one by one; when there are
# more, one notice stands for all, and another one each time they have become ten times as many. What goes on is told by
# one notice a cause, and so is its end, when the last of them is over.

ALONE: Final = 5  # alerts of one cause, beyond which one stands for all
NAMED: Final = 20  # others that a notice names
_TENFOLD: Final = 10


class Size(NamedTuple):
    """How many alerts a cause has: open ones, those of them that were announced lately, and lately closed ones."""

    open: int = 0
    announced: int = 0
    closed: int = 0


def begun(due: Iterable[tuple[AlertInfo, bool]], sizes: Mapping[str, Size], now: datetime) -> list[Notice]:
    """What is told of alerts that are due, each with whether it is news; ``sizes`` by cause, before they are told."""
    notices: list[Notice] = []
    for (cause, new), members in _by_cause(due).items():
        size, state = sizes.get(cause, Size()), "new" if new else "again"
        each = [notice(state, one, now) for one in members]  # type: ignore[arg-type]
        before = size.announced
        after = before + len(members) if new else max(size.open, len(members))
        if after <= ALONE:
            notices += each
        elif not new or _crosses(before, after):
            notices.append(_for_all(each, after))
    return notices


def ended(over: Iterable[AlertInfo], sizes: Mapping[str, Size], now: datetime) -> list[Notice]:
    """What is told of alerts that are over; ``sizes`` by cause, after they were closed."""
    notices: list[Notice] = []
    for (cause, _), members in _by_cause((one, False) for one in over).items():
        size = sizes.get(cause, Size(closed=len(members)))
        each = [notice("resolved", one, now) for one in members]
        if size.open + size.closed <= ALONE:
            notices += each
        elif not size.open:
            notices.append(_for_all(each, max(size.closed, len(members))))
    return notices


def _by_cause(due: Iterable[tuple[AlertInfo, bool]]) -> Mapping[tuple[str, bool], Sequence[AlertInfo]]:
    groups: dict[tuple[str, bool], list[AlertInfo]] = defaultdict(list)
    for one, new in sorted(due, key=lambda d: (d[0].first_at, d[0].subject)):
        groups[one.cause or one.fingerprint, new].append(one)
    return groups


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


# -- for a chat --------------------------------------------------------------------------------------------------------

_SLACK: Final = frozenset({"hooks.slack.com", "hooks.slack-gov.com"})
_ENTITIES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # Slack's three, and no others
_MARKUP: Final = re.compile(r"[@<]|\](?=[(\[])")  # mentions, tags and special links, links with a text of their own
_NOTHING: Final = "\u200b"  # a space without width: people read the same text, chats see no markup in it


def for_chat(text: str, host: str) -> str:
    """A notice's text for the chat at ``host``: what providers and customers wrote mentions nobody and hides no link.

    Resource keys and errors may hold a chat's markup, such as ``<!channel>``, ``@all`` or ``[pay here](https://...)``.
    """
    if host in _SLACK:
        return text.translate(_ENTITIES)
    return _MARKUP.sub(rf"\g<0>{_NOTHING}", text)
