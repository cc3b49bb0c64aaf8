"""A worker process for the tests: ``child.py URL LOG [options]``.

Handlers log their start and end. With ``--kill FUNCTION:PHASE:COUNT`` the process ends itself by SIGKILL at a named
step: before, inside (before the commit of) or after the COUNTth transaction that runs FUNCTION, or in the handler
itself. ``--mutant`` breaks the engine in one place, ``--clock`` makes this process's clock wrong by so many seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import functools
import gc
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import evil
import history
import mutants
import refreshing
from evil import log

from resilient import (
    BreakerPolicy,
    Fixed,
    Idempotency,
    Job,
    Limit,
    Permanent,
    Provider,
    Resilient,
    Retry,
    Schedule,
    SyncJob,
    handler,
)
from resilient.engine.run import sweeper
from resilient.engine.run.worker import exit_if_stuck
from resilient.store.db.database import Database

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("log")
parser.add_argument("--kill", default="")
parser.add_argument("--mutant", default="")
parser.add_argument("--provider", default="")
parser.add_argument("--lease", type=float, default=1.0)
parser.add_argument("--grace", type=float, default=5.0)
parser.add_argument("--patience", type=float, default=1.0)
parser.add_argument("--concurrency", type=int, default=4)
parser.add_argument("--listen", help="the address of the server itself, behind a pooler")
parser.add_argument("--pool-size", type=int, default=10)
parser.add_argument("--until-idle", action="store_true")
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--limit", default="", help="of requests, for each account")
parser.add_argument("--cap", default="", help="KEY=JOBS")
parser.add_argument("--first-open", type=float, default=15.0)
parser.add_argument("--secret", default="", help="the key of the accounts of `refreshing`")
parser.add_argument("--clock", type=float, default=0.0)
parser.add_argument("--every", action="append", default=[], help="a schedule of `work` on this interval")
options = parser.parse_args()
WHERE, _, rest = options.kill.partition(":")
PHASE, _, left = rest.partition(":")
countdown = [int(left or 1)]


def point(function, phase):
    """Die here, if this is the named step."""
    if function == WHERE and phase == PHASE:
        countdown[0] -= 1
        if countdown[0] <= 0:
            history.note(options.log, event="kill", job="", execution=0, n=os.getpid(), at=options.kill)
            os.kill(os.getpid(), signal.SIGKILL)


def pointed(original):
    """A way to run a function in the database, with the named steps around and in it."""

    async def run(self, fn, *args, **kwargs):
        name = fn.__name__.lstrip("_")
        point(name, "before")

        result = await original(self, inside(fn, name), *args, **kwargs)
        point(name, "after")
        return result

    return run


def pointed_sync(original):
    """The same, for the heartbeat's thread."""

    def run(self, fn, *args, **kwargs):
        name = fn.__name__.lstrip("_")
        point(name, "before")
        result = original(self, inside(fn, name), *args, **kwargs)
        point(name, "after")
        return result

    return run


def inside(fn, name):
    """The function with a step between its statements and the commit."""

    @functools.wraps(fn)  # with its marks
    def run(c, d, *args, **kwargs):
        result = fn(c, d, *args, **kwargs)
        point(name, "inside")
        return result

    return run


Database.transaction = pointed(Database.transaction)
Database.transaction_sync = pointed_sync(Database.transaction_sync)
statement = pointed(Database.statement)


async def once(self, fn, *args):
    """`Database.statement` may go on to `transaction`, where its steps are counted already."""
    return await (statement if self._goes_direct else Database.transaction)(self, fn, *args)


Database.statement = once
sweeper.HOUSEKEEPING = timedelta(seconds=1)  # the turns are looked at all the time
if options.secret:
    refreshing.hurry()
    refreshing.set_points(point)
if options.mutant:
    getattr(mutants, options.mutant)()
if options.clock:
    mutants.wrong_clock(options.clock)

RETRY = Retry(max_attempts=20, delay=Fixed(0.05), max_rescues=50)


@handler("work", retry=RETRY, timeout=30)
async def work(job: Job[dict]) -> None:
    log(job, "start")
    point("handler", "before")
    if options.slow:
        await asyncio.sleep(options.slow)
    if options.provider:
        account = job.resource_key.partition("/")[2]
        response = await job.client.post(f"/push/{account}", json={"n": job.payload["n"]})
        response.raise_for_status()
    point("handler", "after")
    log(job, "end")


@handler("ordered", retry=RETRY, timeout=30)
async def ordered(job: Job[dict]) -> None:
    log(job, "start")
    await asyncio.sleep(options.slow)
    if job.attempt <= job.payload["fails"]:
        raise ValueError("not yet")
    log(job, "end")


@handler("thread", retry=RETRY, timeout=30)
def thread(job: SyncJob[dict]) -> None:
    log(job, "start")
    log(job, "end")


@handler("fails", retry=Retry(max_attempts=3, delay=Fixed(0.05), max_rescues=50))
async def fails(job: Job[dict]) -> None:
    log(job, "start")
    log(job, "end")
    raise ValueError("always")


@handler("step", retry=RETRY, timeout=30)
async def step(job: Job[dict]) -> None:
    log(job, "start")
    point("handler", "before")
    await asyncio.sleep(options.slow)
    log(job, "end")
    if job.payload.get("fails"):
        raise Permanent("this one cannot be done")


@handler("undo", retry=RETRY, timeout=30)
async def undo(job: Job[dict]) -> None:
    log(job, "start")
    log(job, "end")


def app(url):
    provider = Provider(
        name="p",
        base_url=options.provider or "http://127.0.0.1:1",
        idempotency=Idempotency(header="Idempotency-Key"),
    )
    key, _, jobs = options.cap.partition("=")
    first = options.first_open
    breaker = BreakerPolicy(first_open=first, longest_open=4 * first, probe_lease=2 * first, ramp=2 * first)
    return Resilient(
        Database(url, connections=options.pool_size),
        listen_url=options.listen,
        handlers=[work, ordered, thread, fails, step, undo, *evil.HANDLERS],
        providers=[provider, *(refreshing.providers(options.provider) if options.secret else ())],
        secrets=[options.secret] if options.secret else None,
        limits={"p/*": [Limit.parse(options.limit)]} if options.limit else None,
        concurrency={key: int(jobs)} if jobs else None,
        breakers={"p": breaker, "p/*": breaker},
        schedules=[Schedule(work, {"n": -1}, resource_key="p/0", every=e, overlap="allow") for e in options.every],
        upgrade=False,
    )


async def main():
    a = app(options.url)
    worker = a.worker(
        concurrency=options.concurrency, lease=options.lease, grace=options.grace, patience=options.patience
    )
    running = asyncio.create_task(worker.run())
    if options.until_idle:
        idle = 0
        while idle < 5 and not running.done():
            await asyncio.sleep(0.1)
            (open_,) = await a.database.transaction(count_open)
            idle = 0 if open_ else idle + 1
        worker.stop()
    await running
    await a.close()
    exit_if_stuck(worker)


def count_open(c, d):
    return d.run(c, "SELECT count(*) FROM {job} WHERE finished_at IS NULL").one()


if __name__ == "__main__":
    atexit.register(gc.freeze)  # nothing is looked through as it ends
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
