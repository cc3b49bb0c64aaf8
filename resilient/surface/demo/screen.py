"""What the demo shows: how things stand, live on a terminal or in plain lines (``--plain``), and the report at the end.

`look` reads the tables directly, so that the screen and the audit do not depend on the code they watch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import sqlalchemy as sa
from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resilient.core.accounts.tokens import REFRESHING
from resilient.core.base.phrases import counted
from resilient.store.db import tables
from resilient.surface.demo import accounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

    from rich.console import Console, RenderableType
    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect
    from resilient.surface.demo.audit import Audit


_JOB: Final[sa.Table] = tables.metadata.tables["resilient_job"]
_RESOURCE: Final[sa.Table] = tables.metadata.tables["resilient_resource"]
_ATTEMPT: Final[sa.Table] = tables.metadata.tables["resilient_attempt"]
_WAITS: Final = ("throttled", "quota")
_GATE: Final = (
    "key", "breaker", "open_until", "blocked_until", "blocked_code", "last_error_code", "auth", "learnt", "generation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at the end: ``charged_waits`` counts attempts it was charged for being throttled."""

    contact: str
    state: str
    error: str | None
    rescues: int
    charged_waits: int = 0


@dataclass(frozen=True, slots=True)
class ResourceView:
    """One resource's gate."""

    key: str
    breaker: str = "closed"
    open_until: datetime | None = None
    blocked_until: datetime | None = None
    blocked_code: str | None = None
    last_error_code: str | None = None
    auth: str = "ok"
    learnt: Mapping[str, Any] | None = None  # what its refusals taught, as its row has it
    generation: int = 0  # how often its circuit changed

    @property
    def rate(self) -> float | None:
        """Requests a second, if its refusals taught a rate."""
        return None if self.learnt is None or self.learnt.get("kind") != "rate" else float(self.learnt["rate"])

    @property
    def throttles(self) -> int:
        """How many refusals have taught its limit."""
        return 0 if self.learnt is None else int(self.learnt.get("throttles", 0))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the screen shows, at one moment."""

    now: datetime
    resources: Mapping[str, ResourceView]
    states: Mapping[str, Counter[str]]  # resource key -> state -> jobs
    running: Mapping[str, int]  # worker id -> jobs
    rescues: int

    def total(self, *states: str) -> int:
        """Jobs in any of these states."""
        return sum(count[state] for count in self.states.values() for state in states)

    @property
    def jobs(self) -> int:
        """All jobs."""
        return sum(count.total() for count in self.states.values())

    @property
    def finished(self) -> int:
        """Jobs that no longer change by themselves."""
        return self.total("succeeded", "dead", "cancelled")


def look(c: Connection, d: Dialect) -> Snapshot:
    """Read a `Snapshot`."""
    states: dict[str, Counter[str]] = {}
    rescues = 0
    grouped = sa.select(_JOB.c.resource_key, _JOB.c.state, sa.func.count(), sa.func.sum(_JOB.c.rescues))
    by_state: Sequence[Any] = d.execute(c, grouped.group_by(_JOB.c.resource_key, _JOB.c.state)).all()
    for key, state, count, rescued in by_state:
        states.setdefault(key, Counter())[state] = count
        rescues += rescued
    holders = sa.select(_JOB.c.locked_by, sa.func.count()).where(_JOB.c.state == "running")
    by_worker: Sequence[Any] = d.execute(c, holders.group_by(_JOB.c.locked_by)).all()
    rows = d.execute(c, sa.select(*(_RESOURCE.c[name] for name in _GATE))).mappings()
    resources = {row["key"]: ResourceView(**row) for row in rows}
    return Snapshot(d.now(c), resources, states, {w: n for w, n in by_worker if w}, rescues)


def all_jobs(c: Connection, d: Dialect) -> list[JobView]:
    """Every job that pushes a contact, for the audit."""
    charged: Counter[Any] = Counter(
        d.execute(c, sa.select(_ATTEMPT.c.job_id).where(_ATTEMPT.c.charged, _ATTEMPT.c.kind.in_(_WAITS))).scalars()
    )
    columns = (_JOB.c.id, _JOB.c.payload, _JOB.c.state, _JOB.c.last_error, _JOB.c.rescues)
    rows: Sequence[Any] = d.execute(c, sa.select(*columns).where(_JOB.c.kind == "contact.push")).all()
    return [
        JobView(str(payload["id"]), state, error if state == "dead" else None, rescues, charged[id_])
        for id_, payload, state, error, rescues in rows
    ]


# -- events -----------------------------------------------------------------------------------------------------------
#
# What changed between two snapshots, as lines for people.


def gate(resource: ResourceView | None, now: datetime) -> str:
    """One resource's gate in a few words."""
    if resource is None:
        return "flows"
    if resource.auth != "ok":
        return "must be connected again" if resource.auth == "needs_reauth" else f"stopped: {resource.auth}"
    if resource.breaker == "open":
        return f"open, tries again in {_left(resource.open_until, now)}"
    if resource.breaker != "closed":
        return "half open: one job tries" if resource.breaker == "half_open" else resource.breaker
    if resource.blocked_until is None or resource.blocked_until <= now:
        return "flows" if resource.rate is None else f"flows, learnt {resource.rate:.1f}/s"
    rest = _left(resource.blocked_until, now)
    return "waits for its token" if resource.blocked_code == REFRESHING else f"told to wait {rest}"


def happened(old: Snapshot, new: Snapshot) -> Iterator[str]:
    """Lines for what changed between two snapshots."""
    for key, after in sorted(new.resources.items()):
        before = old.resources.get(key, ResourceView(key))
        yield from _breaker(before, after, new.now)
        if after.auth == "needs_reauth" != before.auth:
            yield f"{key}: its access was taken back; its owner is told, its jobs wait"
        is_new = after.blocked_code != REFRESHING and after.blocked_until != before.blocked_until
        if is_new and after.blocked_until:
            code = f" ({after.blocked_code})" if after.blocked_code else ""
            is_over = after.blocked_until <= new.now  # between two looks
            waits = "waited" if is_over else f"waits {_left(after.blocked_until, new.now)}"
            yield f"{key} said: come back later{code}; every worker {waits}"
        if after.rate is not None and before.throttles != after.throttles:
            throttles = counted(after.throttles, "throttle")
            yield f"{key}: nobody declared its limit; learnt {after.rate:.1f}/s from {throttles}"
    if (rescued := new.rescues - old.rescues) > 0:
        yield f"jobs of a dead worker rescued, as their leases ran out: {rescued}"


def _breaker(before: ResourceView, after: ResourceView, now: datetime) -> Iterator[str]:
    is_same = before.breaker == after.breaker and before.open_until == after.open_until
    if is_same and before.generation == after.generation:
        return
    if before.breaker == "closed" and after.breaker != "open":
        yield f"{after.key}: circuit opened"  # and tried again between two looks
        before = replace(before, breaker="open")
    match after.breaker:
        case "open":
            code = f" ({after.last_error_code})" if after.last_error_code else ""
            again = "still not well" if before.breaker != "closed" else "circuit opened"
            yield f"{after.key}: {again}{code}; tries again in {_left(after.open_until, now)}"
        case "half_open" if before.breaker != "half_open":
            yield f"{after.key}: one job tries whether it is well again"
        case "closed" if before.breaker != "closed":
            yield f"{after.key} is well again: circuit closed"


def _left(until: datetime | None, now: datetime) -> str:
    return "?" if until is None else f"{max(0.0, (until - now).total_seconds()):.1f} s"


_EVENTS: Final = 12  # lines of events on the screen
_PLAIN_EVERY: Final = 3.0  # seconds between two lines of progress
_WAITING: Final = ("ready", "scheduled", "blocked")
_NUMBERS: Final = ("waiting", "running", "done", "dead")
_ROOM_FOR_STORIES: Final = 132  # columns of the terminal


class Screen(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the terminal as it was."""

    def say(self, line: str) -> None:
        """Something happened."""

    def show(self, snapshot: Snapshot) -> None:
        """How things stand."""


def screen(console: Console, *, plain: bool) -> Screen:
    """A live screen if ``console`` is a terminal and not ``plain``."""
    return PlainScreen(console) if plain or not console.is_terminal else LiveScreen(console)


class PlainScreen:
    """One line per event, a line of progress now and then; reads well in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing to restore."""

    def say(self, line: str) -> None:
        """Print it, with the seconds since the start."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"{elapsed:6.1f} s  {line}", soft_wrap=True, markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        """Print a line of progress if the last one is a while ago."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _PLAIN_EVERY
        waiting = {k: n for k in snapshot.states if (n := sum(snapshot.states[k][s] for s in _WAITING))}
        backlog = ", ".join(f"{key} {n}" for key, n in sorted(waiting.items()))
        self.say(f"{snapshot.finished} of {snapshot.jobs} done" + (f"; waiting: {backlog}" if backlog else ""))


class LiveScreen:
    """A table of accounts over the latest events."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._console = console
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._began = time.monotonic()
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> Self:
        """Take the terminal."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the terminal back, leaving the last state on it."""
        self._live.stop()
        if self._snapshot is not None:
            self._console.print(self._picture(self._snapshot))

    def say(self, line: str) -> None:
        """Add it to the events."""
        self._events.append(f"{time.monotonic() - self._began:5.1f} s  {line}")
        if self._snapshot is not None:
            self._live.update(self._picture(self._snapshot))

    def show(self, snapshot: Snapshot) -> None:
        """Draw the table again."""
        self._snapshot = snapshot
        self._live.update(self._picture(snapshot))

    def _picture(self, snapshot: Snapshot) -> RenderableType:
        done, jobs = snapshot.finished, max(1, snapshot.jobs)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=jobs, completed=done, width=40),
            f"{done} of {jobs} done, {snapshot.total('running')} running on {len(snapshot.running)} workers",
        )
        return Group(
            head,
            _table(snapshot, self._console.width),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in self._events),
        )


def _table(snapshot: Snapshot, width: int) -> Table:
    """Gate, backlog and progress of each account; the story, which never changes, only where there is room."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    names = ("account", "gate", "story") if width >= _ROOM_FOR_STORIES else ("account", "gate")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", min_width=len(name))
    for key in sorted(snapshot.states):
        count = snapshot.states[key]
        state = gate(snapshot.resources.get(key), snapshot.now)
        color = "green" if state.startswith("flows") else "yellow" if state.startswith(("told", "waits")) else "red"
        words = (key, Text(state, style=color), accounts.story(key))[: len(names)]
        numbers = (sum(count[s] for s in _WAITING), count["running"], count["succeeded"], count["dead"])
        table.add_row(*words, *map(str, numbers))
    return table


_DEAD_SHOWN: Final = 20


def report(console: Console, audit: Audit, seconds: float) -> None:
    """Print ``audit``."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False, style=style)

    line("")
    line("What the provider's own log says, beside the database")
    line("")
    for claim in audit.claims:
        line(
            f"  {'ok    ' if claim.holds else 'FALSE '} {claim.text}: {claim.result}",
            None if claim.holds else "bold red",
        )
    line("")
    for fact in audit.facts:
        line(f"  {fact}")
    if audit.dead:
        line("")
        line("  Dead, and why (in an application: resilient dead list)")
        for contact, reason in audit.dead[:_DEAD_SHOWN]:
            line(f"    {contact}  {reason}")
        if len(audit.dead) > _DEAD_SHOWN:
            line(f"    and {len(audit.dead) - _DEAD_SHOWN} more")
    line("")
    if audit.passed:
        line(f"Everything that was promised is true. {seconds:.1f} s.", "bold green")
    else:
        broken = sum(not claim.holds for claim in audit.claims)
        line(f"{broken} of {len(audit.claims)} claims are FALSE. {seconds:.1f} s.", "bold red")
