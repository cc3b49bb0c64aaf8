"""Schedules `for_each` account: the list of the accounts, and the jobs of those whose tick is due.

Twice a minute the worker that wins the schedule's row reads the accounts: the usable connections that match the
pattern, or the keys that the program's function returns (it is called outside of any transaction, because it may send
requests). Changes are written in batches. A new account begins with its next tick. An account that was revoked, or that
must be connected again, has no ticks until it is connected.

Ticks are served under the lock of the schedule's row, at most `JOBS` accounts in a transaction, so that ten thousand
accounts delay nobody for long.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base import resource_key
from resilient.core.base.errors import DatabaseUnreachable, InvalidInput
from resilient.core.base.loggers import logger
from resilient.core.schedules import cron, schedule
from resilient.engine.ground.foreign import called, contained, is_async
from resilient.engine.schedules.declaration import job_of
from resilient.store.jobs import insert as jobs
from resilient.store.schedules import accounts as schedule_accounts
from resilient.store.schedules import earlier
from resilient.store.schedules import ticks as schedules
from resilient.store.schedules.accounts import Moved
from resilient.store.schedules.earlier import Earlier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.schedules.declaration import Schedule
    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect
    from resilient.store.jobs.columns import NewJob

log = logger("schedules")
LOOK_AGAIN: Final = timedelta(seconds=30)
PATIENCE: Final = 60.0  # seconds for the program's function, and for writing its keys
JOBS: Final = 500  # in one transaction, at one tick an account
ACCOUNTS: Final = 1_000  # that come or go in one transaction


async def serve(database: Database, declared: Schedule, roll: float) -> int:
    """Enqueue the jobs of one schedule's accounts that are due; returns how many were inserted."""
    run = database.transaction
    if await run(_is_reader, declared.name):
        try:
            async with asyncio.timeout(PATIENCE):
                await _update_accounts(database, declared)
        except DatabaseUnreachable:
            raise
        except Exception:  # the accounts of the last reading keep their ticks
            log.exception("schedule %s: its accounts cannot be told; it goes on with those it knows", declared.name)
    enqueued, more = 0, True
    while more:
        done, more = await run(_serve, declared.name, roll)
        enqueued += done
    return enqueued


# -- the accounts ------------------------------------------------------------------------------------------------------


def _is_reader(c: Connection, d: Dialect, name: str) -> bool:
    """Whether this worker is to read the accounts now; if so, the others leave it alone for `LOOK_AGAIN`."""
    if (due := schedules.lock_if_due(c, d, name, for_each=True)) is None:
        return False
    row, now = due
    if row.accounts_at is not None and row.accounts_at > now:
        return False
    schedules.look_again(c, d, name, now + LOOK_AGAIN)
    return True


async def _update_accounts(database: Database, declared: Schedule) -> None:
    """Read the accounts, and write which of them are new and which are gone."""
    current, before, run = set[str](), set[str](), database.transaction
    async for keys in _keys(database, declared.for_each):
        current.update(keys)
    after = ""
    while page := await run(schedule_accounts.page_of_keys, declared.name, after):
        before.update(page)
        after = page[-1]
    for keys in _batches(sorted(before - current)):
        await run(_remove, declared.name, keys)
    for keys in _batches(sorted(current - before)):
        await run(_add, declared.name, keys)


async def _keys(database: Database, source: Any) -> AsyncIterator[Iterable[str]]:
    """The keys of the accounts with ticks, in batches."""
    run = database.transaction
    if isinstance(source, str):
        after = ""
        while page := await run(schedule_accounts.connected, source, after):
            yield page
            after = page[-1]
        return
    for keys in _batches([resource_key.check(key) async for key in _keys_of(source)]):
        yield set(keys) - await run(schedule_accounts.cut_off, keys)


async def _keys_of(source: Any) -> AsyncIterator[str]:
    """The keys that a function (plain, async, or a generator of either sort) returns, or those of a collection."""
    answer = source
    if inspect.isasyncgenfunction(source):
        answer = source()
    elif callable(source):
        answer = await called(source if is_async(source) else partial(_call, source))
    if isinstance(answer, AsyncIterable):
        keys = aiter(answer)
        while True:
            with contained():
                try:
                    key = await anext(keys)
                except StopAsyncIteration:
                    return
            yield key
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise InvalidInput(f"for_each= gives resource keys one by one, not {type(answer).__name__}")
    for key in answer:
        yield key


def _call(source: Callable[[], Any]) -> Any:
    """The keys that a plain function or generator returns. It runs in a thread, because it may use a database."""
    answer = source()
    return list(answer) if isinstance(answer, Iterator) else answer


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + ACCOUNTS] for start in range(0, len(keys), ACCOUNTS))


def _remove(c: Connection, d: Dialect, name: str, keys: Sequence[str]) -> None:
    if schedules.lock(c, d, name) is not None:
        schedule_accounts.remove(c, d, name, keys)


def _add(c: Connection, d: Dialect, name: str, keys: Sequence[str]) -> None:
    """Insert new accounts with their first ticks; the schedule is due when the first of them is."""
    if (row := schedules.lock(c, d, name)) is None or not row.spec.for_each:
        return
    now = d.now(c)
    window = schedule.window(row.spec, now, now)
    first = [(key, window.serve(row.spec, now, schedule.place(name, key)).next_at) for key in keys]
    schedule_accounts.add(c, d, name, first, now)
    soonest = min(row.next_at, *(at for _, at in first))
    schedules.move_accounts_on(c, d, row, now, next_at=soonest, last_at=None, job=None)


# -- ticks ---------------------------------------------------------------------------------------------------


def _serve(c: Connection, d: Dialect, name: str, roll: float) -> tuple[int, bool]:
    """Enqueue the jobs of some accounts that are due; returns how many were inserted, and whether more may be due."""
    if (due_row := schedules.lock_if_due(c, d, name, for_each=True)) is None:
        return 0, False
    row, now = due_row
    most = JOBS // cron.MOST if row.spec.catch_up == "all" else JOBS
    by_pattern = "*" in row.spec.for_each or "?" in row.spec.for_each
    due = schedule_accounts.due(c, d, name, now, most, connected_only=by_pattern)
    moves, new_jobs = _next_ticks(row, due, now, roll)
    inserted = _insert(c, d, new_jobs)
    last = {one.resource_key: one.id for one in new_jobs if one.id in inserted}
    before = [Earlier(one.unended, one.key) for one in due if one.unended is not None and one.key in last]
    before += [
        Earlier(one.id, one.resource_key) for one in new_jobs if one.id in inserted and one.id != last[one.resource_key]
    ]
    earlier.keep(c, d, name, before, now)
    moves = [Moved(m.key, m.next_at, m.last_at, last.get(m.key)) for m in moves]
    if moves:
        schedule_accounts.move_on(c, d, name, moves)
    if len(inserted) < len(new_jobs):
        log.debug("schedule %s: %d accounts have an unfinished job: no new one", name, len(new_jobs) - len(inserted))
    more = len(due) == most
    soonest = now if more else (schedule_accounts.soonest(c, d, name) or now + LOOK_AGAIN)
    latest = max((m.last_at for m in moves if m.last_at is not None), default=None)
    schedules.move_accounts_on(c, d, row, now, next_at=soonest, last_at=latest, job=next(reversed(last.values()), None))
    return len(inserted), more


def _next_ticks(
    row: schedules.Row, due: Sequence[schedule_accounts.Due], now: datetime, roll: float
) -> tuple[list[Moved], list[NewJob]]:
    """The next ticks of accounts that are due, and their jobs; an account that cannot be used gets no job."""
    moves: list[Moved] = []
    new_jobs: list[NewJob] = []
    if not due:
        return moves, new_jobs
    window = schedule.window(row.spec, min(one.next_at for one in due), now)
    for one in due:
        place = schedule.place(row.name, one.key)
        served = window.serve(row.spec, one.next_at, place)
        ticks = served.ticks if one.usable else []
        moves.append(Moved(one.key, served.next_at, ticks[-1] if ticks else None))
        new_jobs += [job_of(row, tick, (roll + place) % 1.0, account=one.key).row for tick in ticks]
    return moves, new_jobs


def _insert(c: Connection, d: Dialect, new_jobs: Sequence[NewJob]) -> set[Any]:
    """Insert jobs and return the ids of those inserted: an account with an unfinished job gets no other."""
    return jobs.insert_unique(c, d, sorted(new_jobs, key=lambda job: job.unique_key or "")) if new_jobs else set()


def require(c: Connection, d: Dialect, name: str, account: str) -> None:
    """Raise `InvalidInput` if the account is not one of the schedule's."""
    if schedule_accounts.find(c, d, name, resource_key.check_stored(account)) is None:
        raise InvalidInput(
            f"{account} is not among the accounts of schedule {name!r}: `resilient schedules show {name}` lists them;"
            " a new one is found within half a minute"
        )


def note_run(c: Connection, d: Dialect, row: schedules.Row, account: str, job: UUID) -> None:
    """Note the job that a person enqueued for one account; the account's ticks stay as they are."""
    entry = schedule_accounts.find(c, d, row.name, account)
    if entry is not None:
        if entry.unended is not None:
            earlier.keep(c, d, row.name, [Earlier(entry.unended, account)], d.now(c))
        schedule_accounts.move_on(c, d, row.name, [Moved(account, entry.next_at, None, job)])
