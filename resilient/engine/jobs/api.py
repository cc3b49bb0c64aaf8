"""`app.jobs`: look at jobs and change them, one or thousands; `app.sync.jobs` is the synchronous facade.

What is meant is worked out here, done by `store/jobs/queries.py` and `changes.py`. Changes run in batches, each in a
transaction of its own; with ``session=`` all in the caller's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from uuid import UUID

from resilient.core.base.errors import InvalidInput, JobNotFound
from resilient.core.base.instants import in_utc
from resilient.core.base.misfit import explained_calls
from resilient.core.base.phrases import counted
from resilient.core.gates.rate_limit import Limit
from resilient.core.inspect.why import Why, why_job
from resilient.core.jobs.records import Cancelled, Deleted, Discarded, Edited, Retried
from resilient.core.jobs.states import JobState
from resilient.engine.ground.audited import audited
from resilient.engine.ground.kinds import Kind
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.engine.jobs import queue
from resilient.engine.jobs.waiting import Ends, checked_timeout, not_over, require_waitable
from resilient.store.inspect import why
from resilient.store.jobs import queries
from resilient.store.jobs.changes import UNSET, Cancel, Delete, Discard, Edit, Retry, Sweep, Unset
from resilient.store.jobs.filters import Criteria, JobFilter, as_id

if TYPE_CHECKING:
    import builtins
    from datetime import datetime
    from typing import Unpack

    from sqlalchemy import URL, Connection

    from resilient.core.jobs.records import AttemptInfo, Count, JobInfo
    from resilient.engine.ground.encoder import Encoder
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect
    from resilient.store.jobs.queries import Order


Which: TypeAlias = "UUID | str | Iterable[UUID | str] | JobFilter | Criteria | None"
_ANY: Final[Kind[Any]] = Kind("any")


def filter_of(which: Which, criteria: Criteria, *, everything: bool = False) -> JobFilter:
    """The jobs that are meant: an id, several, a filter, or criteria.

    Raises `InvalidInput` for both at once, and for nothing at all unless ``everything`` is said.
    """
    if which is not None and criteria:
        raise InvalidInput("give job ids or a filter, not both")
    if which is None or isinstance(which, (Mapping, JobFilter)):
        made = which if isinstance(which, JobFilter) else JobFilter.of(cast("Criteria", which or criteria))
        if made == JobFilter() and not everything:
            raise InvalidInput("this would mean every job: give an id or a filter, or say everything=True")
        return made
    if not isinstance(which, (str, UUID, Iterable)):
        raise InvalidInput(f"which takes a job's id, several ids or a filter, not {type(which).__name__}")
    ids = [which] if isinstance(which, (str, UUID)) else list(which)
    return JobFilter(ids=tuple(as_id(i) for i in ids))


def single(which: Which) -> UUID | None:
    """The one job that is meant, if it was named by its id alone."""
    return as_id(which) if isinstance(which, (str, UUID)) else None


def require_existing(which: Which, sweep: Sweep) -> Sweep:
    """The sweep, if the one job that was named exists; else `JobNotFound`."""
    if not sweep.looked_at and (id_ := single(which)) is not None:
        raise JobNotFound(queries.missing(id_))
    return sweep


def spacing_of(rate: float | str | None) -> timedelta | None:
    """The distance of two jobs at a rate such as ``"10/s"``, ``"600/min"`` or 10 (a second)."""
    if rate is None:
        return None
    limit = Limit.parse(rate) if isinstance(rate, str) else Limit(rate, per=1)
    try:
        return timedelta(seconds=limit.per / limit.rate)
    except OverflowError:
        raise InvalidInput(f"rate={rate!r}: two jobs would be further apart than the calendar reaches") from None


def plan_edit(
    c: Connection, d: Dialect, encoder: Encoder, f: JobFilter, values: Mapping[str, Any], *, new_operation: bool
) -> Edit:
    """The edit, with every value checked as an enqueue would check it.

    Raises `InvalidInput` (one of its kinds); a payload is checked against the one kind that ``f`` means.
    """
    changes = {name: value for name, value in values.items() if value is not UNSET}
    if not changes:
        raise InvalidInput("nothing to edit: give payload, priority, run_at, delay, max_attempts, tags or expires_at")
    payload = changes.pop("payload", UNSET)
    checked = encoder.encode(_ANY, None, "any", **{name: value for name, value in changes.items() if value is not None})
    if changes.pop("delay", None) is not None:
        changes["run_at"] = d.now(c) + timedelta(seconds=checked.row.delay or 0)
    for name in ("priority", "run_at"):
        if name in changes and changes[name] is None:
            raise InvalidInput(f"{name} cannot be None")
    for name in ("run_at", "expires_at"):
        if changes.get(name) is not None:
            changes[name] = in_utc(changes[name])
    if "tags" in changes:
        changes["tags"] = json.loads(checked.row.tags) if checked.row.tags else None
    if payload is not UNSET:
        row = encoder.encode(_kind_of(c, d, encoder, f), payload, "any").row
        changes |= {"payload": json.loads(row.payload), "payload_version": row.payload_version}
        changes["undo_payload"] = partial(_undo_payload, encoder, payload)
    return Edit(new_operation=new_operation, **changes)


def _undo_payload(encoder: Encoder, payload: Any, kind: str) -> tuple[str, int]:
    """The same payload for the job that undoes a step, as the workflow wrote it for that kind."""
    undo = encoder.kind_of(kind)
    return encoder.text(undo, payload), undo.version


def _kind_of(c: Connection, d: Dialect, encoder: Encoder, f: JobFilter) -> Kind[Any]:
    """The declaration of the one kind that the filter means."""
    kinds = set(f.kind)
    if f.ids is not None and not kinds:
        kinds = {job.kind for job in queries.page(c, d, f, limit=queries.PAGE_LIMIT, payloads=False)}
        if not kinds:
            raise JobNotFound(queries.missing(*f.ids))
    if len(kinds) != 1:
        raise InvalidInput("a payload fits one kind of job: filter by one kind, or name jobs of one kind")
    return encoder.kind_of(kinds.pop())


_MAY_BE_SENT: Final = (
    "job {id} has run before, so its payload may have been sent under its idempotency key: say"
    " new_operation=True to send the new payload as a new operation under a new key"
)


@explained_calls("app.jobs")
class Jobs:
    """Jobs of one app.

    Where a method takes ``which``, that is a job's id, several ids, a `JobFilter` or a mapping of criteria;
    the methods that take criteria as keyword arguments (``state="dead", resource="github/*"``; see
    `JobFilter`) accept those instead. ``limit`` bounds how many jobs are looked at, ``dry_run`` only counts.
    Raises `InvalidInput` for a wrong filter and `JobNotFound` for a single id that does not exist.
    """

    def __init__(self, ground: Ground, listen_url: URL | None = None, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)
        self._listen_url, self._ends = listen_url, Ends(ground, listen_url)

    @property
    def sync(self) -> SyncJobs:
        """The same for synchronous programs."""
        return SyncJobs(Jobs(self._ground, self._listen_url, here=True))

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, job_id: UUID | str, *, session: CallersSession = None) -> JobInfo:
        """One job."""
        return await self._db.read(session, queries.require, as_id(job_id))

    async def list(
        self,
        *,
        limit: int = 100,
        after: UUID | str | None = None,
        order: Order = "newest",
        payloads: bool = True,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> builtins.list[JobInfo]:
        """A page of jobs; the next one is ``after`` the last of these.

        ``payloads=False`` leaves payload, progress and result of each, up to 1 MiB and more, in the database.
        """
        f, last = JobFilter.of(criteria), None if after is None else as_id(after)
        return await self._db.read(session, queries.page, f, limit=limit, after=last, order=order, payloads=payloads)

    async def count(
        self,
        *,
        limit: int = queries.COUNT_LIMIT,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> Count:
        """How many, counted up to ``limit``; beyond that it prints as ``10000+`` and has ``more``."""
        return await self._db.read(session, queries.count, JobFilter.of(criteria), limit=limit)

    async def attempts(
        self, job_id: UUID | str, *, limit: int = 100, session: CallersSession = None
    ) -> builtins.list[AttemptInfo]:
        """The latest executions that did not simply succeed, oldest first."""
        return await self._db.read(session, queries.attempts, as_id(job_id), limit=limit)

    async def why(self, job_id: UUID | str, *, session: CallersSession = None) -> Why:
        """Why a job is not running, and when it will."""
        return await self._db.read(session, _why, self._ground, as_id(job_id))

    async def wait(self, job_id: UUID | str, *, timeout: float | None = None) -> JobInfo:  # noqa: ASYNC109 - public
        """Wait until a job has ended, and return it: succeeded (with its ``result``), dead or cancelled.

        ``timeout`` is in seconds; by default it waits for ever. Any number may wait at once: they share one listener
        and one look. Raises `JobNotOver`, a TimeoutError, if the job has not ended by then, and `InvalidInput` in a
        handler that waits for its own job, or with its own transaction open.
        """
        id_, seconds = as_id(job_id), checked_timeout(timeout)
        require_waitable(id_)
        if self._db.here:
            info = self._ends.wait_here(id_, seconds)
            if info is not None:
                return info
        else:
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await self._ends.wait(id_)
            except TimeoutError:
                if not limit.expired():
                    raise
        if (now := await self.get(id_)).finished_at is not None:
            return now
        raise not_over(now, seconds) from None

    # -- changing --------------------------------------------------------------------------------------------

    @audited("jobs cancel")
    async def cancel(
        self,
        which: Which = None,
        *,
        everything: bool = False,
        limit: int | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> Cancelled:
        """End waiting jobs at once; ask the workers of running ones to stop them."""
        f = filter_of(which, criteria, everything=everything)
        return Cancelled.of(await self._sweep(which, Sweep(Cancel(), f, limit, dry_run), session))

    @audited("jobs edit")
    async def edit(
        self,
        which: Which,
        *,
        payload: Any = UNSET,
        priority: int | Unset = UNSET,
        run_at: datetime | Unset = UNSET,
        delay: timedelta | float | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        expires_at: datetime | Unset | None = UNSET,
        tags: Mapping[str, str] | Unset | None = UNSET,
        new_operation: bool = False,
        limit: int | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
    ) -> Edited:
        """Give waiting jobs other values, and dead ones before they are retried; ``tags`` replaces them all.

        A payload that may have been sent is only replaced with ``new_operation=True``, under a new
        idempotency key.
        """
        values = {
            "payload": payload, "priority": priority, "run_at": run_at, "delay": delay,
            "max_attempts": max_attempts, "expires_at": expires_at, "tags": tags,
        }  # fmt: skip
        f = filter_of(which, {})
        change = await self._db.read(session, plan_edit, self._ground.encoder, f, values, new_operation=new_operation)
        return _edited(which, await self._sweep(which, Sweep(change, f, limit, dry_run), session))

    @audited("jobs retry")
    async def retry(
        self,
        which: Which = None,
        *,
        rate: float | str | None = None,
        repeat_ambiguous: bool = False,
        new_operation: bool = False,
        everything: bool = False,
        limit: int | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> Retried:
        """Start finished jobs over with a fresh budget; by a filter without states: dead ones.

        ``rate`` (``"10/s"``) spreads their start. Jobs whose last request may have taken effect stay unless
        ``repeat_ambiguous``; ``new_operation`` runs them under a new idempotency key.
        """
        f = filter_of(which, criteria, everything=everything)
        change = Retry(repeat_ambiguous, new_operation, spacing_of(rate))
        return Retried.of(await self._sweep(which, Sweep(change, f, limit, dry_run), session))

    @audited("jobs discard")
    async def discard(
        self,
        which: Which = None,
        *,
        everything: bool = False,
        limit: int | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> Discarded:
        """Give dead jobs up: they become cancelled, with their error and history."""
        f = filter_of(which, criteria, everything=everything)
        return Discarded.of(await self._sweep(which, Sweep(Discard(), f, limit, dry_run), session))

    @audited("jobs delete")
    async def delete(
        self,
        which: Which = None,
        *,
        everything: bool = False,
        limit: int | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
        **criteria: Unpack[Criteria],
    ) -> Deleted:
        """Delete finished jobs and their history for good."""
        f = filter_of(which, criteria, everything=everything)
        return Deleted.of(await self._sweep(which, Sweep(Delete(), f, limit, dry_run), session))

    async def _sweep(self, which: Which, sweep: Sweep, session: CallersSession) -> Mapping[str, int]:
        def step(c: Connection, d: Dialect) -> bool:
            if isinstance(sweep.change, Cancel | Discard) and not sweep.dry_run:
                sweep.change.later = queue.ends(session, d, self._ground.poke)
            return sweep.step(c, d)

        do, done = self._db.read if sweep.dry_run else self._db.write, 0
        try:
            while not await do(session, step):
                done = sweep.looked_at  # each batch is committed by itself
        except Exception as error:
            if done and session is None and not sweep.dry_run:
                jobs = counted(done, "job was", "jobs were")
                error.add_note(f"{jobs} dealt with before that: say it again for the rest")
            raise
        return require_existing(which, sweep).tally


class SyncJobs(SyncFacade[Jobs]):
    """`Jobs` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Jobs.get)
    list = blocking(Jobs.list)
    count = blocking(Jobs.count)
    attempts = blocking(Jobs.attempts)
    why = blocking(Jobs.why)
    wait = blocking(Jobs.wait)
    cancel = blocking(Jobs.cancel)
    edit = blocking(Jobs.edit)
    retry = blocking(Jobs.retry)
    discard = blocking(Jobs.discard)
    delete = blocking(Jobs.delete)


def _why(c: Connection, d: Dialect, ground: Ground, job_id: UUID) -> Why:
    job = queries.require(c, d, job_id)
    path, now = why.path_of(c, d, job.resource_key, ground.policies.for_key)
    ahead = why.ahead_of(c, d, job) if job.state == JobState.READY else None
    waits = why.waits_of(c, d, job) if job.state in (JobState.BLOCKED, JobState.DEAD) else None
    return why_job(
        job, path, now, ahead=ahead, is_declared=job.kind in ground.kinds if ground.kinds else None, waits=waits
    )


def _edited(which: Which, tally: Mapping[str, int]) -> Edited:
    if tally.get("sent") and (job_id := single(which)) is not None:
        raise InvalidInput(_MAY_BE_SENT.format(id=job_id))
    return Edited.of(tally)
