"""The simulated program: a handler for each way in which work is done. ``job.deps`` is the world, which hears of it."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from resilient import Fixed, Job, Permanent, Retry, Snooze, SyncJob, handler

RETRY = Retry(max_attempts=40, delay=Fixed(0.3), max_rescues=50)


async def send(job, action="push"):
    account = job.resource_key.partition("/")[2]
    response = await job.client.post(f"/{action}/{account}", json={"n": job.payload["n"]})
    response.raise_for_status()


@handler("push", retry=RETRY, timeout=5)
async def push(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await send(job)
    job.deps.note(job, "end")


@handler("charge", retry=RETRY, timeout=5)
async def charge(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await send(job, "charge")
    job.deps.note(job, "end")


@handler("written", retry=RETRY, timeout=10)
async def written(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await send(job)
    async with job.complete() as session:
        await session.execute(sa.text("INSERT INTO effect VALUES (:n, 'written')"), {"n": job.payload["n"]})
    job.deps.note(job, "end")


@handler("fetched", retry=RETRY, timeout=2)
async def fetched(job: Job[dict]) -> None:
    """Through an account whose tokens last for a moment; nothing ever goes wrong there but workers."""
    job.deps.note(job, "start")
    began = job.deps.t()
    try:
        (await job.client.get(f"/things/{job.payload['n']}")).raise_for_status()
    finally:
        job.deps.stays.append(job.deps.t() - began)
    job.deps.note(job, "end")


@handler("plain", retry=RETRY, timeout=10)
def plain(job: SyncJob[dict]) -> None:
    job.deps.note(job, "start")
    with job.complete() as session:
        session.execute(sa.text("INSERT INTO effect VALUES (:n, 'plain')"), {"n": job.payload["n"]})
    job.deps.note(job, "end")


@handler("ordered", retry=RETRY, timeout=5)
async def ordered(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await asyncio.sleep(0.05)
    if job.payload["n"] % 4 == 0 and job.attempt == 1:
        raise ValueError("not yet")
    job.deps.note(job, "end")


@handler("slow", retry=RETRY, timeout=5)
async def slow(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await asyncio.sleep(1.0)
    job.deps.note(job, "end")


@handler("fails", retry=Retry(max_attempts=2, delay=Fixed(0.2), max_rescues=50))
async def fails(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    job.deps.note(job, "end")
    raise ValueError("always")


@handler("snoozes", retry=RETRY)
async def snoozes(job: Job[dict]) -> Snooze | None:
    job.deps.note(job, "start")
    job.deps.note(job, "end")
    return Snooze(0.7) if job.execution == 1 else None


@handler("step", retry=RETRY, timeout=5)
async def step(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    await send(job)
    job.deps.note(job, "end")


@handler("undo", retry=RETRY, timeout=5)
async def undo(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    job.deps.note(job, "end")


@handler("last", retry=RETRY, timeout=5)
async def last(job: Job[dict]) -> None:
    job.deps.note(job, "start")
    job.deps.note(job, "end")
    if job.payload["fails"]:
        raise Permanent("the last step fails")


HANDLERS = [push, charge, fetched, slow, written, plain, ordered, fails, snoozes, step, undo, last]
