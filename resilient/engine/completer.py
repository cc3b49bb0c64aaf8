"""The completer: results into the database, in batches, under their fences.

Handlers never wait for a commit. What cannot be written (database away) is tried again with the same batch: the fence
makes that harmless, and a commit whose answer was lost is recognised by the version it left behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from resilient.core.errors import DuplicateJob
from resilient.engine import writing
from resilient.store import finishing, leases, resources, turns
from resilient.store.direct import direct
from resilient.store.followers import Ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.enqueue import Ordered
    from resilient.store.database import Database
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.worker")
BATCH: Final = 500
BACKLOG: Final = 5_000  # results waiting to be written, beyond which slots wait
LONGEST_PAUSE: Final = 10.0
Done = tuple["UUID", int, "str | None"]  # id, fence, result as JSON text
Dones = list[tuple[Done, str]]  # with their resource keys
Finishes = list[tuple[finishing.Finish, str]]


class Completer:
    """Writes results; `written` counts them, `stale` those whose fence was gone."""

    def __init__(
        self,
        database: Database,
        capped: Callable[[str], Sequence[str]],
        on_written: Callable[[Sequence[UUID], bool], None],
        on_refused: Callable[[UUID, Exception], None],
        poke: Callable[[], None],
    ) -> None:
        self._database, self._capped = database, capped
        self._on_written, self._on_refused, self._poke = on_written, on_refused, poke
        self._follow_ups: dict[UUID, Sequence[Ordered]] = {}  # of jobs whose results wait to be written
        self._done: deque[tuple[Done, str]] = deque()
        self._finishes: deque[tuple[finishing.Finish, str]] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._quiet = True  # nothing to write
        self._closing = False
        self.written = 0
        self.stale = 0

    def follow(self, id_: UUID, ordered: Sequence[Ordered]) -> None:
        """Call it before `succeed` or `finish`: these jobs are enqueued if that one's end is written."""
        self._follow_ups[id_] = ordered

    def succeed(self, id_: UUID, fence: int, result: str | None, resource_key: str) -> None:
        """A job succeeded."""
        self._done.append(((id_, fence, result), resource_key))
        self._added()

    def finish(self, finish: finishing.Finish, resource_key: str) -> None:
        """Anything else was decided about a job."""
        self._finishes.append((finish, resource_key))
        self._added()

    def _added(self) -> None:
        if self._quiet:
            self._quiet = False
            self._wake.set()
            self._idle.clear()
        if len(self._done) + len(self._finishes) > BACKLOG:
            self._room.clear()

    @property
    def full(self) -> bool:
        """Whether slots should wait for `room`."""
        return not self._room.is_set()

    async def room(self) -> None:
        """Wait until there is room for more results."""
        await self._room.wait()

    async def flushed(self) -> None:
        """Wait until everything is written."""
        await self._idle.wait()

    def close(self) -> None:
        """Let `run` end once everything is written."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write batches until closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._done or self._finishes:
                await self._write_batch()
            self._quiet = True
            self._room.set()
            self._idle.set()
            if self._closing:
                return

    async def _write_batch(self) -> None:
        done = [self._done.popleft() for _ in range(min(BATCH, len(self._done)))]
        finishes = [self._finishes.popleft() for _ in range(min(BATCH, len(self._finishes)))]
        await self._save(done, finishes)
        if len(self._done) + len(self._finishes) < BACKLOG:
            self._room.set()

    async def _save(self, done: Dones, finishes: Finishes, tries: int = 0) -> None:
        """Write results, however often it takes; one that no database takes must not hold up the others."""
        freed = self._freed(key for _, key in (*done, *finishes))
        ids = [x[0] for x, _ in done] + [f.id for f, _ in finishes]
        following = {i: self._follow_ups[i] for i in ids if i in self._follow_ups} if self._follow_ups else None
        while True:
            ends = Ends()
            try:
                effective = await self._database.transaction(
                    write, [x for x, _ in done], [f for f, _ in finishes], freed, again=tries > 0, follow_ups=following,
                    ends=ends,
                )  # fmt: skip
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, results are not thrown away
                pause, tries = retry_pause(tries), tries + 1
                log.warning(
                    "cannot save %d results (%s: %s); trying again in %.1f s",
                    len(done) + len(finishes),
                    type(error).__name__,
                    error,
                    pause,
                )
                if _is_about_data(error):
                    if parts := _parted(done, finishes):
                        for part in parts:
                            await self._save(*part, tries)
                        return None
                    if following:
                        del self._follow_ups[ids[0]]
                        return self._on_refused(ids[0], error)
                    done, finishes = _bare(done, finishes)
                await asyncio.sleep(pause)
        if following:
            for id_ in following:
                del self._follow_ups[id_]
            self._poke()
        told = bool(finishes or freed or following or tries)  # tries: a commit whose answer was lost released it
        return self._saved(ids, effective, released=told or ends.released)

    def _freed(self, keys: Iterable[str]) -> dict[str, int]:
        """How many slots got free under each concurrency cap."""
        freed: dict[str, int] = {}
        for key in keys:
            for capped in self._capped(key):
                freed[capped] = freed.get(capped, 0) + 1
        return freed

    def _saved(self, ids: Sequence[UUID], effective: set[UUID], *, released: bool) -> None:
        self.written += len(effective)
        if len(effective) < len(ids):
            stale = set(ids) - effective
            self.stale += len(stale)
            log.warning(
                "%d results changed nothing: their leases had been lost to other workers (first: job %s)",
                len(stale),
                min(stale),
            )
        self._on_written(ids, released)


def _is_about_data(error: Exception) -> bool:
    """Whether the same batch would fail for ever: a value the database refuses, or one beyond its limits."""
    if isinstance(error, (ValueError, TypeError, OverflowError, RecursionError, DuplicateJob)):
        return True
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return state[:2] in ("22", "54") or "malformed JSON" in str(error)


def _parted(done: Dones, finishes: Finishes) -> list[tuple[Dones, Finishes]]:
    """The batch in two, or nothing if it is one result."""
    if done and finishes:
        return [(done, []), ([], finishes)]
    half = (len(done) + len(finishes)) // 2
    if not half:
        return []
    return [(done[:half], []), (done[half:], [])] if done else [([], finishes[:half]), ([], finishes[half:])]


def _bare(done: Dones, finishes: Finishes) -> tuple[Dones, Finishes]:
    """The same decision without the words and values that cannot be stored."""
    id_ = done[0][0][0] if done else finishes[0][0].id
    log.error("the result or error of job %s cannot be stored and is left out", id_)
    bare = [
        (
            replace(
                f, error="(its error cannot be stored)" if f.error else None, error_code=None, traceback=None,
                result=None, set_mark=f.set_mark or bool(f.marks), marks=None,
            ),
            key,
        )
        for f, key in finishes
    ]  # fmt: skip
    return [((i, fence, None), key) for (i, fence, _), key in done], bare


@direct
def write(
    c: Connection,
    d: Dialect,
    done: Sequence[Done],
    finishes: Sequence[finishing.Finish],
    freed: dict[str, int],
    *,
    again: bool = False,
    follow_ups: Mapping[UUID, Sequence[Ordered]] | None = None,
    ends: Ends | None = None,
) -> set[UUID]:
    """One batch: jobs by id, then the resources whose slots got free, then, in a later statement, their parked turns.

    ``again``: an earlier try may have been committed although its answer was lost; what it wrote counts.
    ``follow_ups``: what is enqueued with a job's end, if it is this write that ends it. ``ends`` hears what followed.
    """
    now = d.steer(c)
    ends = ends or Ends()
    effective = finishing.succeed_if_held(c, d, sorted(done, key=_by_id), now, ends)
    effective |= finishing.finish_if_held(c, d, finishes, now, ends)
    if follow_ups and (new := [o for i, ordered in follow_ups.items() if i in effective for o in ordered]):
        writing.write(c, d, new, ended=ends.in_lanes)
    ends.go_on(c, d, now)
    if again:
        effective |= _written_before(c, d, done, finishes, effective)
    free_slots(c, d, freed, now)
    return effective


def _by_id(one: Done) -> int:
    return one[0].int  # comparing the ids themselves is Python code


def _written_before(
    c: Connection, d: Dialect, done: Sequence[Done], finishes: Sequence[finishing.Finish], effective: set[UUID]
) -> set[UUID]:
    """Ids that now stand exactly one version further, in the state this batch meant for them."""
    meant = {i: (v + 1, "succeeded") for i, v, _ in done} | {f.id: (f.version + 1, f.state) for f in finishes}
    missing = [i for i in meant if i not in effective]
    present = leases.held_versions(c, d, missing) if missing else {}
    return {i for i in missing if present.get(i) == meant[i]}


def free_slots(c: Connection, d: Dialect, freed: Mapping[str, int], now: datetime) -> None:
    """As many turns parked on each key as jobs ended there become ordinary ones."""
    if not freed:
        return
    resources.touch(c, d, list(freed), now)
    for key, count in sorted(freed.items()):
        turns.release(c, d, key, count, now)


def retry_pause(tries: int) -> float:
    """Seconds to wait before talking to a database that did not answer, growing to `LONGEST_PAUSE`."""
    return float(min(0.1 * 2 ** min(tries, 10), LONGEST_PAUSE))
