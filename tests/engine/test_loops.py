"""A polling loop of the worker ends when it is closed or cancelled, whatever becomes of its poll; services close."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from resilient.engine.run import services
from resilient.engine.run.services import Loop
from tests.helpers import LIMIT, until


class Polls:
    """A poll that comes to its end just as the cancel arrives, and loses it, as a driver may: it answers or raises."""

    def __init__(self, error=None):
        self.count, self.error, self.is_under_way = 0, error, asyncio.Event()

    async def __call__(self):
        self.count += 1
        self.is_under_way.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
        return 3600.0


@pytest.mark.parametrize("error", [None, OSError("gone")])
async def test_a_cancel_that_is_lost_in_a_poll_ends_a_loop_that_is_closed(error):
    poll = Polls(error)
    loop = Loop("sleeper", poll, lambda: 0.5)
    await loop.start()
    await poll.is_under_way.wait()
    async with asyncio.timeout(LIMIT):
        await loop.close()
    assert poll.count == 1


@pytest.mark.parametrize("error", [None, OSError("gone")])
async def test_it_ends_the_task_that_runs_the_loop(error):
    poll = Polls(error)
    task = asyncio.create_task(Loop("claiming", poll, lambda: 0.5).run())
    await poll.is_under_way.wait()
    task.cancel()
    async with asyncio.timeout(LIMIT):
        await asyncio.wait([task])
    assert (task.cancelled(), poll.count) == (True, 1)


async def test_a_loop_runs_in_a_task_that_was_cancelled_before_it():
    """Whoever tidies up after a cancel may run one to its end."""
    polls = []

    async def poll():
        polls.append(1)
        return 0.0

    async def tidy():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await Loop("tidy", poll, lambda: 0.5).run(lambda: len(polls) == 3)

    task = asyncio.create_task(tidy())
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert len(polls) == 3


async def test_a_cancellation_of_something_else_ends_no_loop():
    """What a poll waits for may be cancelled by whoever owns it: nobody has cancelled the loop."""
    polls, again = [], asyncio.Event()

    async def poll():
        polls.append(1)
        if len(polls) == 1:
            others = asyncio.get_running_loop().create_future()
            others.cancel()
            await others
        again.set()
        return 3600.0

    loop = Loop("stage", poll, lambda: 0.0)
    await loop.start()
    async with asyncio.timeout(LIMIT):
        await asyncio.wait([loop._task, waiting := asyncio.ensure_future(again.wait())], return_when="FIRST_COMPLETED")
        waiting.cancel()
        assert again.is_set()
        await loop.close()
    assert len(polls) == 2


async def test_a_rest_that_fails_ends_no_loop():
    polls, again = [], asyncio.Event()

    async def poll():
        polls.append(1)
        if len(polls) == 3:
            again.set()
        return 1.0

    async def rest(_seconds):
        raise OSError("gone")

    loop = Loop("stage", poll, lambda: 0.0, rest=rest)
    await loop.start()
    async with asyncio.timeout(LIMIT):
        await again.wait()
        await loop.close()


# -- what comes to its end --------------------------------------------------------------------------------------------


async def test_what_no_cancel_ends_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(services, "HURRY", 0.0)
    monkeypatch.setattr(services, "NEXT_CANCEL", 0.001)
    begun, enough = asyncio.Event(), asyncio.Event()

    async def stubborn():
        begun.set()
        while not enough.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await enough.wait()

    task = asyncio.create_task(services.to_its_end("closing", stubborn()))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(LIMIT / 5):
        await asyncio.wait([task])
    assert task.cancelled()
    assert "closing does not end" in caplog.text
    enough.set()
    await until(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == "resilient-closing"])


async def test_a_service_that_cannot_be_closed_is_told_of_although_its_worker_was_cancelled(caplog):
    begun = asyncio.Event()

    async def close():
        begun.set()
        await asyncio.sleep(0)
        raise OSError("gone")

    async def run():
        async with services.Services([services.Attachment(lambda: None, close)]):
            pass

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(LIMIT):
        await asyncio.wait([task])
    assert task.cancelled()
    assert [one.levelname for one in caplog.records if "gone" in one.getMessage()] == ["WARNING"]
