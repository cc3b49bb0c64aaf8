"""Handlers that misbehave: they block, never end, raise what nobody catches, kill their process, or leak."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import history

from resilient import Fixed, Job, Retry, SyncJob, handler

RETRY = Retry(max_attempts=1, delay=Fixed(0.05), max_rescues=3)
LEAK = []


class Unheard(BaseException):
    """Nobody expects this one."""


def log(job, event):
    """A line in the log of all processes."""
    history.note(sys.argv[2], event=event, job=job.id.hex, execution=job.execution, n=os.getpid(), key=job.resource_key)


@handler("blocks", retry=RETRY)
async def blocks(job: Job[dict]) -> None:
    log(job, "start")
    time.sleep(job.payload["seconds"])  # noqa: ASYNC251 - the point
    log(job, "end")


@handler("hangs", retry=RETRY, timeout=0.5)
async def hangs(job: Job[dict]) -> None:
    log(job, "start")
    await asyncio.Event().wait()


@handler("stubborn", retry=RETRY, timeout=0.5)
async def stubborn(job: Job[dict]) -> None:
    log(job, "start")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@handler("hangs_thread", retry=RETRY, timeout=0.5)
def hangs_thread(job: SyncJob[dict]) -> None:
    log(job, "start")
    threading.Event().wait()


@handler("raises", retry=RETRY)
async def raises(job: Job[dict]) -> None:
    log(job, "start")
    raise {"unheard": Unheard, "exit": SystemExit, "interrupt": KeyboardInterrupt, "close": GeneratorExit}[
        job.payload["what"]
    ]("said so")


@handler("raises_thread", retry=RETRY)
def raises_thread(job: SyncJob[dict]) -> None:
    log(job, "start")
    raise {"unheard": Unheard, "exit": SystemExit, "interrupt": KeyboardInterrupt}[job.payload["what"]]("said so")


@handler("kills", retry=RETRY)
async def kills(job: Job[dict]) -> None:
    log(job, "start")
    await asyncio.sleep(0.1)  # the neighbours have begun
    os.kill(os.getpid(), signal.SIGKILL)


@handler("neighbour", retry=RETRY)
async def neighbour(job: Job[dict]) -> None:
    log(job, "start")
    await asyncio.sleep(0.3)
    log(job, "end")


@handler("leaks", retry=RETRY)
async def leaks(job: Job[dict]) -> None:
    log(job, "start")
    LEAK.append(bytearray(job.payload["bytes"]))
    log(job, "end")


@handler("progress", retry=RETRY)
async def progress(job: Job[dict]) -> None:
    log(job, "start")
    for step in range(5):
        await job.progress({"step": step})
    log(job, "end")


@handler("progress_thread", retry=RETRY)
def progress_thread(job: SyncJob[dict]) -> None:
    log(job, "start")
    for step in range(5):
        job.progress({"step": step})
    log(job, "end")


HANDLERS = [
    blocks, hangs, stubborn, hangs_thread, raises, raises_thread, kills, neighbour, leaks, progress, progress_thread
]  # fmt: skip
