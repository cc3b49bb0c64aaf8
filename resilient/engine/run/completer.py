"""The completer: results into the database, in batches, under their fences.

Handlers never wait for a commit. What cannot be written (database away) is tried again with the same batch: the fence
makes that harmless, and a commit whose answer was lost is recognised by the version it left behind.

A program's open transaction may hold a job, or what follows it: an ordering key, a workflow. After a second the others
of the batch are written without it (jobs are looked at, anything else is found by halving); it is tried again beside.
Nobody can rescue a job that is held; once it is let go, a living worker's is spared for a while (`sweeper.py`).

A result that the database refuses for another reason is found by halving, too. If one of its texts or values is why,
it is written without them. If nothing helps, it is tried again beside the others, which do not wait for its pauses.

A process that slept through a lease may run a job again while its earlier result waits here. No statement gets both: it
could not tell whose end it wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy.exc import DataError, IntegrityError

from resilient.core.base.errors import DuplicateJob
from resilient.core.base.loggers import FailureLog, apart, logger
from resilient.core.jobs.backoff import retry_pause
from resilient.engine.ground.sessions import RETRYABLE_SQLSTATES
from resilient.engine.jobs import queue
from resilient.store.db import trouble
from resilient.store.db.dialect import LOCK_WAIT, SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.db.direct import direct, operation, reserved
from resilient.store.gates import resources, turns
from resilient.store.jobs import finishing, leases
from resilient.store.jobs.dependencies import Ends
from resilient.store.jobs.queries import locked_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.ground.encoder import JobRequest
    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect

log = logger("worker")
BATCH: Final = 500
BACKLOG: Final = 5_000  # results waiting to be written, beyond which no job is begun
CAREFUL_FOR: Final = 30.0  # seconds after somebody was found to hold what a result needs
HELD_PAUSE: Final = 0.25  # seconds between two tries to write what is held
LOUD_TRIES: Final = 5  # of a result that is refused again and again, each of which is a warning
Done = tuple["UUID", int, "str | None"]  # id, fence, result as JSON text
FencedId = tuple["UUID", int]  # id, fence: a job may be run here again while an earlier result of it is not written


class Results(NamedTuple):
    """Results to be written together, each with its resource key."""

    done: list[tuple[Done, str]]
    finishes: list[tuple[finishing.Finish, str]]
    tries: int = 0  # that failed: one may have been committed although its answer was lost
    is_alone: bool = False  # successes with whose end probably nothing else is written: `succeed_alone` tries first

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.done) + len(self.finishes)

    @property
    def ids(self) -> list[UUID]:
        """Their jobs."""
        return [x[0] for x, _ in self.done] + [f.id for f, _ in self.finishes]

    @property
    def fenced_ids(self) -> list[FencedId]:
        """Their executions, those of one job in their order."""
        return sorted([(x[0], x[1]) for x, _ in self.done] + [(f.id, f.version) for f, _ in self.finishes], key=_fence)

    def only(self, ids: Collection[UUID]) -> Results:
        """Those of these jobs."""
        done, finishes = [x for x in self.done if x[0][0] in ids], [x for x in self.finishes if x[0].id in ids]
        return Results(done, finishes, self.tries)

    def rounds(self) -> list[Results]:
        """The batch in parts that hold each job once; of the executions of one job the earlier ones come first."""
        if len(set(ids := self.ids)) == len(ids):
            return [self]
        last = dict(self.fenced_ids)
        latest = self._replace(
            done=[x for x in self.done if x[0][1] == last[x[0][0]]],
            finishes=[x for x in self.finishes if x[0].version == last[x[0].id]],
        )
        earlier = self._replace(
            done=[x for x in self.done if x[0][1] != last[x[0][0]]],
            finishes=[x for x in self.finishes if x[0].version != last[x[0].id]],
        )
        return [*earlier.rounds(), latest]

    def parts(self) -> list[Results]:
        """The batch in two, or nothing if it is one result."""
        if self.done and self.finishes:
            return [self._replace(finishes=[]), self._replace(done=[])]
        half = self.size // 2
        first, rest = slice(half), slice(half, None)
        return [Results(self.done[some], self.finishes[some], self.tries) for some in (first, rest)] if half else []


class Completer:
    """Writes results; `written` counts them, `stale` those whose fence was gone."""

    def __init__(
        self,
        database: Database,
        caps_of: Callable[[str], Sequence[str]],
        on_written: Callable[[Sequence[FencedId], Collection[UUID], bool], None],
        on_refused: Callable[[UUID, int, Exception], None],
        poke: Callable[[], None],
        *,
        roll: Callable[[], float],
    ) -> None:
        self._roll = roll
        self._database, self._caps_of, self._is_sqlite = database, caps_of, database.is_sqlite
        self._on_written, self._on_refused, self._poke = on_written, on_refused, poke
        self._follow_ups: dict[FencedId, Sequence[JobRequest]] = {}  # of executions whose results wait to be written
        self._alone: deque[tuple[Done, str]] = deque()  # successes with whose end probably nothing else is written
        self._done: deque[tuple[Done, str]] = deque()
        self._finishes: deque[tuple[finishing.Finish, str]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._quiet = True  # nothing to write
        self._closing = self._abandoned = False
        self._writer: asyncio.Task[None] | None = None
        self._batches: list[Results] = []  # that the writer has in hand
        self._careful_until = -1e9  # loop time
        self._failures = FailureLog(log, "results can be saved again")
        self._held: list[Results] = []  # put aside
        self._held_writer: asyncio.Task[None] | None = None
        self._held_batches: list[Results] = []  # that it has in hand
        self.on_saved: Callable[[], None] = _nothing  # results are written, whatever they are
        self.written = 0
        self.stale = 0

    def follow(self, id_: UUID, fence: int, jobs: Sequence[JobRequest]) -> None:
        """Call it before `succeed` or `finish`: these jobs are enqueued if that one's end is written."""
        self._follow_ups[id_, fence] = jobs

    def succeed(
        self, id_: UUID, fence: int, result: str | None, resource_key: str, *, is_followed: bool = True
    ) -> None:
        """A job succeeded. ``is_followed``: something else is to be written with its end."""
        has_jobs = bool(self._follow_ups) and (id_, fence) in self._follow_ups
        is_alone = not (is_followed or self._is_sqlite or has_jobs or self._caps_of(resource_key))
        (self._alone if is_alone else self._done).append(((id_, fence, result), resource_key))
        self._added()

    def finish(self, finish: finishing.Finish, resource_key: str) -> None:
        """A job came to another end than a plain success, or goes on later."""
        self._finishes.append((finish, resource_key))
        self._added()

    def _added(self) -> None:
        if self._quiet:
            self._quiet = False
            self._wake.set()
            self._idle.clear()

    def _backlog(self) -> int:
        return len(self._alone) + len(self._done) + len(self._finishes)

    @property
    def full(self) -> bool:
        """Whether so many results wait that no more jobs should be begun."""
        batches = (*self._batches, *self._held_batches, *self._held)
        return self._backlog() + sum(results.size for results in batches) > BACKLOG

    async def flushed(self) -> None:
        """Wait until everything is written."""
        await self._idle.wait()

    async def start(self) -> None:
        """Begin to write."""
        self._writer = asyncio.create_task(self._run(), name="resilient-completer")
        self._writer.add_done_callback(_log_failure)

    async def close(self) -> None:
        """End once everything is written, unless it was abandoned or has failed; a cancel abandons it."""
        self._closing = True
        self._wake.set()
        try:
            while self._writer is not None and not self._abandoned:
                await asyncio.wait([self._writer])
                if self._idle.is_set() or _failure(self._writer) is not None:
                    return
                self._wake.set()
                await self.start()  # whoever ended the program cancelled the task
        except asyncio.CancelledError:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """End without what is not written. A commit that is on its way may still take place."""
        self._abandoned = True
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer], timeout=1.0)  # the driver asks a server that may be silent

    async def _run(self) -> None:
        self._start_held_writer()
        try:
            while not (self._closing and self._idle.is_set()):
                await self._wake.wait()
                self._wake.clear()
                while self._backlog():
                    await self._write_batch()
                self._quiet = True
                self._start_held_writer()
                if self._held_writer is None:
                    self._idle.set()
        finally:
            if self._held_writer is not None:
                self._held_writer.cancel()
                await asyncio.wait([self._held_writer])  # what it was about to write is put aside again

    async def _write_batch(self) -> None:
        if alone := [self._alone.popleft() for _ in range(min(BATCH, len(self._alone)))]:
            self._batches = Results(alone, [], is_alone=True).rounds()
            await self._save_each(self._batches)
        done = [self._done.popleft() for _ in range(min(BATCH, len(self._done)))]
        finishes = [self._finishes.popleft() for _ in range(min(BATCH, len(self._finishes)))]
        if done or finishes:
            self._batches = Results(done, finishes).rounds()
            await self._save_each(self._batches)

    async def _save_each(self, batches: list[Results]) -> None:
        """Write batches in turn. One that a bug breaks off is put aside, at a cancel all that are left: none is lost.

        Only the cancel of its own task ends it, not that of what a save waits for (see `services.Loop.run`).
        """
        try:
            while batches:
                try:
                    batches[:1] = await self._save(batches[0])
                except BaseException as error:
                    results = batches.pop(0)  # which may have been committed
                    self._held.append(results._replace(tries=results.tries + 1, is_alone=False))
                    if not isinstance(error, (Exception, asyncio.CancelledError)):
                        raise
                    if isinstance(error, Exception) or not _is_cancelled():
                        log.exception("the engine failed over %d results (from %s)", results.size, min(results.ids))
                        self._start_held_writer()
                if _is_cancelled():
                    raise asyncio.CancelledError
        finally:
            self._held += batches
            batches.clear()

    async def _save(self, results: Results) -> list[Results]:
        """Try once; returns what is to be tried next. One that cannot be written must not hold up the others.

        Nothing is put aside before the last await, so that whatever breaks it off leaves the batch as it was.
        """
        if results.is_alone:
            return await self._save_alone(results)
        is_careful = asyncio.get_running_loop().time() < self._careful_until
        locked: set[UUID] = set()
        free, rest = results, []
        try:
            if is_careful and (locked := await self._database.statement(locked_jobs, results.ids)):
                free = results.only(set(results.ids) - locked)
            if free.size:
                effective, is_released = await self._write(free, SHORT_LOCK_WAIT if is_careful else LOCK_WAIT)
        except Exception as error:  # noqa: BLE001 - whatever it is, results are not thrown away
            if is_lock_timeout(error):
                self._take_care()
                rest = self._split_or_put_aside(free) if is_careful else [free]
            else:
                rest = await self._failed(free, error)
        else:
            if free.size:
                self._saved(free.fenced_ids, effective, released=is_released)
        if locked:
            self._take_care()
            self._put_aside(results.only(locked))
        return rest

    async def _save_alone(self, results: Results) -> list[Results]:
        """Try the statement of one round trip; what it leaves is written by the general way."""
        if asyncio.get_running_loop().time() < self._careful_until:
            return [results._replace(is_alone=False)]
        done = [x for x, _ in results.done]
        try:
            written: set[UUID] = await self._database.transaction(write, done, [], {}, alone=True)
        except Exception as error:  # noqa: BLE001 - the other way meets it again, and says so
            if is_lock_timeout(error):
                self._take_care()
                return [results._replace(is_alone=False)]
            return [results._replace(is_alone=False, tries=1)]  # it may have been committed
        self._saved([(i, fence) for i, fence, _ in done if i in written], written, released=False)
        return [results.only(set(results.ids) - written)] if len(written) < len(done) else []

    async def _write(self, results: Results, how_long: str) -> tuple[set[UUID], bool]:
        """In one transaction; returns whose results are written, and whether something may be ready over it."""
        ends = Ends()
        freed = self._count_freed_slots(key for _, key in (*results.done, *results.finishes))
        following = [one for one in results.fenced_ids if one in self._follow_ups] if self._follow_ups else []
        effective = await self._database.transaction(
            write, [x for x, _ in results.done], [f for f, _ in results.finishes], freed, again=results.tries > 0,
            follow_ups={one[0]: self._follow_ups[one] for one in following}, ends=ends, how_long=how_long,
        )  # fmt: skip
        if following:
            for one in following:
                del self._follow_ups[one]
            with _contained(results.ids):
                self._poke()
        # After a failed try nobody knows what that one released: its commit may have had no answer.
        return effective, bool(results.finishes or freed or following or results.tries or ends.released)

    async def _failed(self, results: Results, error: Exception) -> list[Results]:
        """What to try next, at once; what nothing helps is put aside, because nobody else may wait for that."""
        tries, pause = results.tries, retry_pause(results.tries, self._roll())
        details = results.size, type(error).__name__, error
        if _is_passing(error):
            self._failures.failed("cannot save %d results (%s: %s); trying again in %.1f s", *details, pause)
            await asyncio.sleep(pause)
            return [results._replace(tries=tries + 1)]
        if parts := results.parts():
            log.debug("cannot save %d results (%s: %s); trying them apart", *details)
            return parts
        level = logging.DEBUG if tries > LOUD_TRIES and tries % 30 else logging.WARNING
        log.log(level, "cannot save %d results (%s: %s; job %s)", *details, results.ids[0])
        if _is_about_data(error):
            (one,) = results.fenced_ids
            if self._follow_ups.get(one):
                with _contained(results.ids):  # a mistake there: it is tried again
                    self._on_refused(*one, error)
                    del self._follow_ups[one]
                    return []
            elif (bare := _bare(results)) != results:
                log.error("the result or error of job %s cannot be stored and is left out", one[0])
                return [bare]
        self._held.append(results._replace(tries=tries + 1))
        self._start_held_writer()
        return []

    # -- what somebody holds --------------------------------------------------------------------------------------

    def _take_care(self) -> None:
        self._careful_until = asyncio.get_running_loop().time() + CAREFUL_FOR

    def _split_or_put_aside(self, results: Results) -> list[Results]:
        """What somebody holds is needed by one of these results: return two halves; a single result is put aside."""
        if not (parts := results.parts()):
            self._put_aside(results)
        return parts

    def _put_aside(self, results: Results) -> None:
        self._held.append(results)
        if self._held_writer is None:
            log.warning(
                "%d results cannot be saved yet: a transaction that is open holds their jobs, or what follows them"
                " (first: job %s)",
                len(results.ids),
                min(results.ids),
            )
        self._start_held_writer()

    def _start_held_writer(self) -> None:
        """See that what is put aside is written."""
        if self._held and self._held_writer is None:
            self._held_writer = asyncio.create_task(self._write_held(), name="resilient-held-results", context=apart())
            self._held_writer.add_done_callback(self._held_writer_ended)

    def _held_writer_ended(self, task: asyncio.Task[None]) -> None:
        """However it ended, and if it was cancelled before it began: the writer starts another if there is work."""
        _log_failure(task)
        self._held_writer = None
        self._wake.set()

    async def _write_held(self) -> None:
        while self._held:
            pause = min(retry_pause(results.tries, self._roll()) for results in self._held)
            await asyncio.sleep(max(HELD_PAUSE, pause))
            self._held_batches, self._held = self._held, []
            await self._save_each(self._held_batches)

    def _count_freed_slots(self, keys: Iterable[str]) -> dict[str, int]:
        """How many slots got free under each concurrency cap."""
        freed: dict[str, int] = {}
        for key in keys:
            for cap in self._caps_of(key):
                freed[cap] = freed.get(cap, 0) + 1
        return freed

    def _saved(self, fenced_ids: Sequence[FencedId], effective: set[UUID], *, released: bool) -> None:
        ids = [id_ for id_, _ in fenced_ids]
        self._failures.worked()
        self.written += len(effective)
        stale: set[UUID] = set()
        if len(effective) < len(ids):
            stale = set(ids) - effective
            self.stale += len(stale)
            log.warning(
                "%d results changed nothing: their leases had been lost to other workers (first: job %s)",
                len(stale),
                min(stale),
            )
        with _contained(ids):
            self._on_written(fenced_ids, stale, released)
        with _contained(ids):
            self.on_saved()


@contextlib.contextmanager
def _contained(ids: Sequence[UUID]) -> Iterator[None]:
    """Log an error of a callback: the writer of results goes on."""
    try:
        yield
    except Exception:
        log.exception("the engine failed over %d results (from %s)", len(ids), min(ids))


def _log_failure(task: asyncio.Task[None]) -> None:
    if (error := _failure(task)) is not None:
        log.error("a writer of results has failed", exc_info=error)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _is_cancelled() -> bool:
    """Whether this task is to end. What it waits for may have lost the cancel (see `services.Loop.run`)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _nothing() -> None:
    """Stands for no callback."""


def _is_about_data(error: Exception) -> bool:
    """Whether the same result would be refused for ever: a value the database does not take, or its triggers."""
    if isinstance(error, _ABOUT_DATA):
        return True
    return _state(error)[:2] in ("22", "23", "54", "P0") or "malformed JSON" in str(error)


_ABOUT_DATA: Final = (ValueError, TypeError, OverflowError, RecursionError, DuplicateJob, DataError, IntegrityError)


def _is_passing(error: Exception) -> bool:
    """Whether the same batch will be taken later: the database is away, or broke it off because of somebody else.

    What was broken off for its time is tried in parts, which take less.
    """
    if trouble.is_broken_off(error):
        return False
    return isinstance(error, OSError) or trouble.is_of_database(error) or _state(error) in RETRYABLE_SQLSTATES


def _state(error: Exception) -> str:
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def _bare(results: Results) -> Results:
    """The same decision without the texts and values that cannot be stored."""
    finishes = [
        (replace(f, transition=f.transition.without_words(mark=bool(f.marks)), marks=None), key)
        for f, key in results.finishes
    ]
    return Results([((i, fence, None), key) for (i, fence, _), key in results.done], finishes, results.tries)


@direct
@reserved
@operation("finish")
def write(
    c: Connection,
    d: Dialect,
    done: Sequence[Done],
    finishes: Sequence[finishing.Finish],
    freed: dict[str, int],
    *,
    again: bool = False,
    follow_ups: Mapping[UUID, Sequence[JobRequest]] | None = None,
    ends: Ends | None = None,
    how_long: str | None = None,
    alone: bool = False,
) -> set[UUID]:
    """One batch: jobs by id, then the resources whose slots got free, then, in a later statement, their parked turns.

    ``again``: an earlier try may have been committed although its answer was lost; what it wrote counts.
    ``follow_ups``: what is enqueued with a job's end, if it is this write that ends it. ``ends`` collects those jobs.
    ``how_long``: waits for each lock so long (see `db/dialect.py`). ``alone``: only successes with whose end nothing
    else is written, in one round trip; the others of the batch are left.
    """
    if alone:
        return finishing.succeed_alone(c, d, sorted(done, key=_by_id), how_long or LOCK_WAIT)
    now = d.steer(c, how_long)
    ends = ends or Ends()
    if (done and finishes) or len({result is None for _, _, result in done}) > 1:  # in several statements
        finishing.lock(c, d, sorted([i for i, _, _ in done] + [f.id for f in finishes]))
    effective = finishing.succeed_if_held(c, d, sorted(done, key=_by_id), now, ends)
    effective |= finishing.finish_if_held(c, d, finishes, now, ends)
    ends.release(c, d, now)
    if follow_ups and (new := [o for i, ordered in follow_ups.items() if i in effective for o in ordered]):
        queue.write(c, d, new, ended=ends.in_order)
    ends.go_on(c, d, now)
    if again:
        effective |= _written_before(c, d, done, finishes, effective)
    free_slots(c, d, freed, now)
    return effective


def _fence(one: FencedId) -> int:
    return one[1]


def _by_id(one: Done) -> int:
    return one[0].int  # comparing the ids themselves is Python code


def _written_before(
    c: Connection, d: Dialect, done: Sequence[Done], finishes: Sequence[finishing.Finish], effective: set[UUID]
) -> set[UUID]:
    """Ids whose version is now one beyond their fence, in a state this batch meant for them.

    A rescue makes a job ready at that version, too; but it counts a lost worker, and what runs once more counts none.
    """
    expected = {i: (fence + 1, finishing.AFTER_SUCCESS) for i, fence, _ in done}
    expected |= {f.id: (f.version + 1, finishing.ends_of(f.transition)) for f in finishes}
    others = [i for i in expected if i not in effective]
    rows = leases.ends(c, d, others) if others else {}
    return {i for i, (version, *end) in rows.items() if version == expected[i][0] and tuple(end) in expected[i][1]}


def free_slots(c: Connection, d: Dialect, freed: Mapping[str, int], now: datetime) -> None:
    """Release as many of the turns that are parked on each key as jobs of it have ended."""
    if not freed:
        return
    resources.touch(c, d, list(freed), now)
    for key, count in sorted(freed.items()):
        turns.release(c, d, key, count, now)
