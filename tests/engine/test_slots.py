"""How many slots a worker wakes for the jobs it has claimed."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Job, Resilient, handler
from resilient.engine.run.executor import BREATH
from tests.helpers import drain

JOBS = 6 * BREATH
SLOTS: list = []  # the slot of each job, in the order of their starts
PATIENT: list = []  # those of the jobs that wait
ALL_RUN: list[asyncio.Event] = []


@handler("quick")
async def quick(job: Job[None]) -> None:
    SLOTS.append(asyncio.current_task())


@handler("patient")
async def patient(job: Job[None]) -> None:
    SLOTS.append(asyncio.current_task())
    PATIENT.append(asyncio.current_task())
    if len(set(PATIENT)) == JOBS:
        ALL_RUN[0].set()
    await ALL_RUN[0].wait()


@pytest.fixture
async def app(database):
    SLOTS.clear()
    PATIENT.clear()
    ALL_RUN[:] = [asyncio.Event()]
    own = Resilient(database, handlers=[quick, patient])
    await own.ready()
    yield own
    await own.close()


async def test_jobs_that_never_wait_wake_few_slots(app):
    """A slot takes the next by itself; another is woken when the loop turns, which is once for so many jobs."""
    await app.enqueue_many(quick, [None] * JOBS, resource_key="p/a")
    assert await drain(app, concurrency=JOBS) == JOBS
    assert len(SLOTS) == JOBS
    assert len(set(SLOTS)) <= 6  # a turn of the loop for each breath, and a slot for each turn


async def test_jobs_that_wait_get_all_slots(app):
    await app.enqueue_many(patient, [None] * JOBS, resource_key="p/a")
    assert await drain(app, concurrency=JOBS) == JOBS  # the first of them ends when the last has begun
    assert len(set(SLOTS)) == JOBS


async def test_jobs_that_never_wait_keep_no_slot_from_those_that_do(app):
    for number in range(4):
        await app.enqueue_many(quick, [None] * (JOBS // 4), resource_key=f"p/{number}")
        await app.enqueue_many(patient, [None] * (JOBS // 4), resource_key=f"p/{number}")
    assert await drain(app, concurrency=2 * JOBS) == 2 * JOBS
