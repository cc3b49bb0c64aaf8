"""How many of our files a job passes, an answer 429, an event: who wants to follow one has to read those.

Counted over real runs on SQLite, in a worker that is warm. What several repetitions have in common is called; what a
worker does beside it (heartbeat, schedules, workflows) is none of it. The way itself is what decides, writes or sends:
without the rooms of words and drivers, which all ways share and nobody reads to follow one. Both are counted.
``python -m tests.test_ways`` prints the lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from resilient import Event, Provider, Resilient, handler
from tests.serving import Server

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / top}/" for top in ("resilient", "providers"))
STAGED_BESIDE = (  # for what waits, the sweeper is on the way
    "/engine/run/heartbeat.py",
    "/schedules/",
    "/engine/jobs/workflows.py",
)
BESIDE = (*STAGED_BESIDE, "/engine/run/sweeper.py")
SILENCE = 0.1  # seconds in which nothing of ours is called: what a worker does when it begins is over
SHARED = ("resilient/core/base/", "resilient/store/db/", "resilient/engine/ground/")  # rooms of words and of drivers
MOST = {  # files called, and those of the way itself; 46, 86 and 58 were called once; 20, 28 and 18 are wanted
    "job": (40, 24),
    "429": (69, 47),
    "event": (48, 31),
}
REPETITIONS = 4


class Trace:
    """The files of ours in which something is called while it is on, on any thread."""

    def __init__(self, beside):
        self.beside = beside  # parts of names of files: what these call is not of the way
        self.files, self.runs, self.is_on = set(), [], False

    def __call__(self, frame, event, _):
        name = frame.f_code.co_filename
        if not self.is_on or event != "call" or not name.startswith(OURS) or name in self.files:
            return
        caller = frame
        while caller is not None:
            if any(part in caller.f_code.co_filename for part in self.beside):
                return
            caller = caller.f_back
        self.files.add(name)

    def begin(self):
        self.files, self.is_on = set(), True

    def end(self):
        if self.is_on:
            self.is_on = False
            self.runs.append(self.files)

    async def silence(self):
        """Wait until a worker that began has nothing more to do."""
        silent = False
        while not silent:
            self.begin()
            await asyncio.sleep(SILENCE)
            silent = not self.files
        self.is_on = False

    @property
    def way(self):
        """What all runs have in common but for the first, in which all is made that is made once."""
        return sorted(str(Path(name).relative_to(ROOT)) for name in set.intersection(*self.runs[1:]))


@asynccontextmanager
async def working(file, *, beside=BESIDE, **options):
    """An app with its worker at work, and a trace of what they do."""
    trace = Trace(beside)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        app = Resilient(f"sqlite:///{file}", **options)
        await app.ready()
        worker = app.worker(concurrency=4)
        task = asyncio.create_task(worker.run(signals=False))
        yield app, trace
        worker.stop()
        await task
        await app.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def succeeded(file, count):
    """Wait until so many jobs have. By a connection of its own: nothing of ours is asked."""
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as connection, connection:
        count_them = "SELECT count(*) FROM resilient_job WHERE state = 'succeeded'"
        while connection.execute(count_them).fetchone() != (count,):  # noqa: ASYNC110 - another's rows
            await asyncio.sleep(0.002)
    connection.close()


@handler("nothing")
async def nothing(job):
    pass


async def way_of_a_job(file):
    """From `app.enqueue` to its finished row."""
    async with working(file, handlers=[nothing]) as (app, trace):
        for n in range(REPETITIONS):
            await trace.silence()
            trace.begin()
            await app.enqueue(nothing, resource_key="crm/acct-7")
            await succeeded(file, n + 1)
            trace.end()
    return trace.way


async def way_of_429(file):
    """From the answer until its job begins again, once the cooldown is over."""
    asked, traces = set(), []

    async def answer(request):
        account = request.headers["x-account"]
        if account in asked:
            return Response()
        asked.add(account)
        traces[0].begin()
        return Response(status_code=429, headers={"Retry-After": "1"})

    @handler("push")
    async def push(job):
        if job.execution > 1:
            traces[0].end()
        response = await job.client.post("/push", headers={"x-account": job.resource_key})
        response.raise_for_status()

    with Server(Starlette(routes=[Route("/push", answer, methods=["POST"])])) as url:
        api = Provider(name="api", base_url=url)
        async with working(file, beside=STAGED_BESIDE, handlers=[push], providers=[api]) as (app, trace):
            traces.append(trace)
            for n in range(REPETITIONS):
                await trace.silence()
                await app.enqueue(push, resource_key=f"api/{n}")
                await succeeded(file, n + 1)
    return trace.way


class OrderPlaced(Event, type="order.placed"):
    no: int


async def way_of_an_event(file):
    """From `app.outbox.publish` to its finished row."""

    async def send(message):
        pass

    engine = create_engine(f"sqlite:///{file}")
    async with working(file, destinations={"shop": send}) as (app, trace):
        for n in range(REPETITIONS):
            await trace.silence()
            trace.begin()
            with Session(engine) as session:
                app.outbox.publish(session, OrderPlaced(no=n), key="order-1", to=["shop"])
                session.commit()
            await succeeded(file, n + 1)
            trace.end()
    engine.dispose()
    return trace.way


WAYS = {"job": way_of_a_job, "429": way_of_429, "event": way_of_an_event}


def itself(files):
    """Those of the way itself."""
    return [name for name in files if not name.startswith(SHARED)]


@pytest.mark.parametrize("name", WAYS)
async def test_a_way_is_short(name, tmp_path):
    called = await WAYS[name](tmp_path / "app.db")
    most_called, most = MOST[name]
    assert len(called) <= most_called, "\n".join(called)
    assert len(itself(called)) <= most, "\n".join(itself(called))
    assert len(called) > most_called - 8, "shorter: lower the number"
    assert len(itself(called)) > most - 4, "shorter: lower the number"


def main(place):
    for name, way in WAYS.items():
        files = asyncio.run(way(place / f"{name}.db"))
        own = itself(files)
        marked = [name if name in own else f"({name})" for name in files]
        print(f"{name}: {len(files)} files called, {len(own)} of the way itself", *marked, sep="\n  ")  # noqa: T201


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
