"""What people are told: the kinds of alerts, and the rules that find them.

A `Finding` says that something is wrong now; findings with one fingerprint are one alert. Two sorts:

- *events* happen (a failure of a new sort, a dead job). They are counted; an alert without a new event for
  `Alerting.quiet` is closed without a notice, and the next event begins a new alert.
- *conditions* last (an open breaker, a silent schedule). The rules look for them again and again; one that no rule
  found for `Alerting.settle` is over, and a notice says so. Without that delay a flapping breaker would send notices
  every minute.

A notice is sent when an alert begins, then at most every `Alerting.repeat` while it goes on. Everything here is a pure
function of its arguments; `store/alerts.py` has the rows, `engine/alerts.py` sends the notices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import check_texts, explained_class, is_number, is_whole
from resilient.core.base.phrases import brief
from resilient.core.base.resource_key import is_below
from resilient.core.inspect.retention import Span, span
from resilient.core.jobs.records import fields_of
from resilient.core.schedules import cron

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from resilient.core.schedules.cron import Ticks

EVENTS: Final = frozenset({"new_error", "dead", "invariant", "stuck_workflow"})
CONDITIONS: Final = frozenset(
    {"circuit_open", "long_throttle", "needs_reauth", "failure_rate", "backlog", "no_success", "stuck_handler"}
)
UNREACHABLE: Final = "database_unreachable"  # a condition that no table can hold
NAMES: Final = EVENTS | CONDITIONS | {UNREACHABLE}
_CODES: Final = ("error_code", "code", "auth")
_LONGEST_ERROR: Final = 300
_LONGEST_CODE: Final = 64
_MOST_PERIODS: Final = 10_000  # of a schedule's ticks, which the rule walks
_LOOKS_LIKE_AN_ID: Final = re.compile(r"[0-9a-f-]{0,40}[0-9][0-9a-f-]{7,40}", re.IGNORECASE)
# Ends that mean no error, or an error that the alert of its resource's gate reports. Expired jobs, whether a worker met
# them or not, are counted by `swept`.
_NO_ERROR: Final = frozenset({"defer", "snooze", "slice", "handed_back", "cancelled", "reset_cursor", "expired"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is wrong now. ``parts`` tell alerts of one name and subject apart.

    ``apart``: an account whose alerts and notices are its own, not shared with other accounts; "" for none.
    """

    name: str
    subject: str
    detail: Mapping[str, Any]
    parts: tuple[str, ...] = ()
    count: int = 1
    apart: str = ""

    @property
    def fingerprint(self) -> str:
        """The same for all findings of one alert."""
        text = "\x1f".join((self.name, self.subject, *self.parts, *filter(None, (self.apart,))))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def without(self, keys: Collection[str]) -> Finding | None:
        """The finding with nothing in it of these erased accounts; None if it is about them alone."""
        is_gone, is_example = (
            any(is_below(str(name), key) for key in keys) for name in (self.subject, self.detail.get("resource", ""))
        )
        if is_gone or (is_example and self.count == 1):
            return None
        erased = {"resource": "an erased account", "job": "erased", "error": None}
        return replace(self, detail={**self.detail, **erased}) if is_example else self

    @property
    def cause(self) -> str:
        """The same for all findings that share a notice: its name, its provider (or kind) and its code.

        A finding about a whole provider shares none with those about the provider's accounts.
        """
        root, below, _ = self.subject.partition("/")
        code = ""
        if self.name in CONDITIONS:
            code = code_of(next((str(self.detail[k]) for k in _CODES if self.detail.get(k)), ""))
        return " ".join(filter(None, (self.name, root + ("/*" if below else ""), code, self.apart)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertInfo:
    """One alert as it stood when it was read. Times are aware and in UTC.

    ``count`` is how often it happened since ``first_at`` (a condition counts once). ``told_at`` is None until a notice
    was sent, ``resolved_at`` while the alert goes on. Alerts of one ``cause`` share a notice.
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
    """The message that a sink gets: one alert, in words, and the subjects of others like it.

    ``state``: the alert is new, goes on ("again"), or is over ("resolved"). This notice stands for ``others``, too.
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
    """Where notices of alerts go, and when.

    ``sinks`` are functions of a `Notice`, plain or ``async def``, and URLs that get it as JSON; the log gets each one.
    Spans are seconds, timedeltas or text such as ``"1h"``; None switches a rule off, ``off`` any alert by
    its name.

    - ``failure_rate`` of the executions of a kind or an account failed, of at least ``failure_volume`` within
      ``window``
    - ``backlog``: a job that nothing stops waits for longer than that
    - ``throttled``: a provider asked to wait for longer than that
    - ``periods``: the whole periods of so many ticks of a schedule have passed, and none of their jobs succeeded

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
        if self.failure_rate is not None and not (is_number(self.failure_rate) and 0 < self.failure_rate <= 1):
            raise InvalidInput(f"Alerting(failure_rate={self.failure_rate!r}): give a share above 0, at most 1")
        if not is_whole(self.failure_volume) or not (self.periods is None or is_whole(self.periods)):
            raise InvalidInput("Alerting: failure_volume and periods are whole numbers from 1")
        if self.periods is not None and self.periods > _MOST_PERIODS:
            raise InvalidInput(f"Alerting(periods={self.periods}): give at most {_MOST_PERIODS:,}, or None for no rule")
        check_texts("Alerting", self, "off")
        if unknown := sorted(set(self.off) - NAMES):
            raise InvalidInput(f"there is no alert {unknown[0]!r} to switch off: {', '.join(sorted(NAMES))} are there")
        _check_sinks(self.sinks)

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "sinks"]
        return f"Alerting({len(self.sinks)} sinks, {', '.join(shown)})"  # URLs of webhooks are secrets

    def span(self, name: str) -> timedelta:
        """The span of this name."""
        value = getattr(self, name)
        assert isinstance(value, timedelta)  # noqa: S101 - for the type checker: __post_init__ converts it
        return value

    def wants(self, name: str) -> bool:
        """Whether this alert is not switched off."""
        return name not in self.off


def _check_sinks(sinks: Sequence[Sink]) -> None:
    if isinstance(sinks, str):
        raise InvalidInput("Alerting(sinks=...) lists functions and URLs: write [it], also for a single one")
    for sink in sinks:
        if not callable(sink) and not _is_address(sink):
            raise InvalidInput("a sink of alerts is a function of one notice, or a URL beginning with https://")
        if isinstance(sink, str) and _is_bare_discord(sink):
            raise InvalidInput(
                "a sink of alerts is a webhook of Discord, which takes notices in Slack's form only: write /slack"
                " behind its URL (https://discord.com/api/webhooks/…/…/slack)"
            )


def _is_address(sink: object) -> bool:
    """Whether it is a URL that says where to."""
    try:
        parts = urlsplit(sink if isinstance(sink, str) else "")
        return parts.scheme in ("https", "http") and bool(parts.hostname)
    except ValueError:  # what only looks like an IPv6 address
        return False


def _is_bare_discord(url: str) -> bool:
    """Whether a URL is a webhook of Discord that refuses a document in Slack's form."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removeprefix("canary.").removeprefix("ptb.")
    is_theirs = host in ("discord.com", "discordapp.com") and "/webhooks/" in parts.path
    return is_theirs and not parts.path.rstrip("/").endswith("/slack")


_SPANS: Final = ("repeat", "settle", "quiet", "window", "backlog", "throttled")


# -- what ended --------------------------------------------------------------------------------------------------------


def alarming(decision: str, error_kind: str | None) -> str | None:
    """The alert that an execution's end belongs to, or None; cheap, because every execution calls it."""
    if error_kind is None or decision in _NO_ERROR:
        return None
    return "dead" if decision == "dead" else "new_error"


def ended(
    name: str,
    kind: str,
    error_kind: str,
    error_code: str | None,
    *,
    error: str | None,
    resource: str,
    job: str,
    apart: str = "",
) -> Finding:
    """An execution of ``kind`` that failed; failures of one kind and code are one alert.

    ``apart``: the account, if it has too many codes for all to share them.
    """
    detail = {
        "error_kind": error_kind,
        "error_code": error_code,
        "error": brief(error, _LONGEST_ERROR),
        "resource": resource,
        "job": job,
    }
    return Finding(name, kind, detail, (error_kind, code_of(error_code)), apart=apart)


def code_of(code: str | None) -> str:
    """An error code with ``#`` for what looks like an id: else every id would be an alert of its own."""
    return _LOOKS_LIKE_AN_ID.sub("#", (code or "")[:_LONGEST_CODE])


def swept(kind: str, error_kind: str, count: int, job: str) -> Finding:
    """Jobs that ended as dead without an execution: they expired, or were rescued too often."""
    return Finding("dead", kind, {"error_kind": error_kind, "job": job}, (error_kind, ""), count)


def repaired(count: int, what: str = "turns") -> Finding:
    """Housekeeping repaired what should never break.

    ``what``: lost ``turns`` of ready jobs, ``lanes`` (ordering keys) or ``workflows`` that stood still, ``jobs`` that
    waited for nothing.
    """
    return Finding("invariant", what, {what: count})


def stuck(name: str, workflow: str) -> Finding:
    """A workflow cannot be undone: the job that would undo a step is dead."""
    return Finding("stuck_workflow", name, {"workflow": workflow})


# -- what lasts --------------------------------------------------------------------------------------------------------


def of_resource(row: Mapping[str, Any], now: datetime, throttled: timedelta | None) -> list[Finding]:
    """What is wrong with one resource row."""
    findings, key = [], row["key"]
    error = {"error": brief(row["last_error"], _LONGEST_ERROR), "error_code": row["last_error_code"]}
    if row["breaker"] in ("open", "half_open"):
        since = {"since": _text(row["opened_at"]), "until": _text(row["open_until"])}
        findings.append(Finding("circuit_open", key, {**since, **error}))
    if row["auth"] != "ok":
        findings.append(of_credentials(key, row["auth"], row["auth_since"]))
    until = row["blocked_until"]
    if throttled is not None and until is not None and until > now + throttled:
        detail = {"since": _text(row["blocked_since"]), "until": _text(until), "code": row["blocked_code"]}
        findings.append(Finding("long_throttle", key, detail))
    return findings


def of_credentials(key: str, auth: str, since: datetime | None) -> Finding:
    """An account, or a whole provider, without good credentials."""
    return Finding("needs_reauth", key, {"auth": auth, "since": _text(since)})


def of_stuck_handlers(kind: str, jobs: int, job: str, resource: str, since: datetime) -> Finding:
    """Handlers of a kind that should have ended and go on; ``job`` is one of their jobs."""
    return Finding("stuck_handler", kind, {"jobs": jobs, "job": job, "resource": resource, "since": _text(since)})


def of_database(address: str, since: datetime, worker: str, error: str | None) -> Finding:
    """The engine's own database does not answer a worker; ``address`` without its password."""
    message = (error or "").removeprefix(f"the database {address} ").removeprefix("does not answer: ")
    detail = {"since": _text(since), "worker": worker, "error": brief(message, _LONGEST_ERROR)}
    return Finding(UNREACHABLE, address, detail)


def of_backlog(waiting: Sequence[tuple[str, str, datetime]], now: datetime, longest: timedelta) -> list[Finding]:
    """The longest wait of each provider: ``waiting`` are jobs that nothing stops: (resource key, job, ready since)."""
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
    """A schedule without a success although the whole periods of ``periods`` ticks have passed.

    ``since``: when it began to tick.
    """
    base = tick = max(since, succeeded_at or since)
    for _ in range(periods + 1):
        tick = cron.next_after(ticks, tick)
        if tick > now:
            return None
    return Finding("no_success", name, {"since": _text(base), "ever": succeeded_at is not None, "periods": periods})


def of_accounts(name: str, accounts: int, example: str, since: datetime, *, ever: bool, periods: int) -> Finding:
    """Accounts of a schedule without a success for ``periods`` of their ticks: one alert for all of them."""
    detail = {"since": _text(since), "ever": ever, "periods": periods, "accounts": accounts, "resource": example}
    return Finding("no_success", name, detail)


def of_stream(name: str, accounts: int, example: str, since: datetime, *, ever: bool, periods: int) -> Finding:
    """Accounts of a sync stream whose last pass ended long ago, or none ever: one alert for all of them."""
    detail = {"since": _text(since), "ever": ever, "periods": periods, "accounts": accounts, "resource": example}
    return Finding("no_success", name, {**detail, "stream": True}, ("stream",))


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
