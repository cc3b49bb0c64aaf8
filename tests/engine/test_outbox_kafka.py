"""Events through Kafka's protocol to brokers that are not ours: librdkafka's cluster in memory, three of them.

What they got is read by Confluent's client. A cluster of the JVM's is not to be had here; what a broker's errors do is
in tests/wire/test_kafka.py.
"""

import asyncio
import json
import random

import pytest
from sqlalchemy.orm import Session

from resilient import Event, Kafka, Resilient
from tests.helpers import LIMIT

confluent = pytest.importorskip("confluent_kafka")
KEYS, TRANSACTIONS, READ_WITHIN = 7, 60, 20


class Counted(Event, type="thing.counted"):
    key: str
    number: int


@pytest.fixture
def cluster():
    """The addresses of its brokers; it lives as long as this client."""
    client = confluent.Producer({"test.mock.num.brokers": 3, "bootstrap.servers": "in-memory"})
    yield [f"{b.host}:{b.port}" for b in client.list_topics(timeout=10).brokers.values()]
    client.flush(1)


async def test_each_committed_event_is_in_the_topic_once_and_in_the_order_of_its_key(database, cluster):
    things = Kafka(cluster, topic="things", timeout=10)
    app = Resilient(database, destinations={"kafka": things}, routes={Counted: ["kafka"]})
    with Session(database.sync_engine) as session:
        committed = publish_some(app, session, random.Random(11))
    assert await app.worker(concurrency=20).drain(timeout=LIMIT) > 0
    read = await asyncio.to_thread(read_all, cluster, sum(map(len, committed.values())))
    found = {}
    for key, headers, event, _ in read:
        assert event["data"]["key"] == key
        assert headers["content-type"] == b"application/cloudevents+json"
        found.setdefault(key, []).append(event["data"]["number"])
    assert found == committed
    assert len({event["id"] for _, _, event, _ in read}) == len(read)
    for key in found:
        assert len({partition for k, _, _, partition in read if k == key}) == 1, "a key has one partition"


def publish_some(app, session, dice):
    """Events of several keys in transactions, some of them rolled back: the numbers of each key that are committed."""
    committed, numbers = {}, dict.fromkeys(range(KEYS), 0)
    for _ in range(TRANSACTIONS):
        told = []
        for n in dice.choices(range(KEYS), k=dice.randint(1, 6)):
            numbers[n] += 1
            app.outbox.publish(session, Counted(key=f"k{n}", number=numbers[n]), key=f"k{n}")
            told.append((f"k{n}", numbers[n]))
        if dice.random() < 0.2:
            session.rollback()
            continue
        session.commit()
        for key, number in told:
            committed.setdefault(key, []).append(number)
    return committed


def read_all(cluster, number):
    """What is in the topic, and that there is no more of it: key, headers, event and partition of each."""
    consumer = confluent.Consumer(
        {"bootstrap.servers": ",".join(cluster), "group.id": "reader", "auto.offset.reset": "earliest"}
    )
    partitions = consumer.list_topics("things", timeout=10).topics["things"].partitions
    consumer.assign([confluent.TopicPartition("things", number, 0) for number in partitions])
    found = []
    try:
        while (record := consumer.poll(READ_WITHIN if len(found) < number else 1)) is not None:
            assert record.error() is None, record.error()
            event = json.loads(record.value())
            found.append((record.key().decode(), dict(record.headers()), event, record.partition()))
    finally:
        consumer.close()
    return found
