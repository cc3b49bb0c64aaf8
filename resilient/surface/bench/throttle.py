"""``bench throttle``: two workers of the whole engine against a provider whose limit nobody declared.

Beside it, in the same run and against providers of the same kind: requests that tenacity repeats, honouring
Retry-After, and a limiter in each process in the manner of botocore's adaptive mode.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx
import tenacity
from sqlalchemy import create_engine, text

from resilient import Item
from resilient.surface.bench.crew import ROOT, build, get, run_crew
from resilient.surface.bench.metered import METERS, Line, metered
from resilient.surface.loop import run
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from resilient.surface.bench.crew import Start
    from resilient.surface.bench.metered import Meter
    from resilient.surface.scratch import Scratch

PROCESSES: Final = 2
_COLD: Final = 0.5  # seconds after the first refusal: more are on their way already
_REST: Final = 5.0  # seconds after it: jobs claimed before it wait again by then
_LOOK: Final = 1.0  # seconds between two counts


def throttle(
    url: str | None, name: str, *, scale: float = 1.0, rivals: bool = True, plot: Path | None = None
) -> dict[str, Any]:
    """The figures of one meter: of the engine, and of the others; ``plot``: the file for a picture of them."""
    meter, figures_of = METERS[name], dict[str, Any]()
    seconds = meter.seconds / scale
    sides: dict[str, Callable[[], dict[str, Any]]] = {"engine": lambda: _engine(url, name, seconds, scale)}
    if rivals:
        sides["tenacity"] = lambda: _rival(tenacious, name, seconds, scale)
        sides["adaptive"] = lambda: _rival(adaptive, name, seconds, scale)

    def run(side: str) -> None:
        figures_of[side] = sides[side]()

    others = [threading.Thread(target=run, args=(side,)) for side in sides if side != "engine"]
    for other in others:
        other.start()
    run("engine")
    for other in others:
        other.join()
    report: dict[str, Any] = {"provider": meter.title, "seconds": seconds, "load": os.getloadavg()[0]}
    report |= {side: figures_of[side] for side in sides if side in figures_of}
    if plot is not None:
        plot.write_text(picture(report))
    return report


# -- the engine ----------------------------------------------------------------------------------------------


def _engine(url: str | None, name: str, seconds: float, scale: float) -> dict[str, Any]:
    meter = METERS[name]
    with metered(name, scale) as provider, scratch(url, "bench") as place:
        app = build(place)
        try:
            items = [
                Item(f"{provider.address}/{n % meter.accounts}", resource_key=f"{ROOT}/acct-{n % meter.accounts}")
                for n in range(meter.jobs)
            ]
            app.enqueue_many_sync(get, items)
            counts = list[_Count]()
            run_crew(_work, PROCESSES, place, meter.slots, seconds, meanwhile=lambda: _watch(place, seconds, counts))
        finally:
            app.database.close_sync()
        log = provider.log()
        return figures(log, meter, seconds, scale) | _executions(counts, log, seconds)


def _work(start: Start, place: Scratch, slots: int, seconds: float) -> dict[str, Any]:
    return run(_working(start, place, slots, seconds))


async def _working(start: Start, place: Scratch, slots: int, seconds: float) -> dict[str, Any]:
    async with build(place) as app:
        worker = app.worker(concurrency=slots)
        start()
        asyncio.get_running_loop().call_later(seconds, worker.stop)
        await worker.run()
        return {}


class _Count(NamedTuple):
    """What the rows say so many seconds after the start."""

    at: float
    executions: int
    running: int
    done: int


def _watch(place: Scratch, seconds: float, counts: list[_Count]) -> None:
    """Read the rows every `_LOOK` seconds for as long as the workers run."""
    engine, began = create_engine(place.url), time.monotonic()
    table = f"{place.schema}.resilient_job" if place.schema else "resilient_job"
    sums = ", ".join(f"coalesce(sum(CASE WHEN state = '{state}' THEN 1 END), 0)" for state in ("running", "succeeded"))
    with engine.connect() as c:
        while (at := time.monotonic() - began) < seconds:
            row = c.execute(text(f"SELECT coalesce(sum(executions), 0), {sums} FROM {table}")).one()  # noqa: S608 - ours
            c.rollback()
            counts.append(_Count(at, *row))
            time.sleep(_LOOK)
    engine.dispose()


def _executions(counts: Sequence[_Count], log: Sequence[Line], seconds: float) -> dict[str, Any]:
    """Executions for each job: of all, and of those after the cold phase, which ends `_REST` after the first 429."""
    first = min(_first(log), seconds)
    last, cold = counts[-1], next((one for one in counts if one.at >= first + _REST), counts[-1])
    jobs = last.done + last.running - cold.done - cold.running
    later = (last.executions - cold.executions) / jobs if jobs > 0 else None
    return {
        "executions": round(last.executions / max(1, last.done + last.running), 3),
        "executions_later": None if later is None else round(later, 3),
    }


def _rival(task: Callable[..., dict[str, Any]], name: str, seconds: float, scale: float) -> dict[str, Any]:
    meter = METERS[name]
    with metered(name, scale) as provider:
        run_crew(task, PROCESSES, provider.address, meter.accounts, meter.slots, seconds)
        return figures(provider.log(), meter, seconds, scale)


# -- figures -------------------------------------------------------------------------------------------------


def figures(log: Sequence[Line], meter: Meter, seconds: float, scale: float) -> dict[str, Any]:
    """The figures of a provider's log: refusals at first and later, and the share of its limit that was used."""
    log = [line for line in log if line.at <= seconds]
    of = [log] if meter.shared else [[x for x in log if x.account == a] for a in sorted({x.account for x in log})]
    cold, later, rest = [_cold(lines) for lines in of], 0, 0
    for lines, number in zip(of, cold, strict=True):
        after = _after(lines)
        later += sum(not line.passed for line in lines) - number
        rest += len(after)
    accepted = sum(line.passed for line in log)
    allowed = sum(meter.make(scale).total(seconds) for _ in of)
    by_account = Counter(line.account for line in log if line.passed)
    row: dict[str, Any] = {
        "sent": len(log),
        "accepted": accepted,
        "refused": len(log) - accepted,
        "cold": max(cold, default=0),
        "later_share": round(later / max(1, rest), 4),
        "refused_share": round(1 - accepted / max(1, len(log)), 4),
        "goodput": round(accepted / allowed, 3) if allowed else None,
        "each_second": _each_second(log, seconds),
    }
    if meter.accounts > 1:
        numbers = list(by_account.values())
        row["fairness"] = round(sum(numbers) ** 2 / (meter.accounts * sum(n * n for n in numbers)), 3) if numbers else 0
    return row


def _first(lines: Sequence[Line]) -> float:
    return next((line.at for line in lines if not line.passed), float("inf"))


def _cold(lines: Sequence[Line]) -> int:
    return sum(not line.passed for line in lines if line.at <= _first(lines) + _COLD)


def _after(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.at > _first(lines) + _COLD]


def _each_second(log: Sequence[Line], seconds: float) -> dict[str, list[int]]:
    passed, refused = [0] * int(seconds + 1), [0] * int(seconds + 1)
    for line in log:
        (passed if line.passed else refused)[int(line.at)] += 1
    return {"accepted": passed, "refused": refused}


# -- a table -------------------------------------------------------------------------------------------------

_HEADS: Final = ("provider", "side", "cold", "later", "goodput", "Jain", "executions", "after the cold", "sent", "load")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The reports of `throttle` as one table; ``load`` is the machine's at the end of each."""
    lines = [_HEADS, tuple("---" for _ in _HEADS)]
    for row in rows:
        for side, numbers in row.items():
            if isinstance(numbers, dict):
                lines.append((row["provider"], side, *_cells(numbers), f"{row['load']:.1f}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(figures_: Mapping[str, Any]) -> tuple[str, ...]:
    shares = ("goodput", "fairness", "executions", "executions_later")
    goodput, *others = ("" if figures_.get(name) is None else f"{figures_[name]:.2f}" for name in shares)
    return (str(figures_["cold"]), f"{figures_['later_share']:.2%}", goodput, *others, f"{figures_['sent']:,}")


# -- a plot -----------------------------------------------------------------------------------------------------------
#
# A plot of what a provider accepted and refused in each second, one panel for each side, as SVG.

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 110, 46, 34, 34
_COLOURS: Final = {"accepted": "#2a7d4f", "refused": "#c0392b"}


def svg(title: str, sides: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """``sides``: name to numbers in each second, ``accepted`` and ``refused``."""
    height = _TOP + len(sides) * (_HEIGHT + _GAP)
    panels = [_panel(name, numbers, _TOP + n * (_HEIGHT + _GAP)) for n, (name, numbers) in enumerate(sides.items())]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 10} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}:'
        f' requests in each second, <tspan fill="{_COLOURS["accepted"]}">accepted</tspan> and'
        f' <tspan fill="{_COLOURS["refused"]}">refused</tspan></text>' + "".join(panels) + "</svg>\n"
    )


def picture(row: Mapping[str, Any]) -> str:
    """The plot of one meter's figures (`throttle`)."""
    sides = {name: side["each_second"] for name, side in row.items() if isinstance(side, dict)}
    return svg(str(row["provider"]), sides)


def _panel(name: str, numbers: Mapping[str, Sequence[int]], top: int) -> str:
    seconds = max(1, len(numbers["accepted"]))
    most = max(1, *(a + b for a, b in zip(numbers["accepted"], numbers["refused"], strict=True)))
    step, scale = _WIDTH / seconds, _HEIGHT / most
    bars = []
    for n, (accepted, refused) in enumerate(zip(numbers["accepted"], numbers["refused"], strict=True)):
        bottom = float(top + _HEIGHT)
        for what, count in (("accepted", accepted), ("refused", refused)):
            if count:
                bottom -= count * scale
                bars.append(
                    f'<rect x="{_LEFT + n * step:.1f}" y="{bottom:.1f}" width="{max(0.5, step - 0.4):.1f}"'
                    f' height="{count * scale:.1f}" fill="{_COLOURS[what]}"/>'
                )
    line = top + _HEIGHT
    return (
        f'<text x="{_LEFT}" y="{top - 4}">{escape(name)}</text>'
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most}</text>'
        f'<text x="{_LEFT - 6}" y="{line}" text-anchor="end">0</text>'
        f'<path d="M{_LEFT} {top}V{line}H{_LEFT + _WIDTH}" fill="none" stroke="#888"/>' + "".join(bars)
    )


# -- rivals -----------------------------------------------------------------------------------------------------------
#
# What others do about 429, for `bench throttle`: the same requests, as many at once, in as many processes.

_BETA, _SCALE, _SMOOTH, _LEAST = 0.7, 0.4, 0.8, 0.5
_LONGEST: Final = 60.0


def tenacious(start: Start, address: str, accounts: int, slots: int, seconds: float) -> dict[str, Any]:
    """Repeated by tenacity after what Retry-After says, else after a random time that doubles."""
    return run(_loops(start, address, accounts, slots, seconds, None))


def adaptive(start: Start, address: str, accounts: int, slots: int, seconds: float) -> dict[str, Any]:
    """The same behind a token bucket of the process, filled at a rate that follows CUBIC."""
    return run(_loops(start, address, accounts, slots, seconds, Cubic()))


class Refused(Exception):
    """A 429, and what it told."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__("429")
        self.seconds = seconds


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    seconds = error.seconds if isinstance(error, Refused) else None
    return (
        seconds if seconds is not None else float(tenacity.wait_random_exponential(multiplier=0.5, max=_LONGEST)(state))
    )


async def _loops(
    start: Start, address: str, accounts: int, slots: int, seconds: float, bucket: Cubic | None
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=slots, max_keepalive_connections=slots)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        start()
        tasks = [asyncio.create_task(_loop(client, f"{address}/{n % accounts}", bucket)) for n in range(slots)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {}


async def _loop(client: httpx.AsyncClient, url: str, bucket: Cubic | None) -> None:
    retrying = tenacity.AsyncRetrying(
        wait=_wait, retry=tenacity.retry_if_exception_type((Refused, httpx.TransportError)), reraise=True
    )
    while True:
        await retrying(_one, client, url, bucket)


async def _one(client: httpx.AsyncClient, url: str, bucket: Cubic | None) -> None:
    if bucket is not None:
        await bucket.take()
    response = await client.get(url)
    refused = response.status_code == httpx.codes.TOO_MANY_REQUESTS
    if bucket is not None:
        bucket.take_in(refused=refused)
    if refused:
        seconds = response.headers.get("retry-after")
        raise Refused(None if seconds is None else float(seconds))


class Cubic:
    """botocore's adaptive mode: measured in half seconds, cut to 0.7 by a throttle, back along a cubic curve."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._tokens, self._filled = 0.0, time.monotonic()
        self._measured, self._bucket, self._count = 0.0, 0.0, 0
        self._most, self._cut_at = 0.0, 0.0

    async def take(self) -> None:
        """Wait for a token; there is no limit before the first throttle."""
        while self._rate is not None:
            now = time.monotonic()
            self._tokens = min(max(1.0, self._rate), self._tokens + (now - self._filled) * self._rate)
            self._filled = now
            if self._tokens >= 1:
                self._tokens -= 1
                return
            await asyncio.sleep((1 - self._tokens) / self._rate)

    def take_in(self, *, refused: bool) -> None:
        """Take an answer in."""
        now = time.monotonic()
        self._measure(now)
        if refused:
            rate = self._measured if self._rate is None else min(self._measured, self._rate)
            self._most, self._cut_at = rate, now
            self._set(_BETA * rate)
        elif self._rate is not None:
            back = (self._most * (1 - _BETA) / _SCALE) ** (1 / 3)
            self._set(_SCALE * (now - self._cut_at - back) ** 3 + self._most)

    def _measure(self, now: float) -> None:
        self._count += 1
        bucket = int(now * 2) / 2
        if bucket > self._bucket:
            span = bucket - self._bucket if self._bucket else 0.5
            self._measured = self._measured * (1 - _SMOOTH) + self._count / span * _SMOOTH
            self._count, self._bucket = 0, bucket

    def _set(self, rate: float) -> None:
        self._rate = max(_LEAST, min(rate, 2 * max(self._measured, _LEAST)))
