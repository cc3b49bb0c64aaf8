"""A webhook's receiver gets a few events at once, from all workers together, and its own time to answer each."""

import asyncio

import pytest

from resilient import Event, Resilient, StandardWebhook
from tests.helpers import LIMIT

SECRET = "whsec_" + "Q" * 40
SLOW = 0.1  # seconds that the receiver takes for an answer


class Placed(Event, type="placed"):
    number: int


class Receiver:
    """Takes its time for each event, and counts how many it has at once."""

    def __init__(self):
        self.now, self.most, self.events = 0, 0, 0

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                await reader.readexactly(length)
                self.now += 1
                self.most = max(self.most, self.now)
                await asyncio.sleep(SLOW)
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
    hook = StandardWebhook(receiver.url, SECRET, allow=["127.0.0.1"], timeout=4 * SLOW, batch=5)
    return Resilient(database, destinations={"hook": hook}, routes={Placed: ["hook"]}, **options)


async def test_waiting_for_another_events_answer_is_no_failure_of_the_receiver(database, receiver):
    app = app_of(database, receiver)
    publish(app, 60)
    await app.worker(concurrency=20).drain(timeout=LIMIT)
    assert (receiver.events, receiver.most) == (60, 5)
    assert {(one.state, one.attempts) for one in await app.jobs.list(limit=100)} == {
        ("succeeded", 0)
    }  # none was charged
    await app.close()


@pytest.mark.parametrize("cap", [2, 40])
async def test_what_the_program_declares_counts(database, receiver, cap):
    app = app_of(database, receiver, concurrency={"outbox/*": cap})
    publish(app, 60)
    await app.worker(concurrency=20).drain(timeout=LIMIT)
    assert (receiver.events, receiver.most <= cap) == (60, True)
    assert {(one.state, one.attempts) for one in await app.jobs.list(limit=100)} == {("succeeded", 0)}
    await app.close()
