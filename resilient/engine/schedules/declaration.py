"""The declaration of a recurring job, and the job that each of its ticks enqueues.

A `Schedule` is a value like a handler: it registers nowhere and is listed in ``Resilient(schedules=[...])``. A mistake
in it raises an error when the program starts, with the schedule's name in front.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from uuid_utils.compat import uuid7

from resilient.core.base import resource_key
from resilient.core.base.errors import BadResourceKey, InvalidInput, SetupError
from resilient.core.base.misfit import explained_class
from resilient.core.gates.rate_limit import seconds
from resilient.core.schedules import cron, schedule
from resilient.core.schedules.schedule import Spec, Template
from resilient.engine.ground.encoder import JobRequest, _tags
from resilient.engine.ground.kinds import Kind
from resilient.store.jobs.columns import NewJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from resilient.core.schedules.cron import CatchUp, Ticks
    from resilient.core.schedules.schedule import Overlap
    from resilient.engine.ground.encoder import Encoder
    from resilient.store.schedules.ticks import Row


_LONGEST: Final = timedelta(days=3653)
ForEach: TypeAlias = str | Collection[str] | Callable[[], Iterable[str] | AsyncIterable[str] | Awaitable[Iterable[str]]]


@explained_class
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One recurring job of a program, listed in ``Resilient(schedules=[...])``.

    ``handler`` is a declared handler or the name of its kind. Give either ``cron`` (five fields or a name such as
    ``@daily``, in the IANA time zone ``timezone``; daylight saving as `core.schedules.cron` says) or ``every``
    (seconds, a timedelta or text such as ``"1h"``, counted from ``anchor``, by default midnight UTC). ``name`` is by
    default ``kind@resource_key``; a schedule under a new name is a new schedule.

    Instead of ``resource_key``, ``for_each`` gives each account ticks of its own: a pattern (``"github/*"``) means the
    active connections, those that come later too; an app that keeps the credentials itself gives a function (plain,
    async, or a generator) that returns the accounts' resource keys, or a collection of them. ``spread`` is the time
    after a tick over which the accounts' ticks are spread, the same for an account every day: a span, True (the whole
    time until the next tick; the default of ``every``) or False (all at once; the default of ``cron``).

    ``catch_up`` says what becomes of ticks that no worker served in time: "latest" runs one job for all of them, "skip"
    none (unless less than a minute late), "all" one each, at most 100. ``overlap``: "skip" enqueues no job while the
    last one is unfinished, "allow" does. ``jitter`` (seconds, timedelta or text) starts each job up to that much later.
    ``priority``, ``max_attempts``, ``expires_in`` and ``tags`` are those of each job, which also gets the tags
    ``schedule`` and ``tick``.

    Raises `BadCron` or `InvalidInput`, naming the schedule.
    """

    handler: Kind[Any] | str = field(kw_only=False)
    payload: Any = field(default=None, kw_only=False)
    resource_key: str = ""
    for_each: ForEach | None = None
    spread: bool | str | float | timedelta | None = None
    cron: str | None = None
    every: str | float | timedelta | None = None
    timezone: str = "UTC"
    anchor: datetime | None = None
    name: str = ""
    catch_up: CatchUp = "latest"
    overlap: Overlap = "skip"
    jitter: str | float | timedelta = 0.0
    priority: int = 0
    max_attempts: int | None = None
    expires_in: timedelta | float | None = None
    tags: Mapping[str, str] | None = None
    ticks: Ticks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.handler, (Kind, str)):
            raise TypeError("a handler or its kind")  # explained by the class's decorator
        if self.for_each is None:
            if not self.resource_key:
                raise BadResourceKey(
                    f"schedule {self.name or self.kind!r}: say which account its jobs go through"
                    " (resource_key='github/acct-7'; work without an API takes any key, such as 'local'), or for_each="
                    " for one schedule of many accounts (for_each='github/*')"
                )
            resource_key.check(self.resource_key)
        if not self.name:
            object.__setattr__(self, "name", f"{self.kind}@{self.resource_key or self.accounts}")
        schedule.check_name(self.name)
        with _naming(self.name):
            self._check()
            self._check_accounts()
            ticks = cron.ticks(cron=self.cron, every=self.every, zone=self.timezone, anchor=self.anchor)
        object.__setattr__(self, "ticks", ticks)

    def _check(self) -> None:
        for option, value, choices in (
            ("catch_up", self.catch_up, schedule.CATCH_UPS),
            ("overlap", self.overlap, schedule.OVERLAPS),
        ):
            if value not in choices:
                raise InvalidInput(f"{option}={value!r} is not one of {', '.join(choices)}")
        if self.catch_up == "all" and self.overlap == "skip":
            raise InvalidInput(
                "catch_up='all' brings several jobs at once, which overlap='skip' forbids: say overlap='allow'"
            )
        if self.jitter in (0, timedelta()):
            object.__setattr__(self, "jitter", 0.0)
        else:
            object.__setattr__(self, "jitter", _span_of("jitter", self.jitter))
        if reserved := schedule.RESERVED_TAGS & set(self.tags or ()):
            raise InvalidInput(f"the tag {min(reserved)!r} is written by the schedule itself")

    def _check_accounts(self) -> None:
        if self.for_each is None:
            if self.spread is not None:
                raise InvalidInput("spread= is for schedules for_each account; give one resource a jitter=")
            return
        if self.resource_key:
            raise InvalidInput("give resource_key, or for_each for many accounts, not both")
        if isinstance(self.for_each, str):
            resource_key.check_pattern(self.for_each)
            if not ("*" in self.for_each or "?" in self.for_each):
                raise InvalidInput(f"for_each={self.for_each!r} is one key: say resource_key=, or a pattern with *")
        elif not callable(self.for_each) and not isinstance(self.for_each, Collection):
            raise InvalidInput(
                "for_each= takes a pattern, a function that tells resource keys, or a collection of them"
            )
        elif not callable(self.for_each):
            for key in self.for_each:
                resource_key.check(key)
        if not isinstance(self.spread, bool) and self.spread is not None:
            object.__setattr__(self, "spread", timedelta(seconds=_span_of("spread", self.spread)))

    def _span(self) -> timedelta | None:
        """The time over which its accounts' ticks are spread; None: until the next tick."""
        spread = self.cron is None if self.spread is None else self.spread
        if isinstance(spread, bool):
            return None if spread else timedelta()
        assert isinstance(spread, timedelta)  # noqa: S101 - __post_init__ made it one
        return spread

    @property
    def accounts(self) -> str:
        """``for_each`` as text: the pattern, the function's name or "listed"; empty without it."""
        return _source_text(self.for_each)

    @property
    def kind(self) -> str:
        """The kind of its jobs."""
        return self.handler.kind if isinstance(self.handler, Kind) else self.handler

    def spec(self, encoder: Encoder) -> Spec:
        """The part of it that its row stores. Raises the error that enqueueing its job would raise."""
        with _naming(self.name):
            row = encoder.encode(
                self.kind, self.payload, self.resource_key or "any", priority=self.priority, tags=self.tags,
                max_attempts=self.max_attempts, expires_in=self.expires_in,
            ).row  # fmt: skip
        expires_in = self.expires_in.total_seconds() if isinstance(self.expires_in, timedelta) else self.expires_in
        template = Template(
            resource_key=self.resource_key, payload=row.payload, payload_version=row.payload_version,
            priority=row.priority, max_attempts=row.max_attempts, expires_in=expires_in,
            tags=dict(self.tags) if self.tags else None,
        )  # fmt: skip
        return Spec(
            self.ticks, template, self.catch_up, self.overlap, float(self.jitter),  # type: ignore[arg-type]
            self.accounts, self._span() if self.accounts else None,
        )  # fmt: skip


def _span_of(option: str, value: str | float | timedelta) -> float:
    """A span in seconds. Raises `InvalidInput` for more than ten years: a time that far ahead may fit no database."""
    span = seconds(value)
    if span > _LONGEST.total_seconds():
        raise InvalidInput(f"{option}={value!r} is longer than ten years")
    return span


def _source_text(source: ForEach | None) -> str:
    """``for_each`` as a row stores it and a person reads it."""
    if source is None or isinstance(source, str):
        return source or ""
    return getattr(source, "__name__", type(source).__name__).strip("<>") if callable(source) else "listed"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the schedule's name in front of an error's text."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(f"schedule {name!r}: {error}") from None


def by_name(declared: Iterable[Schedule]) -> dict[str, Schedule]:
    """Schedules by name; raises `SetupError` for two of one name or something that is no schedule."""
    schedules: dict[str, Schedule] = {}
    for one in declared:
        if not isinstance(one, Schedule):
            raise SetupError(f"{one!r} is not a schedule: write Schedule(handler, every='1h', resource_key=...)")
        if one.name in schedules:
            raise SetupError(f"two schedules are called {one.name!r}: give one another name=")
        schedules[one.name] = one
    return schedules


def job_of(row: Row, tick: datetime | None, roll: float, *, account: str = "") -> JobRequest:
    """The job of a tick; without a ``tick``, of a run by hand. ``account``: its key, if the schedule is `for_each`.

    ``roll``, from 0 to 1, is the job's part of the jitter.
    """
    t, key = row.spec.template, schedule.unique_key(row.name, row.spec, tick, account)
    job = NewJob(
        id=uuid7(), kind=row.kind, resource_key=account or t.resource_key, payload=t.payload,
        payload_version=t.payload_version, priority=t.priority, max_attempts=t.max_attempts,
        delay=row.spec.jitter * roll or None,
        expires_in=t.expires_in,
        unique_key=key, unique_until=None if key is None else "finish",
        tags=_tags(schedule.tags(row.name, row.spec, tick)),
    )  # fmt: skip
    return JobRequest(job)
