"""Kafka's errors, spoken by a stand-in. What brokers that are not ours make of it: tests/engine/test_outbox_kafka.py.

The stand-in reads and writes real frames (aiokafka's own structures): what is asked of it (acks, producer id, sequence
numbers, keys, headers) is what a broker would see, and its errors are what a broker would answer.
"""

import asyncio
import json
from io import BytesIO

import pytest

from resilient import Kafka, Message, Permanent
from resilient.engine.events.publishers import Publishers
from resilient.wire.publishers.base import ConnectionLost

pytest.importorskip("aiokafka")
from aiokafka.protocol.admin import ApiVersionResponse_v0
from aiokafka.protocol.api import RequestHeader_v1
from aiokafka.protocol.metadata import MetadataRequest_v1, MetadataResponse_v1
from aiokafka.protocol.produce import ProduceRequest_v3, ProduceResponse_v3
from aiokafka.protocol.transaction import InitProducerIdResponse_v0
from aiokafka.record.memory_records import MemoryRecords

from tests.helpers import LIMIT, until

PRODUCE, METADATA, VERSIONS, PRODUCER_ID = 0, 3, 18, 22
NOTHING_WRONG, UNKNOWN_TOPIC, TOO_LARGE, NOT_ENOUGH_REPLICAS, NOT_LEADER = 0, 3, 10, 19, 6


class Broker:
    """One node, with every topic in two partitions."""

    def __init__(self):
        self.records, self.acks, self.errors, self.producer_ids = [], set(), [], 0
        self.silent, self.missing = False, set()

    async def serve(self, reader, writer):
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                frame = BytesIO(await reader.readexactly(size))
                header = RequestHeader_v1.decode.__func__(_Header, frame)
                answer = getattr(self, f"answer_{header.api_key}")(frame)
                if answer is None:
                    continue
                body = header.correlation_id.to_bytes(4, "big", signed=True) + answer.encode()
                writer.write(len(body).to_bytes(4, "big") + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer_18(self, _frame):
        known = [(PRODUCE, 3, 3), (METADATA, 1, 1), (VERSIONS, 0, 0), (PRODUCER_ID, 0, 0)]
        return ApiVersionResponse_v0(0, known)

    def answer_3(self, frame):
        topics = MetadataRequest_v1.decode(frame).topics or []
        partitions = [(0, n, 1, [1], [1]) for n in range(2)]
        answers = [(UNKNOWN_TOPIC, t, False, []) if t in self.missing else (0, t, False, partitions) for t in topics]
        return MetadataResponse_v1([(1, "127.0.0.1", self.port, None)], 1, answers)

    def answer_22(self, _frame):
        self.producer_ids += 1
        return InitProducerIdResponse_v0(0, 0, 100 + self.producer_ids, 0)

    def answer_0(self, frame):
        asked = ProduceRequest_v3.decode(frame)
        self.acks.add(asked.required_acks)
        if self.silent:
            return None
        topics = []
        for topic, partitions in asked.topics:
            answers = []
            for partition, raw in partitions:
                error = self.error_of((topic, partition), raw)
                if not error:
                    self.keep(topic, partition, raw)
                answers.append((partition, error, len(self.records), -1))
            topics.append((topic, answers))
        return ProduceResponse_v3(topics, 0)

    def error_of(self, _partition, _raw):
        return self.errors.pop(0) if self.errors else NOTHING_WRONG

    def keep(self, topic, partition, raw):
        batches = MemoryRecords(bytes(raw))
        while (batch := batches.next_batch()) is not None:
            for record in batch:
                self.records.append((topic, partition, batch.producer_id, record.key, record.value, record.headers))


class _Header(RequestHeader_v1):
    """Read, where aiokafka only writes them."""

    def __init__(self, *fields):
        for name, value in zip(self.SCHEMA.names, fields, strict=True):
            self.__dict__[name] = value


@pytest.fixture
async def broker():
    broker = Broker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    broker.address = f"127.0.0.1:{broker.port}"
    yield broker
    server.close()


def message(number, key=None):
    body = json.dumps({"id": f"e-{number}", "specversion": "1.0"}).encode()
    return Message(f"e-{number}", "order.placed", body, f"d-{number}", key, number, traceparent="00-a-b-01")


async def published(destination, *messages):
    publisher = await destination.connect()
    try:
        return await asyncio.gather(*(publisher.publish(m) for m in messages), return_exceptions=True)
    finally:
        await publisher.close()


async def test_what_a_broker_is_asked(broker):
    sent = [message(n, f"k{n % 5}") for n in range(40)]
    assert await published(Kafka(broker.address, topic="orders", timeout=5), *sent) == [None] * 40
    assert broker.acks == {-1}  # all replicas in sync
    assert broker.producer_ids == 1  # an idempotent producer has one
    assert {r[2] for r in broker.records} == {101}
    assert sorted(json.loads(r[4])["id"] for r in broker.records) == sorted(m.id for m in sent)
    partition_of = {}
    for topic, partition, _, key, _, headers in broker.records:
        assert topic == "orders"
        assert partition_of.setdefault(key, partition) == partition  # a key stays together, so it stays in order
        assert dict(headers)["content-type"] == b"application/cloudevents+json"
        assert dict(headers)["traceparent"] == b"00-a-b-01"


async def test_topics_by_type(broker):
    await published(Kafka([broker.address], timeout=5), message(1))
    await published(Kafka([broker.address], topic=lambda m: f"t-{m.id}", timeout=5), message(2))
    assert [r[0] for r in broker.records] == ["order.placed", "t-e-2"]


async def test_its_guarantees_cannot_be_turned_off(broker):
    options = {"acks": 0, "enable_idempotence": False}
    await published(Kafka(broker.address, topic="orders", options=options, timeout=5), message(1))
    assert broker.acks == {-1}
    assert broker.producer_ids == 1


async def test_what_passes_is_tried_again_by_the_producer(broker):
    broker.errors = [NOT_LEADER]
    assert await published(Kafka(broker.address, topic="orders", timeout=5), message(1)) == [None]
    assert len(broker.records) == 1


async def test_what_it_refuses(broker):
    broker.errors = [TOO_LARGE]
    (error,) = await published(Kafka(broker.address, topic="orders", timeout=5), message(1))
    assert isinstance(error, Permanent)
    assert broker.records == []


@pytest.mark.parametrize(("topic", "ill"), [("{type}", False), ("order.placed", True)])
async def test_a_topic_that_is_missing_is_no_lost_connection(broker, topic, ill):
    """It is about the events of one type, if others go to other topics; and they go on over the same producer."""
    broker.missing = {"order.placed"}
    publishers = Publishers({"kafka": Kafka(broker.address, topic=topic, timeout=2)})
    results = await asyncio.gather(
        publishers.publish("kafka", message(1)),
        publishers.publish("kafka", message(2)._replace(type="order.paid")),
        return_exceptions=True,
    )
    assert not isinstance(results[0], ConnectionLost)
    assert (results[0].failure.code, results[0].failure.counts_for_breaker) == ("UnknownTopicOrPartitionError", ill)
    if not ill:
        assert results[1] is None
        await publishers.publish("kafka", message(3)._replace(type="order.paid"))
        assert broker.producer_ids == 1
    await publishers.close()


async def test_a_broker_that_says_nothing(broker):
    broker.silent = True
    publisher = await Kafka(broker.address, topic="orders", timeout=1).connect()
    with pytest.raises((ConnectionLost, TimeoutError)):
        async with asyncio.timeout(1.5):  # as the engine bounds it: the producer itself would go on and on
            await publisher.publish(message(1))
    async with asyncio.timeout(LIMIT):
        broker.silent = False
        await publisher.close()


def of_the_library():
    return [task for task in asyncio.all_tasks() if "aiokafka" in str(task.get_coro().cr_code.co_filename)]


async def test_a_producer_that_cannot_be_stopped_leaves_nothing_behind(broker, monkeypatch):
    """Its library waits for what a hung broker has not answered; each further connection would leave as much."""
    monkeypatch.setattr("resilient.engine.events.publishers._CLOSE_TIMEOUT", 0.05)
    publishers = Publishers({"kafka": Kafka(broker.address, topic="orders", timeout=1)})
    await publishers.publish("kafka", message(1))
    broker.silent = True
    connection = publishers._open["kafka"]
    waiting = asyncio.create_task(connection.publish(message(2)))
    await until(lambda: any("_send_produce_req" in repr(task) for task in of_the_library()))
    async with asyncio.timeout(LIMIT):
        await publishers.close()
    with pytest.raises(ConnectionLost):
        await waiting
    await until(lambda: not of_the_library())


def test_no_password_is_shown():
    shown = repr(Kafka("b:9092", options={"sasl_plain_password": "canary"}))
    assert "canary" not in shown


async def test_a_mistake_in_the_programs_own_function_is_not_the_brokers(broker):
    (error,) = await published(Kafka(broker.address, topic=lambda _: 1 / 0, timeout=5), message(1))
    assert isinstance(error, ZeroDivisionError)
