r"""What throttles teach about a resource whose limit nobody declared, or declared too high: a state machine.

    None --rest--> free --short wait--> rate <------------------------+
                    |  \--long wait--> quota                          |
                    |   \--no wait--> slots --refused again-----------+
    rate, slots, quota --no longer binding, or quiet for long--> None

One `Learnt` belongs to one resource row, so what it counts and allows is the fleet's, not one process's. `throttled`
takes a refusal in, `answered` what was accepted. A refusal counts once: the state has a generation, requests carry the
one they were sent under, and a refusal of an older one is the same event. Answers to requests from just before an
event still belong to it: whoever counted them reports a moment later, and the estimate is made larger by as many.

Which kind of limit it is follows from what the provider says. A wait of `LONG` or more is a spent window: a count
(`quota`), obeyed, and no reason to go slower. No wait at all, from a resource that nothing is known of, is first taken
for a limit of requests at once (`slots`), and for a rate when that does not end the refusals. Anything else is a rate.

Why this rule. AIMD is the yardstick: it needs no model, and gets 61 to 68 % of what a provider allows, because
each of its probes is refused and each refusal costs a whole rest (the stated wait, a second, jitter). CUBIC
(botocore's adaptive mode) comes back to the refused rate faster and so is refused more often: 37 to 45 %. Learning from
latency (TCP Vegas, Netflix's concurrency limits) sees queues, and who answers 429 keeps none. So this rule spends
as few refusals as it can, and learns as much as it can from each:

- The first estimate is measured: what was accepted, over the window that Retry-After shows the end of. Hints are
  whole seconds, so the window is taken for the round one (`WINDOWS`) that fits. Where a burst shows no window it is
  what was accepted between two refusals, over the time between them.
- The rate stays `MARGIN` below what was refused, and grows by steps of `STEP` only as far as that.
- There it rests for `CALM`, twice as long after every probe that failed, and then tries the next `PROBE` above, faster
  and faster while it goes well. A probe that is refused gives back the rate from before it, not a share of it. What was
  counted in a round window is first tried after twice as long, because hardly more is to be found above it.
- A limit that dropped may rise again, and to where it was: after a drop the tries come sooner, at first every
  `CALM_AFTER_DROP`, and one that goes well leads back to the former rate in one step. If that is refused, the
  tries go on from the rate before that step.
- An estimate made from fewer than `FEW` answers is none: it is tried to double at once.
- A rate that is not used to `USED` does not grow, because that would prove nothing; one that is not used to
  half is forgotten ten minutes after the last refusal.

`botocore` measures one process's rate; here processes share the estimate and draw from one row, so a second worker
neither doubles the rate nor halves it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["free", "rate", "slots", "quota"]
Bounds = tuple[float, float]  # requests a second

LONG: Final = 30.0  # seconds; a refusal that states so long a wait, or a longer one, is a spent window
MARGIN: Final = 0.95  # of what was refused
CLOSE: Final = 0.96  # the same where a window was counted
STEP: Final = 1.25
PROBE: Final = 1.06
FASTER: Final = 1.5  # exponent of a probe's next step
WIDEST: Final = 2.0  # step of a probe
WIDEST_DRAIN: Final = 1.2  # the same for a bucket: what it gives while it fills is no rate
CALM: Final = 20.0  # seconds
SLOWEST: Final = 30.0  # seconds between two steps at most
ANSWERS: Final = 6  # between two steps, at the present rate
USED: Final = 0.85  # of a rate, or no probe begins or goes on
LONGEST_CALM: Final = 600.0
CALM_AFTER_DROP: Final = 15.0  # seconds, or `CALM_SHARE` of the time since the limit dropped
CALM_SHARE: Final = 0.25
SURE: Final = 1.15  # times the plateau: a probe that was let through so far above it shows that the limit rose
FEW: Final = 5  # answers
FORGOTTEN: Final = 600.0  # seconds since the last refusal after which a rate that is not used is forgotten
FEWEST: Final = 20  # in a spent window; a smaller one is obeyed and not counted
QUIET: Final = 3600.0  # seconds without a request after which nothing holds any more
LOWEST: Final = 1 / 60  # requests a second: a provider that refused everything for a while is tried once a minute
WINDOWS: Final = (1.0, 10.0, 60.0, 3600.0)  # seconds
SLACK: Final = 0.15  # seconds between counting at the provider and the arrival of its answer
STRETCH: Final = 10.0  # seconds over which the accepted rate is measured
_REPORTED: Final = 1.0  # seconds between a process's first answer and its report, at most
LATE: Final = 3.0  # seconds in which answers of the generation before are waited for
LATEST: Final = 30.0  # the same for requests that were in flight
STARTED: Final = 32  # answers after which a slow start is over
RAMP: Final = 30.0  # seconds after which it is over in any case
_DOUBLING: Final = RAMP / 10
_SAME: Final = (0.87, 1.15)  # two drains of one bucket
_JUST_THE_SAME: Final = (0.96, 1.04)  # where the rest was a small part of them, and any rate is refused so now and then
_QUICK: Final = 0.66  # of the time between two refusals
_DRAINS: Final = 2  # alike, that make a bucket
_DRAIN: Final = 120.0  # seconds over which a drain means something
_SOON: Final = 3.0  # seconds after a rest in which a refusal ends a burst
_AGAIN: Final = 3  # a refusal after nothing was accepted says nothing about a rate, unless it comes so often
_WHOLE: Final = 0.05  # seconds by which a wait that was stated in whole seconds may differ by now
_NEAR: Final = 1.5  # times the plateau: a probe refused so near was one step too far
_BACK: Final = 0.85  # of the rate before the refused one
_FAR_BACK: Final = 0.7
_CHANGED: Final = 0.6  # of the ceiling: less is another limit than before
_ALIKE: Final = 0.15  # by which two bursts of one window may differ
_CHANCE: Final = 10  # answers
_WELL_WITHIN: Final = 1.2  # windows: what was let through in a longer time says too little about one
_STRIKES: Final = 3
_BROKEN: Final = 1
_COUNTED: Final = 1  # `rests` of an estimate that was counted in a round window: hardly more is to be found above it
_UNFOUNDED: Final = -3  # `rests` of an estimate that was made from too few answers
_RETURN_FAILED: Final = -2  # the same after a step to the former rate that was refused


@dataclass(frozen=True, slots=True)
class Learnt:
    """What was learnt of one resource. Times are epoch seconds, rates requests a second.

    ``rate`` is what may be drawn; ``ceiling`` the least that is known to be too much (None while a probe is above it);
    ``plateau`` where a failed probe goes back to; ``good`` the rate before the latest step.
    """

    kind: Kind = "free"
    generation: int = 0
    previous: int = 0  # the generation before
    changed_at: float = 0.0
    resumes_at: float = 0.0  # the end of the rest
    throttles: int = 0  # events it was learnt from
    accepted: int = 0  # in this generation
    began: float = 0.0  # about when the first of them was sent: idle time is no pace
    burst: int = 0  # in the one before
    basis: int = 0  # answers the estimate was made from; 0: it was not made by counting
    used_at: float = 0.0  # latest answer
    # the accepted rate: the present stretch and the one before
    count: int = 0
    since: float = 0.0
    count_before: int = 0
    since_before: float = 0.0
    # rate
    rate: float | None = None
    ceiling: float | None = None
    plateau: float | None = None
    good: float | None = None
    step: float = 1.0
    step_at: float = 0.0  # the latest step
    uses: int = 0  # answers since then
    rests: int = 0  # probes that failed one after the other; the calm doubles with each
    steady: float = 0.0  # the latest rate that was kept for a calm
    former: float = 0.0  # the same before the limit dropped
    dropped_at: float = 0.0
    returned: bool = False  # to the former rate, by a step that nothing has confirmed yet
    window: float = 0.0  # seconds, if refusals showed it
    windowed: bool = False  # the estimate came from it
    broken: int = 0  # times that such an estimate was refused all the same
    drain: float | None = None  # accepted between two events, over the time between them
    drains: int = 0  # times the same drain came again
    drain_rate: float = 0.0
    matched: bool = False  # the latest drain was like the one before
    # slots
    slots: int = 0
    strikes: int = 0
    # quota
    quota: int = 0  # in a window
    reset_at: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the resource row keeps it: what is not as at the beginning."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}

    @classmethod
    def from_json(cls, doc: Any) -> Learnt | None:
        """Read what `to_json` wrote, by older or newer code; None for anything else."""
        if not isinstance(doc, dict):
            return None
        try:
            state = cls(**{name: value for name, value in doc.items() if name in _DEFAULTS})
            numbers = all(isinstance(getattr(state, name), (int, float)) for name in _NUMBERS) and all(
                isinstance(getattr(state, name), (int, float, type(None))) for name in _OPTIONAL
            )
            sane = numbers and state.kind in _KINDS and (state.kind != "rate" or (state.rate or 0.0) > 0)
        except TypeError:
            return None
        return state if sane else None


def summary(s: Learnt | None, now: float) -> dict[str, Any] | None:
    """What people and programs are shown; None if nothing is learnt."""
    s = current(s, now)
    if s is None or s.kind == "free" or (s.kind == "quota" and s.quota < FEWEST):
        return None
    return {
        "kind": s.kind,
        "rate": None if s.rate is None else float(f"{s.rate:.3g}"),
        "at_once": s.slots if s.kind == "slots" else None,
        "in_a_window": s.quota if s.kind == "quota" else None,
        "at": datetime.fromtimestamp(s.changed_at, UTC),
        "throttles": s.throttles,
    }


_DEFAULTS: Final[Mapping[str, Any]] = {item.name: item.default for item in fields(Learnt)}
_KINDS: Final = ("free", "rate", "slots", "quota")
_NUMBERS: Final = tuple(name for name, value in _DEFAULTS.items() if isinstance(value, (int, float)))
_OPTIONAL: Final = tuple(name for name, value in _DEFAULTS.items() if value is None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A throttle, and what the process that got it had counted and not reported yet.

    ``generation``: under which it was sent. ``wait``: the seconds that it stated, or None. ``seconds``: over which
    ``accepted`` was counted, up to `STRETCH` or two. ``peak``: most requests at once of those accepted.
    """

    generation: int
    wait: float | None = None
    accepted: int = 0
    seconds: float = 0.0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """What one process got accepted under one generation since its last report.

    ``peak``: most of them at once; 0 for those that were answered after the generation was over.
    """

    generation: int
    accepted: int
    peak: int = 0


# -- events --------------------------------------------------------------------------------------------------


def is_fresh(s: Learnt | None, generation: int) -> bool:
    """Whether a refusal of a request sent under ``generation`` is an event of its own."""
    return s is None or generation == s.generation


def rested(s: Learnt | None, generation: int, now: float, resumes_at: float) -> Learnt:
    """A rest that teaches nothing: the load comes back step by step."""
    s = s or Learnt()
    return replace(
        s, generation=generation, previous=s.generation, resumes_at=resumes_at, accepted=0, step=1.0,
        basis=s.quota if s.kind == "quota" else 0,
        step_at=max(now, s.step_at), uses=0, used_at=now, count=0, count_before=0, since=now, since_before=now,
        good=None, ceiling=s.ceiling if s.ceiling or s.rate is None else s.rate / MARGIN,
    )  # fmt: skip


def prolonged(s: Learnt, resumes_at: float) -> Learnt:
    """The state after a repeat of its latest event that states a longer rest."""
    return replace(s, resumes_at=max(s.resumes_at, resumes_at))


def throttled(
    s: Learnt | None, r: Refusal, generation: int, now: float, resumes_at: float, *, bounds: Bounds | None = None,
    slots: bool | None = None,
) -> Learnt:  # fmt: skip
    """The state after a fresh refusal (`is_fresh`), under its new ``generation``; resting until ``resumes_at``.

    ``bounds`` of the rate. ``slots``: it is known to be (True) or not to be (False) a limit of requests at once.
    """
    if s is None and r.generation and r.wait is not None:  # most of what passed was reported, and forgotten with it
        return replace(rested(None, generation, now, resumes_at), throttles=1)
    s = s or Learnt()
    first = s.changed_at == 0.0 and s.generation == 0  # after a rest that taught nothing the row has counted, too
    if s.kind == "free" and r.wait is not None and not s.accepted + r.accepted and s.throttles + 1 < _AGAIN:
        return replace(rested(s, generation, now, resumes_at), throttles=s.throttles + 1)
    elapsed = now - max(s.resumes_at, s.changed_at, s.began if s.accepted else 0.0)
    if first or _is_alone(s, r):
        elapsed = min(elapsed, r.seconds)
    event = _Event(
        wait=r.wait, accepted=max(1, s.accepted + r.accepted), elapsed=max(elapsed, 0.001),
        mean=r.accepted / max(1.0, r.seconds) if first else _mean(s, r, now),
        drain=None if first else _drain(s, r, now), peak=r.peak, now=now,
    )  # fmt: skip
    after = _learnt(s, event, now, slots=slots)
    after = replace(
        after, generation=generation, previous=s.generation, changed_at=now, resumes_at=resumes_at,
        throttles=s.throttles + 1, accepted=0, burst=event.accepted,
        step=WIDEST if after.rests == _UNFOUNDED else 1.0, step_at=now, uses=0, good=None,
        used_at=now, count=0, since=now, count_before=0, since_before=now,
        drain=event.drain if s.kind == "rate" else None,
    )  # fmt: skip
    return _bounded(after, bounds)


def slowed(s: Learnt | None, r: Refusal, generation: int, now: float, times: float) -> Learnt:
    """The state after answers took so many ``times`` as long as usual: nobody rests, but less is on its way."""
    s = s or Learnt()
    s = replace(
        s, generation=generation, previous=s.generation, changed_at=now, resumes_at=now, throttles=s.throttles + 1,
        accepted=STARTED, basis=0, step=1.0, step_at=now, uses=0, used_at=now, count=0, since=now, count_before=0,
        since_before=now,
    )  # fmt: skip
    if s.kind == "rate" and s.rate is not None:
        return replace(s, rate=max(LOWEST, s.rate / times), ceiling=s.rate, plateau=None, good=None)
    slots = s.slots if s.kind == "slots" else r.peak
    return replace(s, kind="slots", slots=max(1, int(slots / times)), strikes=0)


def answered(s: Learnt, r: Answers, now: float, *, bounds: Bounds | None = None) -> Learnt | None:
    """The state after answers; the same object if they change nothing, None if there is nothing left to know."""
    if r.generation != s.generation:
        return _late(s, r, now, bounds) if r.generation == s.previous else s
    s = _counted(s, r.accepted, now)
    match s.kind:
        case "free":
            is_young = s.throttles > 0 and now - s.resumes_at < RAMP  # the next one may need what is counted
            return s if is_young or allowance(s, now) is not None else None
        case "rate":
            grown = _grown(s, now)
            return None if grown is None else _bounded(grown, bounds)
        case "slots":
            return _more_slots(s, now)
        case "quota":  # as many again as passed beyond what was counted
            return replace(s, quota=max(s.quota, 2 * s.accepted + 1 - s.basis)) if s.accepted >= s.basis else s


def current(s: Learnt | None, now: float) -> Learnt | None:
    """What still holds: after a long quiet nothing does."""
    if s is None or now - max(s.used_at, s.resumes_at, s.reset_at) > QUIET:
        return None
    return s


def allowance(s: Learnt | None, now: float) -> int | None:
    """How many jobs may run at once this soon after a rest: one, then as many more as were answered; None: over."""
    if s is None or s.accepted >= STARTED:
        return None
    elapsed = now - s.resumes_at
    if elapsed >= RAMP:
        return None
    return max(1 + s.accepted, 1 << int(max(elapsed, 0.0) / _DOUBLING))


# -- what an event teaches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Event:
    """An event: the stated wait, what was accepted since the rest, and the rates that follow."""

    wait: float | None
    accepted: int
    elapsed: float
    mean: float
    drain: float | None
    peak: int
    now: float


def _learnt(s: Learnt, event: _Event, now: float, *, slots: bool | None) -> Learnt:
    wait = event.wait
    s = replace(s, basis=0)
    if wait is not None and (wait >= LONG or (s.kind == "quota" and now + wait - s.reset_at >= LONG)):
        return replace(s, kind="quota", quota=event.accepted, basis=event.accepted, reset_at=now + wait, rate=None)
    if slots or (slots is None and wait is None and s.kind == "free"):
        if s.kind != "slots":
            return replace(s, kind="slots", slots=max(1, event.peak), strikes=1, rests=0, basis=1)
        return replace(s, slots=max(1, s.slots - 1))
    if slots is None and wait is None and s.kind == "slots" and s.strikes < _STRIKES and s.slots > 1:
        return replace(s, slots=s.slots - 1, strikes=s.strikes + 1)
    return _rate(s, event)


def _rate(s: Learnt, event: _Event) -> Learnt:
    window = None
    if event.wait is not None and event.elapsed < min(_SOON, event.wait):  # a burst emptied it, its wait ends a window
        s = replace(s, window=_window(event.elapsed, event.wait))
        window = event.accepted / s.window
    elif event.wait is not None and event.elapsed < _WELL_WITHIN * s.window and s.window <= WINDOWS[1]:
        window = event.accepted / max(event.elapsed, s.window)
    ratio = event.drain / s.drain if event.drain and s.drain else 0.0
    quick = event.elapsed < _QUICK * (event.now - s.changed_at)
    least, most = _SAME if quick else _JUST_THE_SAME
    before, matched = s.matched, least < ratio < most
    s = replace(s, matched=matched)
    if s.kind != "rate":
        return _first_rate(s, event, window)
    same = matched and (before or s.drains > 0)  # three alike: two may be chance
    if s.ceiling is None and s.plateau:
        return _failed_probe(s, same=same)
    return _refused_below(s, event, window, same=same)


def _first_rate(s: Learnt, event: _Event, window: float | None) -> Learnt:
    """The first estimate; ``window``: the rate of a window that the refusal showed, if any."""
    if (
        event.wait is None
        and s.burst
        and abs(event.accepted - s.burst) <= max(1.0, _ALIKE * s.burst)
        and event.elapsed < WINDOWS[0]
    ):
        window = max(event.accepted, s.burst) / WINDOWS[0]  # alike: a window, and short, as it was full again
        s = replace(s, window=WINDOWS[0])
    estimate = window or (event.drain if event.wait is None else None) or max(event.mean, LOWEST)
    ceiling = window or (max(event.mean, LOWEST) if event.wait is not None else 4 * estimate)
    if not window and event.wait is not None and event.accepted < FEW:
        rate = max(estimate, 1 / (1 + event.wait))
        return replace(
            s, kind="rate", rate=rate, ceiling=None, plateau=rate, rests=_UNFOUNDED, windowed=False,
            basis=event.accepted,
        )  # fmt: skip
    is_counted = window is not None and s.window in WINDOWS
    return replace(
        s, kind="rate", rate=(CLOSE if window else MARGIN) * estimate, ceiling=ceiling, plateau=None,
        rests=_COUNTED if is_counted else 0 if event.elapsed < STRETCH else -2, windowed=window is not None,
        basis=event.accepted,
    )  # fmt: skip


def _failed_probe(s: Learnt, *, same: bool) -> Learnt:
    """Back to the rate before the probe, or near it. ``same``: the refusals empty one bucket at one rate."""
    rate, plateau = s.rate or LOWEST, s.plateau or LOWEST
    same = same and s.drains >= _DRAINS  # the mean is mostly our own pace: once is chance
    near = rate <= _NEAR * plateau
    if same:
        after = plateau
    elif near:
        after = max(plateau, _BACK * (s.good or 0.0))
    else:
        after = max(plateau, _FAR_BACK * (s.good or rate))
    ceiling = after / MARGIN if same or near else s.good or rate
    rests = max(0, s.rests) + 1 if near or same else 0
    return replace(s, rate=after, ceiling=max(ceiling, after), plateau=None, rests=rests, windowed=False)


def _refused_below(s: Learnt, event: _Event, window: float | None, *, same: bool) -> Learnt:
    rate, ceiling, basis = s.rate or LOWEST, s.ceiling or s.rate or LOWEST, 0
    if s.returned and s.good and event.now - s.step_at <= max(_SOON, s.window):  # later it has been confirmed
        return replace(
            s, rate=s.good, ceiling=s.good / MARGIN, plateau=None, rests=_RETURN_FAILED, returned=False, windowed=False
        )
    if not s.drains and event.now - max(s.step_at, s.resumes_at) >= CALM:
        s = replace(s, steady=rate)
    broken = s.broken + s.windowed
    windowed, drains, drain_rate = False, s.drains, s.drain_rate
    top = min(rate, window) if window else rate
    if window and broken <= _BROKEN:
        estimate, basis, windowed = top, event.accepted, True
    elif same and event.drain:
        top = min(top, 1.04 * event.drain)
        estimate = min(top, event.drain)
        drains, drain_rate = drains + 1, event.drain
    else:
        least = top * (1 - 1 / (2 + event.accepted / _CHANCE))
        estimate = min(top, max(event.drain or 0.0, s.good or 0.0, least))
    rests = 0 if s.windowed else max(0, s.rests)  # it was not so well counted
    after = (CLOSE if windowed else MARGIN) * estimate
    if top < _CHANGED * ceiling:
        rests = 0
        if s.steady > after:
            s = replace(s, former=s.steady, dropped_at=event.now, steady=0.0)
    return replace(
        s, rate=after, ceiling=max(top, after), plateau=None, rests=rests, broken=broken, windowed=windowed,
        drains=drains, drain_rate=drain_rate, basis=basis,
    )  # fmt: skip


def _window(elapsed: float, wait: float) -> float:
    """From the burst's start to the end that the wait states; a hint in whole seconds is up to a second too long."""
    whole = abs(wait - round(wait)) < _WHOLE
    least, most = elapsed + wait - SLACK - (1.0 if whole else 0.0), (elapsed + wait) * 1.02
    return next((w for w in WINDOWS if least <= w <= most), elapsed + wait)


# -- what answers teach --------------------------------------------------------------------------------------


def _late(s: Learnt, r: Answers, now: float, bounds: Bounds | None) -> Learnt:
    """Answers of the generation before: the estimate was made from too few."""
    if s.kind == "slots" and s.basis and now < s.changed_at + LATEST:
        # What passed and was not answered when the refusal came was in flight beside it: that many fit.
        basis = s.basis + (0 if r.peak else r.accepted)
        return replace(s, basis=basis, slots=max(s.slots + r.peak, basis - 1))
    if not s.basis or now > max(s.changed_at + LATE, s.resumes_at):
        return s
    if s.kind == "quota":
        return replace(s, quota=s.quota + r.accepted, basis=s.basis + r.accepted)
    if s.kind != "rate" or s.rate is None:
        return s
    basis = s.basis + r.accepted
    factor = basis / s.basis
    ceiling = None if s.ceiling is None else s.ceiling * factor
    return _bounded(replace(s, basis=basis, rate=s.rate * factor, ceiling=ceiling), bounds)


def _counted(s: Learnt, accepted: int, now: float) -> Learnt:
    """The state with so many more accepted answers in its counts."""
    count, since, count_before, since_before = s.count, s.since, s.count_before, s.since_before
    began = s.began
    if not s.accepted:
        began = since = max(s.resumes_at, since, now - _REPORTED)
    elif now - since > STRETCH:
        count_before, since_before, count, since = count, since, 0, now
    return replace(
        s, accepted=s.accepted + accepted, began=began, uses=s.uses + accepted, count=count + accepted, since=since,
        count_before=count_before, since_before=since_before, used_at=now,
    )  # fmt: skip


def _is_alone(s: Learnt, r: Refusal) -> bool:
    """Whether all that was accepted in this generation is what the refusal itself has counted."""
    return r.accepted > 0 and not s.accepted


def _mean(s: Learnt, r: Refusal, now: float) -> float:
    """The accepted rate of the last stretch or two."""
    span = now - max(s.since_before if s.count_before else s.since, s.resumes_at)
    if _is_alone(s, r):
        span = min(span, r.seconds)
    return (s.count + s.count_before + r.accepted) / max(1.0, span)


def _drain(s: Learnt, r: Refusal, now: float) -> float | None:
    """The accepted rate since the event before, rest and all; None if nothing was accepted or it is too long ago."""
    accepted = s.accepted + r.accepted
    if not accepted or now - s.changed_at >= _DRAIN:
        return None
    return accepted / max(now - s.changed_at, 0.001)


def _grown(s: Learnt, now: float) -> Learnt | None:
    """The state after the next step of its rate, if one is due; None if its limit is forgotten."""
    rate = s.rate or LOWEST
    since = now - max(s.step_at, s.resumes_at)
    is_far = s.ceiling is not None and rate < s.ceiling / 3  # from what was refused
    answers = 2 if is_far or s.rests == _UNFOUNDED else ANSWERS
    if since < max(1.0, min(answers / rate, SLOWEST), min(s.window, WINDOWS[1])):
        return s
    if s.ceiling is not None and rate < MARGIN * s.ceiling * 0.999:
        step = WIDEST if is_far else STEP
        return replace(s, rate=min(MARGIN * s.ceiling, rate * step), good=rate, step_at=now, uses=0)
    if s.ceiling is not None and since < _calm(s, now):
        return s
    if s.uses / since < rate / 2 and now - s.changed_at > FORGOTTEN:
        return None
    if s.uses / since < rate * USED:  # that proves nothing about more
        return replace(s, step_at=now, uses=0, step=PROBE)
    return _probed(s, rate, now)


def _probed(s: Learnt, rate: float, now: float) -> Learnt:
    """A probe begins, or takes its next step."""
    if s.ceiling is None and _has_risen(s, rate, now):
        return replace(
            s, rate=s.former, good=rate, step_at=now, uses=0, step=PROBE, ceiling=s.former / MARGIN, plateau=None,
            former=0.0, dropped_at=0.0, returned=True,
        )  # fmt: skip
    drains = s.drains
    if s.ceiling is not None:
        drains = 0 if rate > 1.15 * s.drain_rate else drains
        steady = 0.0 if drains else rate
        s = replace(s, plateau=rate, steady=steady, ceiling=None, step=PROBE, returned=False)
    widest = WIDEST_DRAIN if drains >= _DRAINS else WIDEST
    return replace(
        s, rate=rate * s.step, good=rate, step_at=now, uses=0, step=min(widest, s.step**FASTER), drains=drains,
        windowed=False,
    )  # fmt: skip


def _calm(s: Learnt, now: float) -> float:
    """Seconds at a plateau until the next probe."""
    calm = min(LONGEST_CALM, CALM * 2.0**s.rests)
    return min(calm, max(CALM_AFTER_DROP, CALM_SHARE * (now - s.dropped_at))) if s.dropped_at else calm


def _has_risen(s: Learnt, rate: float, now: float) -> bool:
    """Whether a probe shows that a limit that dropped not long ago rises again."""
    return now - s.dropped_at < FORGOTTEN and SURE * (s.plateau or rate) < rate < s.former


def _more_slots(s: Learnt, now: float) -> Learnt:
    strikes = 0 if s.accepted >= 3 * s.slots and now - s.resumes_at > _SOON else s.strikes  # it lasts: slots they are
    if now - max(s.step_at, s.resumes_at) > min(LONGEST_CALM, CALM * 2.0**s.rests):
        return replace(s, strikes=strikes, slots=s.slots + 1, step_at=now, rests=s.rests + 1)
    return s if strikes == s.strikes else replace(s, strikes=strikes)


def _bounded(s: Learnt, bounds: Bounds | None) -> Learnt:
    if s.kind != "rate" or s.rate is None:
        return s
    least, most = bounds or (LOWEST, float("inf"))
    rate = min(max(s.rate, least, LOWEST), most)
    return s if rate == s.rate else replace(s, rate=rate, ceiling=s.ceiling and max(s.ceiling, rate))
