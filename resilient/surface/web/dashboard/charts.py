"""Charts as SVG, drawn here: no script draws, and nothing is written inline that the policy of the pages forbids.

Each has its text alternative in ``<title>`` and ``<desc>``, and stands beside a table with the same figures. Colours
are classes of the style sheet; what a colour says, the legend says in words. Drawings stretch to the width of the page,
so words stand outside of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from markupsafe import Markup, escape

from resilient.core.base.phrases import counted, rough, span
from resilient.store.inspect.throughput import Throughput, throughput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.store.db.database import Database
    from resilient.surface.web.dashboard.visit import Visit

SPAN: Final = timedelta(hours=48)
STEP: Final = 30  # minutes of one bar
_STEP: Final = timedelta(minutes=STEP)
_HIGH: Final = 100  # units of a drawing; the page gives it its height
_WIDE: Final = 10  # units of a bar, and of the gap that belongs to it
_GAP: Final = 2
FRESH: Final = 10.0
WAIT = 0.25  # seconds for which a page waits for sums that are being read; the next look at it has them
KINDS: Final = 10  # of which each has a line of its own
# What a chart tells apart, in the order in which bars are stacked, with the class of its colour and its word.
GROUPS: Final = (("well", "succeeded"), ("again", "to go on later"), ("dead", "dead"))
_GROUP_OF: Final = {
    "succeeded": 0, "once_more": 0, "slice": 0, "reconciled": 0, "dead": 2, "expired": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bars:
    """Counts by time: ``counts[n]`` has those of one span by group; ``first`` is when the first span begins."""

    first: datetime
    step: timedelta
    counts: list[list[int]]

    @property
    def totals(self) -> list[int]:
        """All spans together, by group."""
        return [sum(one[n] for one in self.counts) for n in range(len(GROUPS))]

    @property
    def most(self) -> int:
        """The largest span."""
        return max((sum(one) for one in self.counts), default=0)

    def table(self, spans: int) -> list[tuple[datetime, datetime, list[int]]]:
        """The same in so many times longer spans, the latest first: from, to, counts."""
        rows = [
            (
                self.first + n * self.step,
                self.first + min(n + spans, len(self.counts)) * self.step,
                [sum(one[group] for one in self.counts[n : n + spans]) for group in range(len(GROUPS))],
            )
            for n in range(0, len(self.counts), spans)
        ]
        return rows[::-1]


@dataclass(frozen=True, slots=True)
class Sums:
    """What ended in two days: ``counts`` by provider and kind, of each span by group."""

    first: datetime
    counts: dict[tuple[str, str], list[list[int]]]
    drawn: dict[tuple[str, str | None, str | None], Figure | None] = field(default_factory=dict)

    def bars(self, *, provider: str | None = None, kind: str | None = None) -> Bars:
        """The bars of all, or of a provider or a kind."""
        fits = [counts for (its, one), counts in self.counts.items() if provider in (None, its) and kind in (None, one)]
        spans = range(SPAN // _STEP)
        return Bars(self.first, _STEP, [[sum(one[n][g] for one in fits) for g in range(len(GROUPS))] for n in spans])

    def by_kind(self, provider: str | None = None) -> list[tuple[str, Bars]]:
        """The busiest kinds, each with its bars."""
        kinds = {kind for its, kind in self.counts if provider in (None, its)}
        lines = [(kind, self.bars(provider=provider, kind=kind)) for kind in kinds]
        return sorted(lines, key=lambda line: (-sum(line[1].totals), line[0]))[:KINDS]


def sums(rows: Iterable[Any], now: datetime) -> Sums:
    """The sums of two days; ``rows`` have ``at``, ``kind``, ``provider``, ``outcome`` and ``count``."""
    seconds = STEP * 60
    first = (int(now.timestamp()) // seconds + 1) * seconds - int(SPAN.total_seconds())
    counts: dict[tuple[str, str], list[list[int]]] = {}
    for row in rows:
        n = (int(row.at.timestamp()) - first) // seconds
        if 0 <= n < SPAN // _STEP:
            series = counts.setdefault((row.provider, row.kind), [])
            if not series:
                series.extend([0] * len(GROUPS) for _ in range(SPAN // _STEP))
            series[n][_GROUP_OF.get(row.outcome, 1)] += row.count
    return Sums(datetime.fromtimestamp(first, UTC), counts)


def chart(data: Bars, title: str, now: datetime, *, name: str, small: bool = False) -> Markup:
    """Stacked bars with their text alternative; ``name`` makes the ids."""
    parts = [_stack(n * _WIDE, one, data.most) for n, one in enumerate(data.counts)]
    words = f"{sentence(data)} {_peak(data, now)}".strip()
    box = f"0 0 {len(data.counts) * _WIDE} {_HIGH}"
    return Markup(
        '<svg class="chart{5}" role="img" aria-labelledby="{0}-title {0}-desc" viewBox="{1}"'
        ' preserveAspectRatio="none">'
        '<title id="{0}-title">{2}</title><desc id="{0}-desc">{3}</desc>{4}</svg>'
    ).format(name, box, title, words, Markup("").join(parts), " small" if small else "")


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with all that stands beside it; ``kinds``: the busiest, each with its small chart."""

    name: str
    data: Bars
    drawing: Markup
    kinds: list[tuple[str, Bars, Markup]]


def figure(
    recent: Sums | None, now: datetime, title: str, *, provider: str | None = None, kind: str | None = None
) -> Figure | None:
    """The chart of two days; None if nothing ended in them. Kinds are told apart where there are several."""
    if recent is None:
        return None
    key = (title, provider, kind)
    if key not in recent.drawn:  # drawing takes longer than reading what is new
        recent.drawn[key] = _draw(recent, now, title, provider, kind)
    return recent.drawn[key]


def _draw(recent: Sums, now: datetime, title: str, provider: str | None, kind: str | None) -> Figure | None:
    data = recent.bars(provider=provider, kind=kind)
    if not data.most:
        return None
    kinds = [] if kind is not None else recent.by_kind(provider)
    lines = [
        (kind, one, chart(one, kind, now, name=f"throughput-{n}", small=True)) for n, (kind, one) in enumerate(kinds)
    ]
    return Figure("throughput", data, chart(data, title, now, name="throughput"), lines if len(lines) > 1 else [])


class Recent:
    """The sums of one database as a process knows them. What is older than an hour changes no more and is read once."""

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.read_at = -FRESH
        self._rows: list[Throughput] = []
        self._task: asyncio.Task[Sums] | None = None

    async def fresh(self, visit: Visit) -> Sums | None:
        """The sums, at most `FRESH` seconds old: one reading for all pages that want them.

        If that takes longer than `WAIT`, those that are there; None if there are none yet.
        """
        if self.sums is None or time.monotonic() - self.read_at >= FRESH:
            task = self._task
            if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
                task = self._task = asyncio.create_task(self._read(visit), name="dashboard-throughput")
            if (await asyncio.wait([task], timeout=WAIT))[0]:  # it goes on, for the others and the next page
                return task.result()
        return self.sums

    async def _read(self, visit: Visit) -> Sums:
        since = None
        if self.sums is not None:
            since = visit.now - 2 * _STEP
            since -= timedelta(seconds=since.timestamp() % _STEP.total_seconds())
        rows = await visit.read(throughput, since, step=STEP)
        self._rows = [*(one for one in self._rows if since is not None and one.at < since), *rows]
        self.sums, self.read_at = sums(self._rows, visit.now), time.monotonic()
        return self.sums


RECENT: Final[WeakKeyDictionary[Database, Recent]] = WeakKeyDictionary()


async def recent(visit: Visit) -> Sums | None:
    """What ended in two days; None while it is read for the first time. Workers write every ten seconds."""
    return await RECENT.setdefault(visit.app.database, Recent()).fresh(visit)


def sentence(data: Bars) -> str:
    """The sums in words."""
    sums = data.totals
    if not sum(sums):
        return "No execution ended."
    return ", ".join(f"{n:,} {word}" for n, (_, word) in zip(sums, GROUPS, strict=True)) + "."


def _peak(data: Bars, now: datetime) -> str:
    if not data.most:
        return ""
    n = max(range(len(data.counts)), key=lambda n: sum(data.counts[n]))
    at = data.first + n * data.step
    return f"Most in {span(data.step.total_seconds())}: {data.most:,}, {rough((now - at).total_seconds())} ago."


def _stack(x: int, counts: Sequence[int], most: int) -> Markup:
    parts, y = list[str](), float(_HIGH)
    for (group, _), count in zip(GROUPS, counts, strict=True):
        if count:
            high = max(count / most * _HIGH, 1.0)  # what is there at all is seen
            y -= high
            parts.append(
                f'<rect class="c-{group}" x="{x}" y="{max(y, 0):.1f}" width="{_WIDE - _GAP}" height="{high:.1f}"/>'
            )
    return Markup("".join(parts))  # noqa: S704 - numbers and our own classes


# -- ticks -----------------------------------------------------------------------------------------------------------

_FEW: Final = 20  # ticks that a drawing has room for, so that one alone is no wall
_TICK_GROUP: Final = {"succeeded": "well", "dead": "dead", "cancelled": "none"}


def ticks(jobs: Sequence[Any], name: str, addresses: Sequence[str]) -> Markup:
    """The jobs of a schedule, the oldest at the left: a bar is as high as its job took long, and leads to it.

    A job that did not end has a bar of half the height. Colour is not all: the bar of a dead job stands on its head.
    """
    took = [_took(job) for job in jobs]
    longest = max((one for one in took if one is not None), default=0.0) or 1.0
    parts = [
        _tick(n, job, seconds, longest, address)
        for n, (job, seconds, address) in enumerate(zip(jobs, took, addresses, strict=True))
    ]
    states = [job.state.value for job in jobs]
    words = ", ".join(f"{states.count(one)} {one}" for one in sorted(set(states)))
    return Markup(
        '<svg class="ticks" role="group" aria-label="{0}" viewBox="0 0 {1} {2}" preserveAspectRatio="none">{3}</svg>'
    ).format(
        f"{counted(len(jobs), 'tick')} of {name}: {words}", max(len(jobs), _FEW) * _WIDE, _HIGH, Markup("").join(parts)
    )


def _took(job: Any) -> float | None:
    if job.started_at is None or job.finished_at is None:
        return None
    took: timedelta = job.finished_at - job.started_at
    return max(took.total_seconds(), 0.0)


def _tick(n: int, job: Any, seconds: float | None, longest: float, address: str) -> Markup:
    high = _HIGH / 2 if seconds is None else max(seconds / longest * _HIGH, 8.0)
    y = 0 if job.state.value == "dead" else _HIGH - high
    words = f"{job.tags.get('tick', '')} {job.state.value}" + ("" if seconds is None else f", took {span(seconds)}")
    return Markup(
        '<a href="{0}" aria-label="{1}"><title>{1}</title><rect class="c-{2}" x="{3}" y="{4:.1f}" width="{5}"'
        ' height="{6:.1f}"/></a>'
    ).format(
        address, escape(words.strip()), _TICK_GROUP.get(job.state.value, "again"), n * _WIDE, y, _WIDE - _GAP, high
    )


# -- the life of a job -----------------------------------------------------------------------------------------------

_LONG: Final = 1000  # units of a life
_THIN: Final = 4  # of a run too short to be seen
_ENDS: Final = {"succeeded": "well", "dead": "dead", "expired": "dead", "cancelled": "none"}


def lifeline(info: Any, attempts: Sequence[Any], now: datetime) -> Markup:
    """The life of a job as a line: waits are thin, runs are blocks in the colour of what became of them."""
    end = info.finished_at or max(now, *(one.finished_at for one in attempts), info.created_at)
    whole = (end - info.created_at).total_seconds()
    runs = [(one.started_at or one.finished_at, one.finished_at, _ENDS.get(one.decision, "again")) for one in attempts]
    last = max((one.finished_at for one in attempts), default=None)
    if info.started_at is not None and (last is None or info.started_at > last):
        runs.append((info.started_at, info.finished_at or end, _ENDS.get(info.state.value, "runs")))
    if whole <= 0 or not runs:
        return Markup("")
    blocks = [_block((a - info.created_at).total_seconds(), (b - a).total_seconds(), whole, of) for a, b, of in runs]
    busy = sum(max((b - a).total_seconds(), 0.0) for a, b, _ in runs)
    words = f"{counted(len(runs), 'run')} in {span(whole)}, {span(busy)} of them running"
    return Markup(
        '<svg class="life" role="img" aria-labelledby="life-title" viewBox="0 0 {0} 24" preserveAspectRatio="none">'
        '<title id="life-title">{1}</title><rect class="c-none" x="0" y="11" width="{0}" height="2"/>{2}</svg>'
    ).format(_LONG, words, Markup("").join(blocks))


def _block(start: float, seconds: float, whole: float, group: str) -> Markup:
    wide = max(seconds / whole * _LONG, _THIN)
    x = min(max(start / whole * _LONG, 0.0), _LONG - wide)
    return Markup('<rect class="c-{0}" x="{1:.1f}" y="2" width="{2:.1f}" height="20"/>').format(group, x, wide)
