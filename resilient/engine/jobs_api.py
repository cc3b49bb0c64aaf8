"""`app.jobs`: look at jobs and change them, one or thousands; `app.sync.jobs` is the synchronous face.

What is meant is worked out in `bulk.py`, done by `store/queries.py`, `changes.py`, `retries.py` and
`edits.py`. Changes run in batches, each in a transaction of its own; with ``session=`` all in the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from resilient.core.changed import Cancelled, Deleted, Discarded, Edited, Retried
from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_calls
from resilient.core.states import JobState
from resilient.core.why import Why, why_job
from resilient.engine import bulk, joining
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.store import queries, situation
from resilient.store.changes import Cancel, Delete, Discard, Sweep
from resilient.store.edits import UNSET
from resilient.store.filters import Criteria, JobFilter, as_id
from resilient.store.retries import Retry

if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from typing import Unpack
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.records import AttemptInfo, Count, JobInfo
    from resilient.engine.app import Resilient
    from resilient.engine.bulk import Which
    from resilient.store.dialect import Dialect
    from resilient.store.queries import Order

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

    def __init__(self, app: Resilient, *, here: bool = False) -> None:
        self._app, self._db = app, Transactions(app, here=here)

    @property
    def sync(self) -> SyncJobs:
        """The same for synchronous programs."""
        return SyncJobs(Jobs(self._app, here=True))

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
        return await self._db.read(session, _why, self._app, as_id(job_id))

    # -- changing --------------------------------------------------------------------------------------------

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
        f = bulk.filter_of(which, criteria, everything=everything)
        return Cancelled.of(await self._sweep(which, Sweep(Cancel(), f, limit, dry_run), session))

    async def edit(
        self,
        which: Which,
        *,
        payload: Any = UNSET,
        priority: int | Any = UNSET,
        run_at: datetime | Any = UNSET,
        delay: timedelta | float | Any = UNSET,
        max_attempts: int | Any | None = UNSET,
        expires_at: datetime | Any | None = UNSET,
        tags: Mapping[str, str] | Any | None = UNSET,
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
        f = bulk.filter_of(which, {})
        change = await self._db.read(session, bulk.plan_edit, self._app, f, values, new_operation=new_operation)
        return _edited(which, await self._sweep(which, Sweep(change, f, limit, dry_run), session))

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
        f = bulk.filter_of(which, criteria, everything=everything)
        change = Retry(repeat_ambiguous, new_operation, bulk.spacing_of(rate))
        return Retried.of(await self._sweep(which, Sweep(change, f, limit, dry_run), session))

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
        f = bulk.filter_of(which, criteria, everything=everything)
        return Discarded.of(await self._sweep(which, Sweep(Discard(), f, limit, dry_run), session))

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
        f = bulk.filter_of(which, criteria, everything=everything)
        return Deleted.of(await self._sweep(which, Sweep(Delete(), f, limit, dry_run), session))

    async def _sweep(self, which: Which, sweep: Sweep, session: CallersSession) -> Mapping[str, int]:
        def step(c: Connection, d: Dialect) -> bool:
            if isinstance(sweep.change, Cancel | Discard) and not sweep.dry_run:
                sweep.change.later = joining.ends(session, d, self._app.poke)
            return sweep.step(c, d)

        do = self._db.read if sweep.dry_run else self._db.write
        while not await do(session, step):
            pass
        return bulk.found(which, sweep).tally


class SyncJobs(Face[Jobs]):
    """`Jobs` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Jobs.get)
    list = blocking(Jobs.list)
    count = blocking(Jobs.count)
    attempts = blocking(Jobs.attempts)
    why = blocking(Jobs.why)
    cancel = blocking(Jobs.cancel)
    edit = blocking(Jobs.edit)
    retry = blocking(Jobs.retry)
    discard = blocking(Jobs.discard)
    delete = blocking(Jobs.delete)


def _why(c: Connection, d: Dialect, app: Resilient, job_id: UUID) -> Why:
    job = queries.require(c, d, job_id)
    path, now = situation.path_of(c, d, job.resource_key, app.policies.for_key)
    ahead = situation.ahead_of(c, d, job) if job.state == JobState.READY else None
    waits = situation.waits_of(c, d, job) if job.state in (JobState.BLOCKED, JobState.DEAD) else None
    return why_job(job, path, now, ahead=ahead, known=job.kind in app.kinds if app.kinds else None, waits=waits)


def _edited(which: Which, tally: Mapping[str, int]) -> Edited:
    if tally.get("sent") and (job_id := bulk.single(which)) is not None:
        raise InvalidInput(_MAY_BE_SENT.format(id=job_id))
    return Edited.of(tally)
