"""A webhook's receiver gets a few events at once, from all workers together, and its own time to answer each."""

import asyncio

import pytest

from resilient import Event, Resilient, StandardWebhook
from tests.helpers import LIMIT, until

SECRET = "whsec_" + "Q" * 40


class Placed(Event, type="placed"):
    number: int


class Receiver:
    """Holds each event until it shall answer, and counts how many it has at once."""

    def __init__(self):
        self.now, self.most, self.events, self.answers = 0, 0, 0, asyncio.Event()

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                await reader.readexactly(length)
                self.now += 1
                self.most = max(self.most, self.now)
                await self.answers.wait()
                self.now -= 1
                self.events += 1
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def receiver():
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


def publish(app, count):
    with app.database.sync_engine.begin() as c:
        for number in range(count):
            app.outbox.publish(c, Placed(number=number), key=f"k{number}")


def app_of(database, receiver, **options):
    hook = StandardWebhook(receiver.url, SECRET, allow=["127.0.0.1"], timeout=LIMIT, batch=5)
    return Resilient(database, destinations={"hook": hook}, routes={Placed: ["hook"]}, **options)


async def relayed(app, receiver, at_once):
    """Relay sixty events; how many jobs were running when the receiver had so many requests and had answered none."""
    publish(app, 60)
    relaying = asyncio.create_task(app.worker(concurrency=20).drain(timeout=LIMIT))
    await until(lambda: receiver.now >= at_once)
    running = len(await app.jobs.list(state="running", limit=100))
    receiver.answers.set()
    await relaying
    assert receiver.events == 60
    assert {(one.state, one.attempts) for one in await app.jobs.list(limit=100)} == {("succeeded", 0)}
    await app.close()
    return running


async def test_an_event_waits_for_its_turn_before_its_time_begins(database, receiver):
    """What waits for another event's answer is no running job: its time would be charged to the receiver."""
    assert (await relayed(app_of(database, receiver), receiver, 5), receiver.most) == (5, 5)


@pytest.mark.parametrize(("cap", "at_once"), [(2, 2), (40, 6)])
async def test_what_the_program_declares_counts(database, receiver, cap, at_once):
    app = app_of(database, receiver, concurrency={"outbox/*": cap})
    assert at_once <= await relayed(app, receiver, at_once) <= cap
    assert receiver.most <= cap
