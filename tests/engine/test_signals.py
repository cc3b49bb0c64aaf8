"""Who hears the signals that stop a process: every worker of a loop, and whoever heard them before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request

import pytest

from resilient import Job, Resilient, handler
from resilient.engine.ground.signals import hear
from resilient.surface.loop import run as run_on
from tests.brokers import free_port
from tests.helpers import LIMIT, until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no signal handlers of a loop")


@handler("push")
async def push(job: Job[None]) -> None: ...


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push])
    await app.ready()
    yield app
    await app.close()


async def started(worker):
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.link.is_signed_on or running.done())
    assert not running.done(), running.result()
    return running


async def test_every_worker_of_a_process_stops(app):
    workers = [app.worker(), app.worker()]
    running = [await started(one) for one in workers]
    signal.raise_signal(signal.SIGTERM)
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*running)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_what_the_program_gave_to_the_process_is_put_back():
    def of_the_program(_number, _frame): ...

    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, of_the_program) for number in numbers}
    try:
        leave_first, leave_second = hear(loop, lambda: None), hear(loop, lambda: None)
        leave_first()
        assert signal.getsignal(signal.SIGTERM) is not of_the_program
        leave_second()
        leave_second()  # says nothing new
        assert [signal.getsignal(number) for number in numbers] == [of_the_program] * 2
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


async def test_what_the_program_gives_to_the_process_later_stays():
    def of_the_program(_number, _frame): ...

    leave = hear(asyncio.get_running_loop(), lambda: None)
    signal.signal(signal.SIGTERM, of_the_program)
    try:
        leave()
        assert signal.getsignal(signal.SIGTERM) is of_the_program
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def test_a_listener_that_raises_keeps_the_signal_from_no_other():
    loop, calls, errors = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
    leaves = [hear(loop, {}.popitem), hear(loop, lambda: calls.append(1))]
    try:
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: calls)
    finally:
        for leave in leaves:
            leave()
    assert [type(error) for error in errors] == [KeyError]


async def test_what_the_program_gave_to_its_loop_stays(app, hangups_are_heard):
    await _what_the_program_gave_to_its_loop_stays(app)


async def _what_the_program_gave_to_its_loop_stays(app):
    heard, loop, worker = [], asyncio.get_running_loop(), app.worker()
    loop.add_signal_handler(signal.SIGTERM, heard.append, 1)
    try:
        running = await started(worker)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: heard)
        assert not worker.stopping, "the program says when"
        signal.raise_signal(signal.SIGHUP)  # nobody else hears this one
        await asyncio.wait_for(running, LIMIT)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: len(heard) == 2)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def test_the_same_on_uvloop(tmp_path, hangups_are_heard):
    pytest.importorskip("uvloop")

    async def main():
        app = Resilient(f"sqlite:///{tmp_path}/app.db", handlers=[push])
        await _what_the_program_gave_to_its_loop_stays(app)
        await test_every_worker_of_a_process_stops(app)
        await app.close()

    run_on(main(), "uvloop")


PROGRAM = """
    import asyncio, contextlib
    from starlette.applications import Starlette
    from resilient import Resilient, handler

    @handler("push")
    async def push(job): ...

    app = Resilient({url!r}, handlers=[push])

    @contextlib.asynccontextmanager
    async def lifespan(_api):
        async with app:
            worker = app.worker()
            running = asyncio.create_task(worker.run())
            while not worker.link.is_signed_on:
                await asyncio.sleep(0.01)
            yield
            worker.stop()
            await running
            print("stopped", flush=True)

    api = Starlette(lifespan=lifespan)
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_web_server_with_a_worker_stops_at_sigterm(tmp_path, loop):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    (tmp_path / "shop.py").write_text(textwrap.dedent(PROGRAM).format(url=f"sqlite:///{tmp_path}/app.db"))
    port = str(free_port())
    command = [sys.executable, "-m", "uvicorn", "shop:api", "--port", port, "--loop", loop, "--log-level", "warning"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            asyncio.run(until(lambda: _answers(port)))
            server.send_signal(signal.SIGTERM)
            assert server.communicate(timeout=LIMIT)[0] == "stopped\n"
        finally:
            server.kill()


def _answers(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/")
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
