"""What a broker refuses because of one event's own stream, topic, subject, routing key or key: the others go on."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlmodel import Session

from resilient import Event, JobFailure, Kafka, Message, Nats, RabbitMQ, RedisStream, Resilient
from resilient.engine.events.publishers import Publishers
from tests.helpers import LIMIT, until

sys.path.insert(0, str(Path(__file__).parents[1]))
import brokers

ALLOWED, DENIED = 40, 12  # more denied ones than strikes
_CONTROL = "/usr/lib/rabbitmq/bin/rabbitmqctl"


class Ordered(Event, type="order.made"):
    number: int


class Billed(Event, type="bill.made"):
    """The user of the destination has no right to publish it."""

    number: int


class NatsWithRights(brokers.NatsServer):
    def configuration(self):
        path = self.home / "nats.conf"
        path.write_text(
            f'listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: "{self.home / "js"}" }}\n'
            "accounts { A { jetstream: enabled, users: ["
            "{user: admin, password: pw},"
            '{user: app, password: pw, permissions: {publish: {deny: ["events.bill.>"]}}},'
            '{user: deaf, password: pw, permissions: {subscribe: {deny: ["_INBOX.>"]}}},'
            "] } }\n"
        )
        return path


@asynccontextmanager
async def started(server):
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.close)


@asynccontextmanager
async def nats():
    library = pytest.importorskip("nats")
    async with started(NatsWithRights()) as server:
        admin = await library.connect(server.url.replace("//", "//admin:pw@"))
        await admin.jetstream().add_stream(name="ALL", subjects=["events.>"])
        yield Nats(server.url.replace("//", "//app:pw@"))
        await admin.close()


@asynccontextmanager
async def nats_without_a_stream():
    """Of some events: whoever listens to their subject answers nothing, so none of them says that it is not taken."""
    library = pytest.importorskip("nats")
    async with started(brokers.NatsServer()) as server:
        admin = await library.connect(server.url)
        await admin.jetstream().add_stream(name="ORDERS", subjects=["events.order.>"])

        async def listen(_):
            pass

        await admin.subscribe("events.bill.>", cb=listen)
        await admin.flush()
        yield Nats(server.url, timeout=0.5)
        await admin.close()


class RedisOfACluster(brokers.RedisServer):
    def command(self):
        return [*super().command(), "--cluster-enabled", "yes", "--cluster-require-full-coverage", "no",
                "--cluster-port", str(brokers.free_port())]  # fmt: skip


@asynccontextmanager
async def redis_cluster():
    """Its server has each stream but one."""
    library = pytest.importorskip("redis.asyncio")
    async with started(RedisOfACluster()) as server:
        admin = library.from_url(server.url)
        slot = await admin.execute_command("CLUSTER", "KEYSLOT", "bill.made")
        await admin.execute_command("CLUSTER", "ADDSLOTS", *(one for one in range(16_384) if one != slot))

        async def is_ready():
            return "cluster_state:ok" in str(await admin.execute_command("CLUSTER", "INFO"))

        await until(is_ready)
        await admin.aclose()
        yield RedisStream(server.url, "{type}")


@asynccontextmanager
async def redis():
    library = pytest.importorskip("redis.asyncio")
    async with started(brokers.RedisServer()) as server:
        admin = library.from_url(server.url)
        await admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~order*", "+@all")
        await admin.aclose()
        yield RedisStream(server.url.replace("//", "//app:pw@"), "{type}")


@asynccontextmanager
async def rabbitmq_server():
    """A server with an exchange and a user, and a connection of its administrator."""
    library = pytest.importorskip("aio_pika")
    async with started(brokers.RabbitServer()) as server:
        admin = await library.connect(server.url)
        channel = await admin.channel()
        exchange = await channel.declare_exchange("events", "topic")
        await (await channel.declare_queue("all")).bind(exchange, "#")
        for words in (("add_user", "app", "pw"), ("set_permissions", "app", ".*", ".*", ".*")):
            await asyncio.to_thread(control, server, *words)
        yield server, admin
        await admin.close()


@asynccontextmanager
async def rabbitmq():
    async with rabbitmq_server() as (server, _):
        await asyncio.to_thread(control, server, "set_topic_permissions", "app", "events", "^order", ".*")
        yield RabbitMQ(server.url.replace("guest:guest", "app:pw"), exchange="events")


def control(server, *words):
    subprocess.run(
        [_CONTROL, "-n", f"resilient{server.port}@localhost", *words], check=True, capture_output=True, timeout=LIMIT,
        env={**os.environ, **server.environment()},
    )  # fmt: skip


@asynccontextmanager
async def compacted_topic():
    """A topic that takes no record without a key: each batch with one is refused as a whole, as a cluster does."""
    pytest.importorskip("aiokafka")
    from aiokafka.record.memory_records import MemoryRecords

    from tests.wire.test_kafka import Broker

    counts = Counter()  # of the records of a producer in a partition

    class Compacting(Broker):
        def error_of(self, partition, raw):
            batch = MemoryRecords(bytes(raw)).next_batch()
            keys = [record.key for record in batch]
            if batch.base_sequence != counts[batch.producer_id, partition]:
                return 45  # OUT_OF_ORDER_SEQUENCE_NUMBER
            if None in keys:
                return 87  # INVALID_RECORD
            counts[batch.producer_id, partition] += len(keys)
            return 0

    broker = Compacting()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    yield Kafka(f"127.0.0.1:{broker.port}", topic="things", timeout=5)
    server.close()


@asynccontextmanager
async def published(app):
    """A worker has published all that may be; it ends, and the app with it, behind the block."""
    task = asyncio.create_task(app.worker().run(signals=False))

    async def is_done():
        return len(await app.outbox.list(type="order.made", state="succeeded")) == ALLOWED

    await until(is_done)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await app.close()


@pytest.mark.parametrize("started_with", [nats, nats_without_a_stream, redis, redis_cluster, rabbitmq, compacted_topic])
async def test_what_may_not_be_published_holds_up_no_others(started_with, sqlite_url):
    """Not for the time of a circuit, nor with an error that says that the broker were away."""
    async with started_with() as destination:
        app = Resilient(sqlite_url, destinations={"there": destination}, upgrade=False)
        with Session(app.database.sync_engine) as s:
            for n in range(DENIED):
                app.outbox.publish(s, Billed(number=n), to=["there"])
            for n in range(ALLOWED):
                app.outbox.publish(s, Ordered(number=n), key=f"k{n}", to=["there"])
            s.commit()
        async with published(app):
            refused = await app.outbox.list(type="bill.made")
            assert [one.breaker for one in await app.resources.list() if one.key == "outbox/there"] in ([], ["closed"])
            assert not {"dead", "succeeded"} & {str(one.state) for one in refused}
            told = [one.last_error for one in refused if one.last_error]
            assert told
            of_one = ("did not take", "over one event", "no JetStream stream", "but other events")
            assert all(any(part in one for part in of_one) for one in told), told


async def test_a_denied_routing_key_that_the_broker_cuts_off():
    """Its text has 255 bytes at most; a tenant's long key must not count as the whole destination's trouble."""
    denied, allowed = "bill." + "x" * 240, "order." + "x" * 240
    async with rabbitmq() as destination:
        keyed = replace(destination, routing_key="{key}")

        async def outcome(key):
            publisher = await keyed.connect()
            message = Message(key, "order.made", b"{}", key=key)
            [answer] = await asyncio.gather(publisher.publish(message), return_exceptions=True)
            await publisher.close()
            return answer and (answer.failure.code, answer.failure.counts_for_breaker)

        assert [await outcome(key) for key in (denied, denied, allowed)] == [
            ("channel_closed", False), ("no_permission", False), None
        ]  # fmt: skip


async def test_routing_keys_that_are_denied_for_the_first_time_charge_no_others(sqlite_url):
    """Each costs the channel; what was under way there is sent again at once."""
    async with rabbitmq() as destination:
        app = Resilient(sqlite_url, destinations={"there": replace(destination, routing_key="{key}")}, upgrade=False)
        with Session(app.database.sync_engine) as s:
            for n in range(ALLOWED):
                app.outbox.publish(s, Ordered(number=n), key=f"order.{n}", to=["there"])
                if n % 4 == 0:
                    app.outbox.publish(s, Billed(number=n), key=f"bill.{n}", to=["there"])
            s.commit()
        async with published(app):
            assert {one.attempts for one in await app.outbox.list(type="order.made")} == {0}  # charged
            assert [one.breaker for one in await app.resources.list() if one.key == "outbox/there"] in ([], ["closed"])


async def test_many_denied_events_do_not_look_like_a_broker_that_is_away():
    """They wait for each other, and one that waited too long is refused while the connection stays."""
    async with rabbitmq() as destination:
        keyed = replace(destination, routing_key="{key}", timeout=1)
        keyed.denied_keys.add("bill.1")
        publishers = Publishers({"there": keyed})
        publisher = await publishers.open("there")
        async with publisher._own_channel_lock:  # another one is under way
            with pytest.raises(JobFailure, match="denied the event's routing key before") as caught:
                await publishers.publish("there", Message("m", "bill.made", b"{}", key="bill.1"))
        assert (caught.value.failure.code, caught.value.failure.counts_for_breaker) == ("no_permission", False)
        assert await publishers.open("there") is publisher
        await publishers.close()


async def test_an_alarm_of_the_broker_is_told():
    """It reads nothing from publishers while it is short of memory, and says so only to the connection."""
    async with rabbitmq_server() as (server, _):
        publishers = Publishers({"there": RabbitMQ(server.url, exchange="events", timeout=1)})
        message = Message("m", "order.made", b"{}")
        await publishers.publish("there", message)
        await asyncio.to_thread(control, server, "set_vm_memory_high_watermark", "0.00001")
        for _ in range(2):  # the broker says it after the first message that it does not read
            with pytest.raises(JobFailure, match="short of memory or disk") as caught:
                await publishers.publish("there", message)
        assert (caught.value.failure.code, caught.value.failure.counts_for_breaker) == ("blocked", None)
        await asyncio.to_thread(control, server, "set_vm_memory_high_watermark", "0.4")

        async def is_taken():
            try:
                await publishers.publish("there", message)
            except JobFailure:
                return False
            return True

        await until(is_taken)
        await publishers.close()


async def test_an_exchange_that_is_deleted_or_closed_to_the_user():
    """Each event says why, also one that finds the channel closed over another; and it is the whole destination's."""
    messages = [Message(f"m{n}", "order.made", b"{}") for n in range(4)]

    async def codes(publisher):
        answers = await asyncio.gather(*map(publisher.publish, messages), return_exceptions=True)
        answers += await asyncio.gather(publisher.publish(messages[0]), return_exceptions=True)
        await publisher.close()
        return {(one.failure.code, one.failure.counts_for_breaker is not False) for one in answers}

    async with rabbitmq_server() as (server, admin):
        destination = RabbitMQ(server.url.replace("guest:guest", "app:pw"), exchange="events", routing_key="order")
        publisher = await destination.connect()
        await publisher.publish(messages[0])
        await asyncio.to_thread(control, server, "set_permissions", "app", ".*", "^$", ".*")
        assert await codes(await destination.connect()) == {("no_permission", True)}
        await asyncio.to_thread(control, server, "set_permissions", "app", ".*", ".*", ".*")
        publisher = await destination.connect()
        await (await admin.channel()).exchange_delete("events")
        assert await codes(publisher) == {("no_exchange", True)}


async def test_a_right_that_all_events_need():
    """Without it no acknowledgement is received: that is told at once, and it is the whole destination's."""
    pytest.importorskip("nats")
    async with started(NatsWithRights()) as server:
        publisher = await Nats(server.url.replace("//", "//deaf:pw@")).connect()
        with pytest.raises(JobFailure, match="permissions violation for subscription") as caught:
            await publisher.publish(Message("e-1", "order.made", b"{}", "d-1"))
        assert (caught.value.failure.code, caught.value.failure.counts_for_breaker) == ("no_permission", True)
        await publisher.close()
