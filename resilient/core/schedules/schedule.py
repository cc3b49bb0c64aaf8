"""What a recurring job is, as values: its stored form, and which of its ticks run now.

The row of a schedule holds everything a tick needs (`Spec`), the encoded payload included, so that every
worker that knows the schedule by name ticks it alike: while a new version is rolled out, the declaration that
was written last counts for all. Times come from `core.schedules.cron`; nothing here knows a database or a clock.

Overlap: with "skip" a schedule has at most one unfinished job. That is the default, because a job that waits
for a stopped account would otherwise gather one more behind it at every tick.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from resilient.core.base.errors import InvalidInput
from resilient.core.jobs.records import fields_of
from resilient.core.schedules import cron
from resilient.core.schedules.cron import CatchUp, Ticks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID


Overlap: TypeAlias = Literal["skip", "allow"]
CATCH_UPS: Final = ("latest", "skip", "all")
OVERLAPS: Final = ("skip", "allow")
RESERVED_TAGS: Final = frozenset({"schedule", "tick"})
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+/*-]{1,200}")
_CHORE: Final = "engine:"  # rows of the same table that are no schedules
_LONGEST_KEY: Final = 220  # a tick's stamp must fit behind it
_INSTANT: Final = timedelta(microseconds=1)
NEAR: Final = timedelta(hours=1)  # a next tick no further ahead is never doubted


@dataclass(frozen=True, slots=True)
class Template:
    """The job of each tick, checked and encoded. ``payload`` and ``tags`` are JSON; times are in seconds."""

    resource_key: str
    payload: str
    payload_version: int = 1
    priority: int = 0
    max_attempts: int | None = None
    expires_in: float | None = None
    tags: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """A schedule as its row keeps it. ``jitter``: each job starts up to that many seconds later.

    ``for_each``: which accounts have ticks of their own, a pattern or a function in words; "" for a schedule of one
    resource. ``spread``: over how much of the time behind a tick; None: over all of it.
    """

    ticks: Ticks
    template: Template
    catch_up: CatchUp = "latest"
    overlap: Overlap = "skip"
    jitter: float = 0.0
    for_each: str = ""
    spread: timedelta | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "ticks": self.ticks.to_json(),
            "job": asdict(self.template),
            "catch_up": self.catch_up,
            "overlap": self.overlap,
            "jitter": self.jitter,
            **({} if not self.for_each else {"for_each": self.for_each, "spread": _seconds(self.spread)}),
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Spec:
        """Back from `to_json`. What a newer version added is left out."""
        job = {name: value for name, value in doc["job"].items() if name in Template.__slots__}
        return cls(
            Ticks.from_json(doc["ticks"]),
            Template(**job),
            doc["catch_up"],
            doc["overlap"],
            doc["jitter"],
            doc.get("for_each", ""),
            None if (spread := doc.get("spread")) is None else timedelta(seconds=spread),
        )


def digest(kind: str, doc: Mapping[str, Any]) -> str:
    """The same for equal declarations; ``doc`` is `Spec.to_json`, or what a row has of it."""
    return blake2b(json.dumps([kind, doc], sort_keys=True).encode(), digest_size=8).hexdigest()


def _seconds(spread: timedelta | None) -> float | None:
    return None if spread is None else spread.total_seconds()


@dataclass(frozen=True, slots=True)
class Served:
    """The ticks that run now, oldest first, and when the next one is."""

    ticks: list[datetime]
    next_at: datetime


def serve(spec: Spec, next_at: datetime, now: datetime) -> Served:
    """What becomes of the ticks from ``next_at`` (the first one nobody served) until ``now``."""
    due = cron.missed(spec.ticks, next_at - _INSTANT, now, spec.catch_up)
    return Served(due, cron.next_after(spec.ticks, now))


def is_out_of_reach(spec: Spec, next_at: datetime, now: datetime) -> bool:
    """Whether a next tick was reckoned by a clock that ran ahead, and is not waited for.

    A clock that is right has one tick before it. One that is set back by less than a period, or than an hour, is waited
    for: what ticked shall not tick again.
    """
    if next_at <= now + NEAR:
        return False
    return next_at > cron.next_after(spec.ticks, cron.next_after(spec.ticks, now))


def unique_key(name: str, spec: Spec, tick: datetime | None, account: str = "") -> str | None:
    """The unique key of a tick's job: of the schedule (and account), or of the tick where jobs may overlap.

    ``tick`` is None for a job that was asked for by hand.
    """
    of = f"schedule:{name}:{account}" if account else f"schedule:{name}"
    if len(of) > _LONGEST_KEY:
        of = f"schedule:{blake2b(of.encode(), digest_size=16).hexdigest()}"
    if spec.overlap == "skip":
        return of
    return None if tick is None else f"{of}:{stamp(tick)}"


def tags(name: str, spec: Spec, tick: datetime | None) -> dict[str, str]:
    """The tags of a tick's job: those declared, the schedule's name and the tick's time."""
    own = {"schedule": name} if tick is None else {"schedule": name, "tick": stamp(tick)}
    return {**(spec.template.tags or {}), **own}


def stamp(tick: datetime) -> str:
    """A tick as text, in UTC."""
    return tick.astimezone(UTC).isoformat().replace("+00:00", "Z")


def check_name(name: str) -> str:
    """Return ``name`` if it can name a schedule, else raise `InvalidInput`."""
    if not _NAME.fullmatch(name) or name.startswith(_CHORE):
        raise InvalidInput(
            f"{name!r} cannot name a schedule: give name= with at most 200 letters, digits and ._:@+/*-,"
            f" not beginning with {_CHORE!r}"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """One schedule as it stood when it was read. Times are aware and in UTC.

    ``last_at`` is the last tick that was served, ``last_job`` the job it brought, ``last_state`` that job's
    state (None: no job, or pruned since). ``removed``: the program no longer declares it. A schedule ``for_each`` of
    many accounts stands for all of them: it has their number (``accounts``), the first ``next_at``, and the latest of
    the other times.
    """

    name: str
    kind: str
    timing: str
    resource_key: str
    catch_up: str
    overlap: str
    next_at: datetime
    last_at: datetime | None = None
    last_job: UUID | None = None
    last_state: str | None = None
    succeeded_at: datetime | None = None
    paused: bool = False
    removed: bool = False
    for_each: str = ""
    accounts: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


def info(name: str, kind: str, spec: Spec, next_at: datetime, **rest: Any) -> ScheduleInfo:
    """A schedule for people."""
    return ScheduleInfo(
        name=name,
        kind=kind,
        timing=str(spec.ticks),
        resource_key=spec.template.resource_key,
        catch_up=spec.catch_up,
        overlap=spec.overlap,
        next_at=next_at,
        for_each=spec.for_each,
        accounts=0 if spec.for_each else None,
        **rest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledAccount:
    """One account of a schedule ``for_each`` account, as it stood when it was read."""

    resource_key: str
    next_at: datetime
    last_at: datetime | None
    last_job: UUID | None
    last_state: str | None
    succeeded_at: datetime | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


# -- spread -----------------------------------------------------------------------------------------------------------
#
# Ticks of many accounts: each has its own, at its own place between two ticks of the schedule.
#
# The place is a hash of schedule and account: the same for every worker and every day, even over the span, so that ten
# thousand accounts are no herd. An account's tick lies at or behind the schedule's tick it belongs to, and before the
# next one; so each tick of the schedule brings each account one of its own.

_WHOLE: Final = 2.0**64


def place(name: str, key: str) -> float:
    """Where between two ticks of schedule ``name`` the account ``key`` has its own: from 0 to below 1."""
    digest = blake2b(f"{name}\x1f{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / _WHOLE


@dataclass(frozen=True, slots=True)
class Window:
    """The ticks of a timing around now, each with the time over which accounts are spread behind it.

    Made once for a batch of accounts: walking a cron expression costs more than all of them.
    """

    ticks: tuple[tuple[datetime, timedelta], ...]
    now: datetime

    def serve(self, spec: Spec, next_at: datetime, place: float) -> Served:
        """What becomes of an account's ticks from ``next_at`` until now, and when its next one is."""
        own = [start + span * place for start, span in self.ticks]
        due = [tick for tick in own if next_at <= tick <= self.now]
        if spec.catch_up == "all":
            due = due[-cron.MOST :]
        elif spec.catch_up == "skip":
            due = [tick for tick in due[-1:] if self.now - tick <= cron.GRACE]
        else:
            due = due[-1:]
        return Served(due, next(tick for tick in own if tick > self.now))


def window(spec: Spec, since: datetime, now: datetime) -> Window:
    """The ticks that accounts due since ``since`` may have; of many missed ones the newest."""
    most = cron.MOST + 1 if spec.catch_up == "all" else 2
    starts = cron.back(spec.ticks, now, most, since)
    for _ in range(2):  # one that lies ahead, and the end of its span
        starts.append(cron.next_after(spec.ticks, starts[-1]))
    spread = spec.spread
    return Window(tuple((a, b - a if spread is None else min(b - a, spread)) for a, b in pairwise(starts)), now)


def silent_before(ticks: Ticks, now: datetime, periods: int) -> datetime:
    """The time since which an account without a success has had none for ``periods`` whole periods, at any place."""
    return cron.back(ticks, now, periods + 2)[0]
