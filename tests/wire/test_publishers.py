"""Destinations against real brokers: what is confirmed is there, what is not there is not confirmed."""

import asyncio
import contextlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from resilient import (
    InvalidInput,
    JobFailure,
    Kafka,
    Message,
    MissingExtra,
    Nats,
    Permanent,
    RabbitMQ,
    RedisStream,
    StandardWebhook,
)
from resilient.core.events.message import Envelope, decode, numbered
from resilient.engine.events.publishers import Publishers
from resilient.wire.publishers.base import ConnectionLost, Unsendable

sys.path.insert(0, str(Path(__file__).parents[1]))
import brokers

from tests.helpers import LIMIT

NOBODY = f"127.0.0.1:{brokers.free_port()}"


def message(number=1, *, key="k", delivery=None, data=None, of="order.placed"):
    text = Envelope(of, 1, "/shop").text(
        f"e-{number}", datetime.now(UTC), json.dumps({"number": number} if data is None else data), key=key,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )  # fmt: skip
    return decode(numbered(text, number), delivery=delivery or f"d-{number}")


async def published(destination, *messages):
    publisher = await destination.connect()
    try:
        await asyncio.gather(*(publisher.publish(one) for one in messages))
    finally:
        await publisher.close()


async def failed(destination, *messages):
    """The code of the failure that publishing ends in."""
    with pytest.raises(JobFailure) as caught:
        await published(destination, *(messages or [message()]))
    return caught.value


async def test_nobody_there():
    """Every kind of destination, away: the connection is lost, and no event is given up."""
    for destination in (
        RabbitMQ(f"amqp://guest:guest@{NOBODY}/", timeout=5),
        Nats(f"nats://{NOBODY}", timeout=5),
        RedisStream(f"redis://{NOBODY}/0", timeout=5),
        Kafka(NOBODY, timeout=5),
        StandardWebhook(f"http://{NOBODY}/hook", SECRET, allow=["127.0.0.1"], timeout=5),
    ):
        error = await failed(destination)
        assert isinstance(error, ConnectionLost), destination
        assert error.failure.kind == "transient"
        assert "guest:guest" not in str(error)
        assert "guest:guest" not in repr(destination)


@pytest.mark.parametrize(
    ("destination", "extra"),
    [
        (RabbitMQ("amqp://x"), "rabbitmq"),
        (Nats("nats://x"), "nats"),
        (RedisStream("redis://x"), "redis"),
        (Kafka("x:9092"), "kafka"),
        (StandardWebhook("https://example.com/x", "whsec_" + "a" * 32), "webhooks"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(destination, extra, monkeypatch):
    destination.require()
    for name in ("aio_pika", "nats", "redis.asyncio", "aiokafka", "standardwebhooks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'resilient-engine\[{extra}\]'"):
        destination.require()


async def test_a_mistake_in_the_programs_own_function_is_not_the_brokers():
    """It says nothing about the connection, which others use."""

    def to(message):
        raise KeyError(message.type)

    server = brokers.NatsServer().start()
    try:
        for destination in (
            RabbitMQ(brokers.require(brokers.RABBITMQ, "RabbitMQ"), routing_key=to),
            Nats(server.url, subject=to),
            RedisStream(brokers.require(brokers.REDIS, "Redis"), stream=to),
        ):
            with pytest.raises(KeyError):
                await published(destination, message())
    finally:
        server.close()


async def test_a_user_who_is_not_let_in():
    """The broker is there: who is called at night must look at the password."""

    class WithUser(brokers.NatsServer):
        def configuration(self):
            path = self.home / "nats.conf"
            path.write_text(f"listen: 127.0.0.1:{self.port}\nauthorization {{ user: app, password: pw }}\n")
            return path

    rabbitmq = brokers.require(brokers.RABBITMQ, "RabbitMQ")
    redis = brokers.require(brokers.REDIS, "Redis")
    server = WithUser().start()
    try:
        for destination in (
            RabbitMQ(rabbitmq.replace("guest:guest", "guest:bad")),
            RabbitMQ(f"{rabbitmq.rstrip('/')}/no-such-host"),
            Nats(server.url.replace("//", "//app:bad@")),
            RedisStream(redis.replace("//", "//app:bad@")),
        ):
            error = await failed(destination)
            assert isinstance(error, ConnectionLost)
            assert error.failure.code == "no_login"
            assert "is not there" not in str(error)
            assert "bad" not in str(error)
    finally:
        server.close()


def test_bounds():
    for words in ({"timeout": 0}, {"timeout": 301}, {"batch": 0}, {"batch": 1001}, {"when_dead": "wait"}):
        with pytest.raises(InvalidInput, match=next(iter(words))):
            Nats("nats://x", **words)


class TestRabbitMQ:
    @pytest.fixture
    async def queue(self):
        """An exchange with one queue on the shared broker, gone after the test."""
        aio_pika = pytest.importorskip("aio_pika")
        url, name = brokers.require(brokers.RABBITMQ, "RabbitMQ"), f"test-{uuid4().hex}"
        connection = await aio_pika.connect(url)
        channel = await connection.channel()
        exchange = await channel.declare_exchange(name, "topic", auto_delete=True)
        queue = await channel.declare_queue(name, exclusive=True)
        await queue.bind(exchange, "order.#")
        yield url, name, queue
        await connection.close()

    async def got(self, queue, count):
        found = []
        for _ in range(count):
            one = await queue.get(no_ack=True, timeout=5)
            found.append(one)
        return found

    async def test_what_arrives(self, queue):
        url, name, q = queue
        await published(RabbitMQ(url, exchange=name), *(message(n) for n in range(1, 51)))
        found = await self.got(q, 50)
        assert sorted(one.message_id for one in found) == sorted(f"e-{n}" for n in range(1, 51))
        one = found[0]
        assert (one.delivery_mode, one.type, one.content_type) == (2, "order.placed", "application/cloudevents+json")
        assert one.headers["traceparent"].startswith("00-0af")
        assert one.headers["partitionkey"] == "k"
        assert Message(one.message_id, one.type, one.body).event["data"]["number"] == int(one.message_id[2:])

    async def test_the_default_exchange_names_queues(self, queue):
        url, name, q = queue
        await published(RabbitMQ(url, routing_key=name), message(1))
        assert len(await self.got(q, 1)) == 1
        await published(RabbitMQ(url, routing_key=lambda m: f"{name}" if m.key == "k" else "?"), message(1))
        assert len(await self.got(q, 1)) == 1

    async def test_a_returned_message_is_no_success(self, queue):
        url, name, _ = queue
        error = await failed(RabbitMQ(url, exchange=name), message(of="payment.made"))
        assert (error.failure.code, error.failure.counts_for_breaker) == ("unroutable", False)
        assert not isinstance(error, ConnectionLost)
        error = await failed(RabbitMQ(url, exchange=name, routing_key="nobody"))  # and so is every other event
        assert (error.failure.code, error.failure.counts_for_breaker) == ("unroutable", True)

    async def test_one_that_is_returned_takes_no_other_with_it(self, queue):
        url, name, q = queue
        publisher = await RabbitMQ(url, exchange=name).connect()
        sent = [message(n, of="nobody" if n % 3 == 0 else "order.placed") for n in range(1, 31)]
        results = await asyncio.gather(*(publisher.publish(m) for m in sent), return_exceptions=True)
        await publisher.close()
        assert [isinstance(r, JobFailure) for r in results] == [m.type == "nobody" for m in sent]
        assert len(await self.got(q, 20)) == 20

    async def test_of_copies_that_are_returned_none_is_taken_for_published(self, queue):
        """An event and its replays have one id, and the library tells what is returned apart by nothing else."""
        url, name, q = queue
        publisher = await RabbitMQ(url, exchange=name).connect()
        copies = [message(1, of=of, delivery=f"d-{n}") for n, of in enumerate(["nobody", "nobody", "order.placed"])]
        results = await asyncio.gather(*(publisher.publish(one) for one in copies * 5), return_exceptions=True)
        await publisher.close()
        assert [isinstance(r, JobFailure) for r in results] == [True, True, False] * 5
        assert len(await self.got(q, 5)) == 5

    async def test_a_missing_exchange(self, queue):
        error = await failed(RabbitMQ(queue[0], exchange="never-declared"))
        assert error.failure.code == "no_exchange"
        assert "declare it" in str(error)

    async def test_a_routing_key_beyond_amqp_is_refused_for_good(self, queue):
        """It can never be sent; taken for a lost connection it would close that one again and again."""
        with pytest.raises(Permanent, match="more than 255 bytes") as caught:
            await published(RabbitMQ(queue[0], exchange=queue[1], routing_key="order.{key}"), message(key="ü" * 130))
        assert caught.value.failure.code == "long_key"

    async def test_a_full_queue_refuses(self, queue):
        aio_pika = pytest.importorskip("aio_pika")
        connection = await aio_pika.connect(queue[0])
        channel = await connection.channel()
        full = await channel.declare_queue(
            f"full-{uuid4().hex}", exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        await published(RabbitMQ(queue[0], routing_key=full.name), message(1))
        error = await failed(RabbitMQ(queue[0], routing_key=full.name), message(2))
        assert (error.failure.code, error.failure.counts_for_breaker) == ("nacked", True)  # all events go there
        error = await failed(RabbitMQ(queue[0], routing_key=lambda _: full.name), message(3))
        assert (error.failure.code, error.failure.counts_for_breaker) == ("nacked", False)
        await connection.close()


class TestSmallRabbitMQ:
    @pytest.fixture
    def server(self):
        server = brokers.RabbitServer("max_message_size = 65536\n")
        yield server.start()
        server.close()

    async def test_what_is_too_large_takes_no_other_with_it_for_good(self, server):
        """Its channel is closed over it, with all that was under way; only the one that is too large is given up."""
        aio_pika = pytest.importorskip("aio_pika")
        connection = await aio_pika.connect(server.url)
        queue = await (await connection.channel()).declare_queue("all", exclusive=True)
        destination = RabbitMQ(server.url, routing_key=queue.name)
        publisher = await destination.connect()
        sent = [message(1), message(2, data="x" * 100_000), message(3)]
        first, large, third = await asyncio.gather(*map(publisher.publish, sent), return_exceptions=True)
        await publisher.close()
        assert isinstance(large, Permanent)
        assert large.failure.code == "too_large"
        assert all(one is None or isinstance(one, ConnectionLost) for one in (first, third))
        await published(destination, message(4))
        await connection.close()


class TestHung:
    """A server that takes a connection and says nothing more."""

    INFO = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"proto":1}\r\n'

    @pytest.mark.parametrize(
        ("said", "make"),
        [
            (b"", lambda port: Nats(f"nats://127.0.0.1:{port}")),
            (INFO, lambda port: Nats(f"nats://127.0.0.1:{port}")),
            (b"", lambda port: Kafka(f"127.0.0.1:{port}")),
            (b"", lambda port: RabbitMQ(f"amqp://guest:guest@127.0.0.1:{port}/")),
        ],
        ids=["nats", "nats that greets", "kafka", "rabbitmq"],
    )
    async def test_it_keeps_no_connection(self, said, make):
        """An outage may last for days, and each look at it would leave one behind."""
        connected = set()

        async def hung(reader, writer):
            connected.add(writer)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                while await reader.read(1_000):
                    pass
            connected.discard(writer)
            writer.close()

        server = await asyncio.start_server(hung, "127.0.0.1", 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):  # as `engine.events.outbox` bounds it
                await make(server.sockets[0].getsockname()[1]).connect()
        async with asyncio.timeout(LIMIT):
            while connected:  # noqa: ASYNC110 - the server hears of it a moment later
                await asyncio.sleep(0.01)
        server.close()


class TestNats:
    @pytest.fixture
    def server(self):
        server = brokers.NatsServer()
        yield server.start()
        server.close()

    async def stream(self, server, **words):
        nats = pytest.importorskip("nats")
        connection = await nats.connect(server.url)
        stream = connection.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["events.>"], **words)
        return connection, stream

    async def test_what_arrives_once(self, server):
        connection, stream = await self.stream(server)
        await published(Nats(server.url, stream="ORDERS"), *(message(n) for n in range(1, 51)))
        await published(Nats(server.url), message(7), message(9))  # sent again after a lost acknowledgement
        assert (await stream.stream_info("ORDERS")).state.messages == 50
        await published(Nats(server.url), message(7, delivery="another"))  # replayed on purpose
        assert (await stream.stream_info("ORDERS")).state.messages == 51
        got = await stream.get_last_msg("ORDERS", "events.order.placed")
        assert got.headers["Nats-Msg-Id"] == "another"
        assert got.headers["content-type"] == "application/cloudevents+json"
        assert got.headers["traceparent"].startswith("00-")
        assert json.loads(got.data)["id"] == "e-7"
        await connection.close()

    async def test_what_it_does_not_take(self, server):
        connection, _ = await self.stream(server, max_msgs=1, discard="new")
        for subject, ill in (("elsewhere.{type}", False), ("elsewhere.thing", True)):
            error = await failed(Nats(server.url, subject=subject))
            assert (error.failure.code, error.failure.counts_for_breaker) == ("no_stream", ill)
        other = await failed(Nats(server.url, stream="ANOTHER"))  # than the one that listens
        assert "did not take" in str(other)
        assert not isinstance(other, ConnectionLost)
        await published(Nats(server.url), message(1))
        assert not isinstance(await failed(Nats(server.url), message(2)), ConnectionLost)  # the stream is full
        with pytest.raises(Permanent):
            await published(Nats(server.url), message(3, data="x" * 100_000))
        with pytest.raises(Permanent):
            await published(Nats(server.url, subject="a b"), message(4))
        await connection.jetstream().add_stream(name="SMALL", subjects=["small.>"], max_msg_size=1_000)
        with pytest.raises(Permanent, match="size"):
            await published(Nats(server.url, subject="small.{type}"), message(5, data="x" * 2_000))
        await connection.close()

    async def test_a_server_without_room_takes_nothing(self, monkeypatch):
        """Whichever stream an event is for: the whole destination waits for that."""

        def little_room(server):
            path = server.home / "nats.conf"
            store = f'store_dir: "{server.home / "js"}", max_file_store: 1MB'
            path.write_text(f"listen: 127.0.0.1:{server.port}\njetstream {{ {store} }}\n")
            return path

        monkeypatch.setattr(brokers.NatsServer, "configuration", little_room)
        small = brokers.NatsServer()
        try:
            await asyncio.to_thread(small.start)
            connection, _ = await self.stream(small)
            error = await failed(Nats(small.url), *(message(n, data="x" * 60_000) for n in range(40)))
            assert (error.failure.code, error.failure.counts_for_breaker) == ("10023", True)
            await connection.close()
        finally:
            small.close()

    async def test_what_is_too_large_with_its_headers_takes_no_other_with_it(self, server):
        """The server counts them too, and closes the connection over one byte too many."""
        connection, _ = await self.stream(server)
        publisher = await Nats(server.url, stream="ORDERS").connect()
        bare = len(message(data="").body)
        for over in (0, 100):
            large = message(3, data="x" * (65_536 - bare - over))
            results = await asyncio.gather(
                *(publisher.publish(one) for one in (message(over), large, message(over + 1))), return_exceptions=True
            )
            assert [type(r) for r in results] == [type(None), Unsendable, type(None)]
        await publisher.publish(message(4, data="x" * (65_536 - bare - 1_000)))
        await publisher.close()
        await connection.close()

    async def test_killed_and_started_again(self, server):
        connection, _ = await self.stream(server, storage="file")
        await connection.close()
        publisher = await Nats(server.url, timeout=1).connect()
        await publisher.publish(message(1))
        await asyncio.to_thread(server.kill)
        with pytest.raises(ConnectionLost):
            await publisher.publish(message(2))
        await publisher.close()
        await asyncio.to_thread(server.start)
        await published(Nats(server.url), message(2))
        nats = pytest.importorskip("nats")
        connection = await nats.connect(server.url)
        assert (await connection.jetstream().stream_info("ORDERS")).state.messages == 2
        await connection.close()


class TestRedisStreams:
    @pytest.fixture
    async def stream(self):
        redis = pytest.importorskip("redis.asyncio")
        name = f"test-{uuid4().hex}"
        client = redis.from_url(brokers.require(brokers.REDIS, "Redis"))
        yield name, client
        await client.delete(name)
        await client.aclose()

    async def test_what_arrives(self, stream):
        name, client = stream
        await published(RedisStream(brokers.REDIS, name), *(message(n) for n in range(1, 51)))
        found = [fields for _, fields in await client.xrange(name)]
        assert sorted(f[b"id"].decode() for f in found) == sorted(f"e-{n}" for n in range(1, 51))
        assert found[0][b"type"] == b"order.placed"
        assert found[0][b"key"] == b"k"
        assert json.loads(found[0][b"event"])["specversion"] == "1.0"

    async def test_what_it_does_not_take(self, stream):
        name, client = stream
        await client.set(name, "not a stream")
        error = await failed(RedisStream(brokers.REDIS, name))
        assert (error.failure.code, error.failure.kind) == ("WRONGTYPE", "transient")
        assert not isinstance(error, ConnectionLost)
        for to, ill in ((name, True), (name.replace(name[-1], "{key}"), False)):
            error = await failed(RedisStream(brokers.REDIS, to), message(key=name[-1]))
            assert error.failure.counts_for_breaker is ill

    async def test_what_is_wrong_is_called_as_redis_calls_it(self):
        """Its library takes the word out of some errors; and a right to the command is needed for every stream."""
        redis, server = pytest.importorskip("redis.asyncio"), brokers.RedisServer()
        try:
            await asyncio.to_thread(server.start)
            admin = redis.from_url(server.url)
            for user, rights in (("keys", ("~order*", "+@all")), ("command", ("~*", "+@all", "-xadd"))):
                await admin.execute_command("ACL", "SETUSER", user, "on", ">pw", *rights)
            for user, ill in (("keys", False), ("command", True)):
                to = RedisStream(server.url.replace("//", f"//{user}:pw@"), "bill.{type}")
                error = await failed(to)
                assert (error.failure.code, error.failure.counts_for_breaker) == ("NOPERM", ill)
            await admin.config_set("maxmemory", "1")
            error = await failed(RedisStream(server.url, "{type}"))
            assert (error.failure.code, error.failure.counts_for_breaker) == ("OOM", True)
            assert "OOM command not allowed" in str(error)
            await admin.aclose()
        finally:
            server.close()

    async def test_a_server_that_is_a_replica_by_now_is_left(self):
        """After a failover the name leads elsewhere; what was connected before would refuse every event for ever."""
        redis = pytest.importorskip("redis.asyncio")
        old, new = brokers.RedisServer(), brokers.RedisServer()
        leads_to = [old]

        async def forward(reader, writer):
            there, back = await asyncio.open_connection("127.0.0.1", leads_to[0].port)
            await asyncio.gather(pipe(reader, back), pipe(there, writer))

        async def pipe(reader, writer):
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(1_000):
                    writer.write(part)
            writer.close()

        try:
            for server in (old, new):
                await asyncio.to_thread(server.start)
            name = await asyncio.start_server(forward, "127.0.0.1", 0)
            url = f"redis://127.0.0.1:{name.sockets[0].getsockname()[1]}/0"
            publishers = Publishers({"stream": RedisStream(url, "s")})
            await publishers.publish("stream", message(1))
            client = redis.from_url(old.url)
            await client.replicaof("127.0.0.1", str(new.port))
            await client.aclose()
            leads_to[0] = new
            with pytest.raises(ConnectionLost, match="a replica"):
                await publishers.publish("stream", message(2))
            await publishers.publish("stream", message(2))
            await publishers.close()
            name.close()
        finally:
            old.close()
            new.close()

    async def test_trimmed(self, stream):
        name, client = stream
        await published(RedisStream(brokers.REDIS, name, maxlen=10), *(message(n) for n in range(1, 400)))
        assert await client.xlen(name) < 300  # roughly: Redis trims whole nodes


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
