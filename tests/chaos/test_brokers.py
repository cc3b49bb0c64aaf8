"""A broker killed and started again under load: what it confirmed is there afterwards, and everything arrives."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from sqlmodel import Session

from resilient import BreakerPolicy, Event, Fixed, Nats, RabbitMQ, Resilient, Retry

sys.path.insert(0, str(Path(__file__).parents[1]))
import brokers

from tests.helpers import LIMIT

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.proof("tests/wire/test_publishers.py: each broker, none of them killed"),
]
QUICK = {"retry": Retry(max_attempts=None, delay=Fixed(0.2)), "timeout": 5}
KEYS = 20


class Changed(Event, type="thing.changed"):
    number: int


class Load:
    """Publishes all the time, with a worker of its own, until it is told to stop."""

    def __init__(self, url, destination):
        breaker = BreakerPolicy(first_open=0.5, longest_open=1.0)
        self.app = Resilient(
            url, destinations={"broker": destination}, routes={Changed: ["broker"]}, breakers={"outbox/*": breaker}
        )
        self.worker = self.app.worker(concurrency=10)
        self.ids, self._stop = [], asyncio.Event()

    async def __aenter__(self):
        self._running = asyncio.create_task(self.worker.run(signals=False))
        self._publishing = asyncio.create_task(self._publish())
        return self

    async def __aexit__(self, *_):
        self._stop.set()
        await self._publishing
        self.worker.stop()
        await self._running
        await self.app.close()

    async def _publish(self):
        while not self._stop.is_set():
            await asyncio.to_thread(self._commit)
            await asyncio.sleep(0.02)

    def _commit(self):
        with Session(self.app.database.sync_engine) as s:
            made = [
                self.app.outbox.publish(s, Changed(number=len(self.ids)), key=f"k{len(self.ids) % KEYS}"),
                self.app.outbox.publish(s, Changed(number=len(self.ids))),
            ]
            s.commit()
        self.ids += made

    async def published(self):
        """The ids the broker has confirmed."""
        found = await self.app.outbox.list(state="succeeded", limit=10_000)
        return {one.id for one in found}

    async def until(self, count):
        """Wait until so many more are confirmed."""
        wanted = await self.confirmed() + count
        async with asyncio.timeout(LIMIT):
            while await self.confirmed() < wanted:  # noqa: ASYNC110 - the database knows
                await asyncio.sleep(0.05)

    async def confirmed(self):
        return await self.app.jobs.count(state="succeeded", limit=100_000)

    async def settled(self):
        """Stop publishing, and wait until everything is confirmed."""
        self._stop.set()
        await self._publishing
        async with asyncio.timeout(LIMIT):
            while await self.confirmed() < len(self.ids):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.1)


async def killed(load, server, times=1):
    """Under load, and started again; the ids of all that was published."""
    async with load:
        for _ in range(times):
            await load.until(100)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.7)  # long enough for the circuit to open
            await asyncio.to_thread(server.start)
        await load.until(50)
        await load.settled()
        return set(load.ids)


def in_order(found):
    """The numbers of each key, first arrivals only."""
    first, seen = {}, set()
    for key, number in found:
        if key is not None and (key, number) not in seen:
            seen.add((key, number))
            first.setdefault(key, []).append(number)
    return all(numbers == sorted(numbers) for numbers in first.values())


async def test_nats(sqlite_url):
    import nats

    server = brokers.NatsServer().start()
    try:
        connection = await nats.connect(server.url)
        await connection.jetstream().add_stream(name="THINGS", subjects=["events.>"], storage="file")
        await connection.close()
        ids = await killed(Load(sqlite_url, Nats(server.url, stream="THINGS", **QUICK)), server, times=2)
        connection = await nats.connect(server.url)
        stream = connection.jetstream()
        subscribed = await stream.pull_subscribe("events.>", stream="THINGS")
        got = []
        while batch := await fetched(subscribed):
            got += [brokers.event_of(one.data) for one in batch]
        await connection.close()
    finally:
        server.close()
    assert {event["id"] for event in got} == ids
    assert in_order((e.get("partitionkey"), e["data"]["number"]) for e in got)
    assert len(got) - len(ids) < 0.05 * len(ids)  # what was acknowledged too late is dropped by its id


async def fetched(subscribed):
    try:
        return await subscribed.fetch(500, timeout=2)
    except TimeoutError:
        return []


async def test_rabbitmq(sqlite_url):
    import aio_pika

    server = brokers.RabbitServer()
    await asyncio.to_thread(server.start)
    try:
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange("things", "topic", durable=True)
            queue = await channel.declare_queue("things", durable=True)
            await queue.bind(exchange, "thing.#")
        ids = await killed(Load(sqlite_url, RabbitMQ(server.url, exchange="things", **QUICK)), server)
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue("things", durable=True, passive=True)
            got = []
            while (one := await queue.get(no_ack=True, fail=False)) is not None:
                got.append(brokers.event_of(one.body))
    finally:
        await asyncio.to_thread(server.close)
    assert {event["id"] for event in got} == ids
    assert in_order((e.get("partitionkey"), e["data"]["number"]) for e in got)


async def test_a_queue_that_vanishes_confirms_nothing(sqlite_url):
    """RabbitMQ confirms what it throws away; what it returned waits, and goes there once there is a queue."""
    import aio_pika

    url = brokers.require(brokers.RABBITMQ, "RabbitMQ")
    name = f"vanishing-{brokers.free_port()}"
    load = Load(sqlite_url, RabbitMQ(url, routing_key=name, **QUICK))
    async with await aio_pika.connect(url) as connection, load:
        channel = await connection.channel()
        await channel.declare_queue(name)
        await load.until(20)
        await channel.queue_delete(name)
        await asyncio.sleep(0.3)
        confirmed = await load.published()
        await asyncio.sleep(0.5)
        assert await load.published() == confirmed
        queue = await channel.declare_queue(name)
        await load.until(20)
        await load.settled()
        arrived = set()
        while (one := await queue.get(no_ack=True, fail=False)) is not None:
            arrived.add(one.message_id)
        assert arrived == set(load.ids) - confirmed
        await channel.queue_delete(name)
