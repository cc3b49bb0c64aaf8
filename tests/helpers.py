"""What tests of every floor do with an app: wait for a condition, run what is due."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import random
from functools import cache

import h11

LIMIT = 150.0  # seconds: bounds a test that hangs, and promises nothing


async def until(condition, seconds=LIMIT):
    """Wait until ``condition()``, or what it gives to await, is true; return that value. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)


async def most_in_a_turn(awaitable, monkeypatch):
    """How many parts of answers are read at most until the loop gives somebody else a turn."""
    count, most, next_event = 0, 0, h11.Connection.next_event

    def counted(connection):
        nonlocal count, most
        count += 1
        most = max(most, count)
        return next_event(connection)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    task = asyncio.ensure_future(awaitable)
    async with asyncio.timeout(LIMIT):
        while not task.done():
            await asyncio.sleep(0)
            count = 0
    await task
    return most


def use_up(job):
    """Let the time of a running job's handler be over: the engine's next look at timeouts says so."""
    job._backend._execution.started -= 1e6


def brisk(worker):
    """Let a worker renew its leases, and so hear of cancels and of leases it lost, several times a second.

    A short lease would do so, too, and be over wherever the machine stands still for a moment.
    """
    worker.heartbeat._interval = 0.1
    return worker


async def bury(app):
    """Let the leases of all workers be over that have died, or stand still, and nobody hear of those any more."""
    over = ("UPDATE {job} SET lease_until = created_at WHERE state = 'running'", "DELETE FROM {worker}")
    await app.database.transaction(lambda c, d: [d.run(c, statement) for statement in over] and None)


async def drain(app, **options):
    """Run everything that is due in a worker of its own; the number of executions."""
    return await app.worker(**{"concurrency": 4, **options}).drain(timeout=LIMIT)


async def settle(app):
    """Run everything that is due, with fixed dice; housekeeping finds nothing to repair."""
    worker = app.worker(rng=random.Random(1))
    await worker.drain(timeout=LIMIT)
    await worker.sweeper.chores()
    assert worker.sweeper.repaired == 0


async def hear(app):
    """Everything that is to be told by now has been, in a round that has begun already, too."""
    if app.alerts._flushing is not None:
        await app.alerts._flushing
    await app.alerts.flush()
    await app.alerts._sinks.finish()


@cache
def bomb(mib, codings):
    """A body of so many MiB, packed as often as that: by the test that wants it, not by whoever collects the tests."""
    body = bytes(mib * 1024 * 1024)
    for _ in range(codings):
        body = gzip.compress(body)
    return body
