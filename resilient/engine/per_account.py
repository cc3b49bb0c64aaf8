"""Schedules `for_each` account: who the accounts are, and the jobs of those whose tick is due.

Who they are is looked at twice a minute by whichever worker wins the schedule's row: the connections that match the
pattern and can be used, or the keys that the program's function gives (called outside of any transaction, because it
may ask anybody). What changed is written in batches. A new account begins with its next tick, one that was revoked or
must be connected again has none until it is.

Ticks are served under the lock of the schedule's row, some hundred accounts in a transaction, so that ten thousand at
once hold up nobody for long.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core import cron, resource_key, spread
from resilient.core.errors import DatabaseUnreachable, InvalidInput
from resilient.engine.foreign import called, contained, is_async
from resilient.engine.schedule_jobs import job_of
from resilient.store import jobs, schedule_accounts, schedules
from resilient.store.schedule_accounts import Moved

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.app import Resilient
    from resilient.engine.schedule import Schedule
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.schedules")
LOOK_AGAIN: Final = timedelta(seconds=30)
PATIENCE: Final = 60.0  # seconds for the program's function, and for writing what it gave
JOBS: Final = 500  # in one transaction, as far as accounts have one tick each
ACCOUNTS: Final = 1_000  # that come or go in one transaction


async def serve(app: Resilient, declared: Schedule, roll: float) -> int:
    """Everything that is due of one schedule; returns how many jobs are new."""
    run = app.database.transaction
    if await run(_elect, declared.name):
        try:
            async with asyncio.timeout(PATIENCE):
                await _look(app, declared)
        except DatabaseUnreachable:
            raise
        except Exception:  # those that are known still have their ticks
            log.exception("schedule %s: its accounts cannot be told; it goes on with those it knows", declared.name)
    enqueued, more = 0, True
    while more:
        done, more = await run(_serve, declared.name, roll)
        enqueued += done
    return enqueued


# -- who they are ------------------------------------------------------------------------------------------------------


def _elect(c: Connection, d: Dialect, name: str) -> bool:
    """Whether this worker looks who the accounts are."""
    if (found := schedules.lock_if_due(c, d, name)) is None:
        return False
    row, now = found
    if row.accounts_at is not None and row.accounts_at > now:
        return False
    schedules.look_again(c, d, name, now + LOOK_AGAIN)
    return True


async def _look(app: Resilient, declared: Schedule) -> None:
    wanted, known, run = set[str](), set[str](), app.database.transaction
    async for keys in _keys(app, declared.for_each):
        wanted.update(keys)
    after = ""
    while page := await run(schedule_accounts.known, declared.name, after):
        known.update(page)
        after = page[-1]
    for keys in _batches(sorted(known - wanted)):
        await run(_leave, declared.name, keys)
    for keys in _batches(sorted(wanted - known)):
        await run(_join, declared.name, keys)


async def _keys(app: Resilient, source: Any) -> AsyncIterator[Iterable[str]]:
    """The accounts that shall have ticks, in batches."""
    run = app.database.transaction
    if isinstance(source, str):
        after = ""
        while page := await run(schedule_accounts.connected, source, after):
            yield page
            after = page[-1]
        return
    for keys in _batches([resource_key.check(key) async for key in _given(source)]):
        yield set(keys) - await run(schedule_accounts.cut_off, keys)


async def _given(source: Any) -> AsyncIterator[str]:
    """The keys of a function (plain, async, or a generator of either sort) or of a collection."""
    found = source
    if inspect.isasyncgenfunction(source):
        found = source()
    elif callable(source):
        found = await called(source if is_async(source) else partial(_told, source))
    if isinstance(found, AsyncIterable):
        keys = aiter(found)
        while True:
            with contained():
                try:
                    key = await anext(keys)
                except StopAsyncIteration:
                    return
            yield key
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise InvalidInput(f"for_each= gives resource keys one by one, not {type(found).__name__}")
    for key in found:
        yield key


def _told(source: Callable[[], Any]) -> Any:
    """What a plain function gives, generators to their end: in a thread, because it may ask a database."""
    found = source()
    return list(found) if isinstance(found, Iterator) else found


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + ACCOUNTS] for start in range(0, len(keys), ACCOUNTS))


def _leave(c: Connection, d: Dialect, name: str, keys: Sequence[str]) -> None:
    if schedules.lock(c, d, name) is not None:
        schedule_accounts.remove(c, d, name, keys)


def _join(c: Connection, d: Dialect, name: str, keys: Sequence[str]) -> None:
    """Their first ticks; the schedule is due when the first of them is."""
    if (row := schedules.lock(c, d, name)) is None or not row.spec.for_each:
        return
    now = d.now(c)
    ahead = spread.window(row.spec, now, now)
    first = [(key, ahead.serve(row.spec, now, spread.place(name, key)).next_at) for key in keys]
    schedule_accounts.add(c, d, name, first, now)
    soonest = min(row.next_at, *(at for _, at in first))
    schedules.move_accounts_on(c, d, row, now, next_at=soonest, last_at=None, job=None)


# -- ticks ---------------------------------------------------------------------------------------------------


def _serve(c: Connection, d: Dialect, name: str, roll: float) -> tuple[int, bool]:
    """The jobs of some accounts that are due: how many are new, and whether there may be more."""
    if (found := schedules.lock_if_due(c, d, name)) is None:
        return 0, False
    row, now = found
    most = JOBS // cron.MOST if row.spec.catch_up == "all" else JOBS
    by_pattern = "*" in row.spec.for_each or "?" in row.spec.for_each
    due = schedule_accounts.due(c, d, name, now, most, connected_only=by_pattern)
    moved, made = _decided(row, due, now, roll)
    new = _insert(c, d, made)
    last = {one.resource_key: one.id for one in made if one.id in new}
    moved = [Moved(m.key, m.next_at, m.last_at, last.get(m.key)) for m in moved]
    if moved:
        schedule_accounts.move_on(c, d, name, moved)
    if len(new) < len(made):
        log.debug("schedule %s: %d accounts have an unfinished job: no new one", name, len(made) - len(new))
    more = len(due) == most
    soonest = now if more else (schedule_accounts.soonest(c, d, name) or now + LOOK_AGAIN)
    latest = max((m.last_at for m in moved if m.last_at is not None), default=None)
    schedules.move_accounts_on(c, d, row, now, next_at=soonest, last_at=latest, job=next(reversed(last.values()), None))
    return len(new), more


def _decided(
    row: schedules.Row, due: Sequence[schedule_accounts.Due], now: datetime, roll: float
) -> tuple[list[Moved], list[jobs.NewJob]]:
    """What becomes of accounts that are due, and their jobs; one that cannot be used only moves on."""
    moved: list[Moved] = []
    made: list[jobs.NewJob] = []
    if not due:
        return moved, made
    ahead = spread.window(row.spec, min(one.next_at for one in due), now)
    for one in due:
        place = spread.place(row.name, one.key)
        served = ahead.serve(row.spec, one.next_at, place)
        ticks = served.ticks if one.usable else []
        moved.append(Moved(one.key, served.next_at, ticks[-1] if ticks else None))
        made += [job_of(row, tick, (roll + place) % 1.0, account=one.key).row for tick in ticks]
    return moved, made


def _insert(c: Connection, d: Dialect, made: Sequence[jobs.NewJob]) -> set[Any]:
    """The ids of those that are new: an account whose last job is unfinished keeps that."""
    return jobs.insert_unique(c, d, sorted(made, key=lambda job: job.unique_key or "")) if made else set()


def require(c: Connection, d: Dialect, name: str, account: str) -> None:
    """Raise `InvalidInput` for one that is not among the accounts."""
    if schedule_accounts.find(c, d, name, resource_key.check(account)) is None:
        raise InvalidInput(
            f"{account} is not among the accounts of schedule {name!r}: `resilient schedules show {name}` lists them;"
            " a new one is found within half a minute"
        )


def ran(c: Connection, d: Dialect, row: schedules.Row, account: str, job: UUID) -> None:
    """A job of one account was enqueued by hand; its ticks stay."""
    found = schedule_accounts.find(c, d, row.name, account)
    if found is not None:
        schedule_accounts.move_on(c, d, row.name, [Moved(account, found.next_at, None, job)])
