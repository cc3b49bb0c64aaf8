"""What people are told: the kinds of alerts, and the rules that find them.

A `Finding` says that something is wrong now; findings with one fingerprint are one alert. Two sorts:

- *events* happen (a failure of a new sort, a dead job). They are counted; an alert that was quiet for
  `Alerting.quiet` is closed without a word, and the next one is news again.
- *conditions* last (an open circuit, a silent schedule). They are looked at again and again; one that was not
  found for `Alerting.settle` is over, and that is told too. The delay keeps a flapping circuit from telling
  its story every minute.

An alert is told at once, then at most every `Alerting.repeat` while it goes on. Everything here is a pure
function of what was seen; rows are in `store/alerts.py`, people in `engine/alerts.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from resilient.core import cron
from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_class
from resilient.core.phrases import brief
from resilient.core.records import fields_of
from resilient.core.retention import Span, span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from resilient.core.cron import Ticks

EVENTS: Final = frozenset({"new_error", "dead", "invariant", "stuck_workflow"})
CONDITIONS: Final = frozenset(
    {"circuit_open", "long_throttle", "needs_reauth", "failure_rate", "backlog", "no_success", "stuck_handler"}
)
UNREACHABLE: Final = "database_unreachable"  # it lasts too, and is in no table
NAMES: Final = EVENTS | CONDITIONS | {UNREACHABLE}
_CODES: Final = ("error_code", "code", "auth")
_LONGEST_ERROR: Final = 300
_LONGEST_CODE: Final = 64
_LOOKS_LIKE_AN_ID: Final = re.compile(r"[0-9a-f-]{0,40}[0-9][0-9a-f-]{7,40}", re.IGNORECASE)
# Ends that mean no error, or one that its resource's gate tells of. What expires unseen by a worker is found
# by `swept`, and so are those that a worker saw.
_NO_ERROR: Final = frozenset({"defer", "snooze", "slice", "handed_back", "cancelled", "reset_cursor", "expired"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is wrong now. ``parts`` tell alerts of one name and subject apart."""

    name: str
    subject: str
    detail: Mapping[str, Any]
    parts: tuple[str, ...] = ()
    count: int = 1

    @property
    def fingerprint(self) -> str:
        """What makes two findings the same alert."""
        text = "\x1f".join((self.name, self.subject, *self.parts))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def cause(self) -> str:
        """What it has in common with others that are told together: the sort, the provider (or kind), the code.

        What concerns a whole provider stands for itself.
        """
        root, below, _ = self.subject.partition("/")
        code = ""
        if self.name in CONDITIONS:
            code = code_of(next((str(self.detail[k]) for k in _CODES if self.detail.get(k)), ""))
        return " ".join((self.name, root + ("/*" if below else ""), code)).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertInfo:
    """One alert as it stood when it was read. Times are aware and in UTC.

    ``count`` is how often it happened since ``first_at`` (a condition counts once). ``told_at`` is None until
    people were told, ``resolved_at`` while it goes on. Alerts of one ``cause`` are told together.
    """

    fingerprint: str
    name: str
    subject: str
    detail: Mapping[str, Any]
    count: int
    first_at: datetime
    last_at: datetime
    told_at: datetime | None = None
    resolved_at: datetime | None = None
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True)
class Notice:
    """What a sink is given: one alert, in words, and the subjects of others like it.

    ``state``: it is new, goes on ("again"), or is over ("resolved"). ``others`` are told by this one notice.
    """

    state: Literal["new", "again", "resolved"]
    alert: AlertInfo
    text: str
    others: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object; ``text`` is what chat webhooks show."""
        return {
            "text": self.text,
            "state": self.state,
            "alert": self.alert.to_json(),
            "others": list(self.others),
        }


Sink: TypeAlias = "str | Callable[[Notice], Awaitable[object] | object]"


@explained_class
@dataclass(frozen=True, slots=True)
class Alerting:
    """Whom to tell, and when.

    ``sinks`` are functions of a `Notice`, plain or ``async def``, and URLs that get it as JSON; the log always
    does. Spans are seconds, timedeltas or text such as ``"1h"``; None switches a rule off, ``off`` any alert by
    its name.

    - ``failure_rate`` of the executions of a kind or an account failed, of at least ``failure_volume`` within
      ``window``
    - ``backlog``: a job that nothing stops waits for longer than that
    - ``throttled``: a provider asked to wait for longer than that
    - ``periods``: so many ticks of a schedule had their whole period, and none of their jobs succeeded

    Raises `InvalidInput`.
    """

    sinks: Sequence[Sink] = ()
    repeat: Span = "1h"
    settle: Span = "5m"
    quiet: Span = "1d"
    failure_rate: float | None = 0.5
    failure_volume: int = 20
    window: Span = "10m"
    backlog: Span | None = "15m"
    throttled: Span | None = "24h"
    periods: int | None = 3
    off: Collection[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for name in _SPANS:
            value = span(name, getattr(self, name))
            if value is None and name in ("repeat", "settle", "quiet", "window"):
                raise InvalidInput(f"Alerting({name}=None): give a span of time, such as '1h'")
            object.__setattr__(self, name, value)
        if self.failure_rate is not None and not 0 < self.failure_rate <= 1:
            raise InvalidInput(f"Alerting(failure_rate={self.failure_rate!r}): give a share above 0, at most 1")
        if self.failure_volume < 1 or (self.periods is not None and self.periods < 1):
            raise InvalidInput("Alerting: failure_volume and periods are at least 1")
        if unknown := sorted(set(self.off) - NAMES):
            raise InvalidInput(f"there is no alert {unknown[0]!r} to switch off: {', '.join(sorted(NAMES))} are there")
        for sink in self.sinks:
            if not callable(sink) and not (isinstance(sink, str) and sink.startswith(("https://", "http://"))):
                raise InvalidInput("a sink of alerts is a function of one notice, or a URL beginning with https://")

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "sinks"]
        return f"Alerting({len(self.sinks)} sinks, {', '.join(shown)})"  # URLs of webhooks are secrets

    def span(self, name: str) -> timedelta:
        """One of the spans."""
        found = getattr(self, name)
        assert isinstance(found, timedelta)  # noqa: S101 - __post_init__ made it one
        return found

    def wants(self, name: str) -> bool:
        """Whether this alert is not switched off."""
        return name not in self.off


_SPANS: Final = ("repeat", "settle", "quiet", "window", "backlog", "throttled")


# -- what ended --------------------------------------------------------------------------------------------------------


def alarming(decision: str, error_kind: str | None) -> str | None:
    """The alert that an execution's end belongs to, or None; cheap, because it is asked for each one."""
    if error_kind is None or decision in _NO_ERROR:
        return None
    return "dead" if decision == "dead" else "new_error"


def ended(
    name: str, kind: str, error_kind: str, error_code: str | None, *, error: str | None, resource: str, job: str
) -> Finding:
    """An execution of ``kind`` that failed; failures of one kind and code are one alert."""
    detail = {
        "error_kind": error_kind,
        "error_code": error_code,
        "error": brief(error, _LONGEST_ERROR),
        "resource": resource,
        "job": job,
    }
    return Finding(name, kind, detail, (error_kind, code_of(error_code)))


def code_of(code: str | None) -> str:
    """An error code without what looks like an id in it: every id would be an alert of its own."""
    return _LOOKS_LIKE_AN_ID.sub("#", (code or "")[:_LONGEST_CODE])


def swept(kind: str, error_kind: str, count: int, job: str) -> Finding:
    """Jobs that died without an execution: expired, or rescued too often."""
    return Finding("dead", kind, {"error_kind": error_kind, "job": job}, (error_kind, ""), count)


def repaired(count: int, what: str = "turns") -> Finding:
    """``turns``: of ready jobs, lost; ``lanes`` and ``workflows`` standing still; ``jobs``: waiting for nothing."""
    return Finding("invariant", what, {what: count})


def stuck(name: str, workflow: str) -> Finding:
    """A workflow cannot be undone: the job that would undo a step is dead."""
    return Finding("stuck_workflow", name, {"workflow": workflow})


# -- what lasts --------------------------------------------------------------------------------------------------------


def of_resource(row: Mapping[str, Any], now: datetime, throttled: timedelta | None) -> list[Finding]:
    """What is wrong with one resource row."""
    found, key = [], row["key"]
    error = {"error": brief(row["last_error"], _LONGEST_ERROR), "error_code": row["last_error_code"]}
    if row["breaker"] in ("open", "half_open"):
        since = {"since": _text(row["opened_at"]), "until": _text(row["open_until"])}
        found.append(Finding("circuit_open", key, {**since, **error}))
    if row["auth"] != "ok":
        found.append(of_credentials(key, row["auth"], row["auth_since"]))
    until = row["blocked_until"]
    if throttled is not None and until is not None and until > now + throttled:
        detail = {"since": _text(row["blocked_since"]), "until": _text(until), "code": row["blocked_code"]}
        found.append(Finding("long_throttle", key, detail))
    return found


def of_credentials(key: str, auth: str, since: datetime | None) -> Finding:
    """An account, or a whole provider, without good credentials."""
    return Finding("needs_reauth", key, {"auth": auth, "since": _text(since)})


def of_stuck_handlers(kind: str, jobs: int, job: str, resource: str, since: datetime) -> Finding:
    """Handlers of a kind that should have ended and do not; ``job`` is one of theirs."""
    return Finding("stuck_handler", kind, {"jobs": jobs, "job": job, "resource": resource, "since": _text(since)})


def of_database(address: str, since: datetime, worker: str, error: str | None) -> Finding:
    """The engine's own database does not answer a worker; ``address`` without its password."""
    said = (error or "").removeprefix(f"the database {address} ").removeprefix("does not answer: ")
    detail = {"since": _text(since), "worker": worker, "error": brief(said, _LONGEST_ERROR)}
    return Finding(UNREACHABLE, address, detail)


def of_backlog(waiting: Sequence[tuple[str, str, datetime]], now: datetime, longest: timedelta) -> list[Finding]:
    """Jobs that nothing stops and nobody runs: (resource key, job, ready since), told once for each provider."""
    worst: dict[str, tuple[str, str, datetime]] = {}
    for one in waiting:
        root = one[0].partition("/")[0]
        if now - one[2] > longest and (root not in worst or one[2] < worst[root][2]):
            worst[root] = one
    return [
        Finding("backlog", root, {"resource": key, "job": job, "since": _text(since)})
        for root, (key, job, since) in sorted(worst.items())
    ]


def of_executions(
    ok: Collection[tuple[str, str]], failed: Collection[tuple[str, str]], rate: float, volume: int
) -> list[Finding]:
    """Kinds and accounts that mostly fail; each execution is (kind, resource key)."""
    counts: dict[tuple[str, str], list[int]] = {}
    for index, executions in enumerate((ok, failed)):
        for kind, key in executions:
            for subject in (("kind", kind), ("resource", "/".join(key.split("/")[:2]))):
                counts.setdefault(subject, [0, 0])[index] += 1
    return [
        Finding("failure_rate", subject, {"of": of, "failed": bad, "executions": good + bad}, (of,))
        for (of, subject), (good, bad) in sorted(counts.items())
        if good + bad >= volume and bad >= rate * (good + bad)
    ]


def of_schedule(
    name: str, ticks: Ticks, since: datetime, succeeded_at: datetime | None, now: datetime, periods: int
) -> Finding | None:
    """A schedule of which ``periods`` ticks had their whole period, and none of their jobs succeeded.

    ``since``: from when on it ticks.
    """
    base = tick = max(since, succeeded_at or since)
    for _ in range(periods + 1):
        tick = cron.next_after(ticks, tick)
        if tick > now:
            return None
    return Finding("no_success", name, {"since": _text(base), "ever": succeeded_at is not None, "periods": periods})


def of_accounts(name: str, accounts: int, example: str, since: datetime, *, ever: bool, periods: int) -> Finding:
    """Accounts of a schedule for many, without a success for ``periods`` of their ticks: one alert for all."""
    detail = {"since": _text(since), "ever": ever, "periods": periods, "accounts": accounts, "resource": example}
    return Finding("no_success", name, detail)


def of_stream(name: str, accounts: int, example: str, since: datetime, *, ever: bool, periods: int) -> Finding:
    """Accounts of a sync stream of which no pass ended for long: one alert for all."""
    detail = {"since": _text(since), "ever": ever, "periods": periods, "accounts": accounts, "resource": example}
    return Finding("no_success", name, {**detail, "stream": True}, ("stream",))


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
