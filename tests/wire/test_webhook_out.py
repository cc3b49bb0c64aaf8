"""Events as webhooks: signed so that others believe them, and never sent where they do not belong."""

import asyncio
import contextlib
import json
import logging
import socket
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpcore
import pytest
import standardwebhooks

from resilient import (
    Delivery,
    InvalidInput,
    JobFailure,
    Permanent,
    Signature,
    StandardWebhook,
    Throttled,
    Webhook,
    Word,
)
from resilient.core.events.message import Envelope, decode
from resilient.core.events.webhook import verify
from resilient.engine.events.publishers import Publishers
from resilient.wire.publishers.base import ConnectionLost
from resilient.wire.requests.guard import PublicNetwork
from tests.helpers import LIMIT, most_in_a_turn

OLD, NEW = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + "Q" * 40
MESSAGE = decode(
    Envelope("order.placed", 1, "/s").text("e-1", datetime.now(UTC), '{"café": 1}', key="k"),
    delivery="d-1",
    number=7,
)


class Receiver:
    """Answers every request as it is told, and keeps it."""

    def __init__(self):
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        self.seen, self.connections, self.url = [], 0, ""

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                sent = dict(line.split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers["content-length"]))
                self.seen.append((lines[0], {k.lower(): v for k, v in sent.items()}, body))
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def receiver():
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    receiver.url = f"http://127.0.0.1:{receiver.port}/hook?token=canary"
    yield receiver
    server.close()


@asynccontextmanager
async def publisher(url, secrets=NEW, *, allow=("127.0.0.1",), **words):
    made = await StandardWebhook(url, secrets, allow=allow, **words).connect()
    try:
        yield made
    finally:
        await made.close()


async def answered(receiver, status, *headers, body=b""):
    """What becomes of an event that is answered so."""
    lines = [f"HTTP/1.1 {status} X".encode(), f"content-length: {len(body)}".encode(), *map(str.encode, headers)]
    receiver.answer = b"\r\n".join(lines) + b"\r\n\r\n" + body
    async with publisher(receiver.url) as to:
        try:
            await to.publish(MESSAGE)
        except JobFailure as error:
            return error
    return None


class TestSigning:
    async def test_the_standard_library_believes_it(self, receiver):
        async with publisher(receiver.url, [NEW, OLD]) as to:
            await to.publish(MESSAGE._replace(traceparent="00-1-2-01", tracestate="v=1"))
            await to.publish(MESSAGE)
        assert receiver.connections == 1
        (line, headers, body) = receiver.seen[0]
        assert line == "POST /hook?token=canary HTTP/1.1"
        assert (headers["traceparent"], headers["tracestate"]) == ("00-1-2-01", "v=1")
        assert headers["webhook-id"] == "e-1"  # the same over retries and replays
        assert headers["content-type"] == "application/cloudevents+json; charset=utf-8"
        assert json.loads(body)["data"] == {"café": 1}
        for secret in (NEW, OLD):  # while they rotate
            assert standardwebhooks.Webhook(secret).verify(body, headers)["id"] == "e-1"
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(NEW).verify(body + b" ", headers)
        assert headers["webhook-signature"].startswith("v1,")
        assert headers["webhook-signature"].count("v1,") == 2

    @pytest.mark.parametrize("trace", ["é", " 00-1-2-01", "00-1-2-01 ", "\u2028"])
    async def test_a_trace_that_no_header_can_hold_is_left_out(self, receiver, trace):
        """It may be copied from a stranger's request, and an event that cannot be sent looks like a receiver away."""
        text = Envelope("order.placed", 1, "/s").text(
            "e-1", datetime.now(UTC), "{}", traceparent=trace, tracestate=trace
        )
        async with publisher(receiver.url) as to:
            await to.publish(decode(text, delivery="d-1"))
        _, headers, body = receiver.seen[0]
        assert {"traceparent", "tracestate"} & headers.keys() == set()
        assert json.loads(body)["traceparent"] == trace

    async def test_so_does_our_own_inbound_check(self, receiver):
        async with publisher(receiver.url) as to:
            await to.publish(MESSAGE)
        _, headers, body = receiver.seen[0]
        facts = Webhook(
            signatures=(
                Signature(
                    header="webhook-signature", signed="{id}.{timestamp}.{body}", encoding="base64",
                    pattern=r"v1,(\S+)", timestamp="webhook-timestamp", word=Word.EPOCH_S, key="whsec",
                ),
            ),
            delivery="webhook-id",
        )  # fmt: skip
        assert verify(facts, Delivery(headers, body), [NEW], datetime.now(UTC)) == ""
        assert verify(facts, Delivery(headers, body + b" "), [NEW], datetime.now(UTC)) != ""

    @pytest.mark.parametrize("secret", ["", "whsec_", "whsec_" + "a" * 30, "whsec_" + "a" * 100, "b" * 40, "whsec_é"])
    def test_weak_secrets(self, secret):
        with pytest.raises(InvalidInput, match="24 to 64 bytes") as caught:
            StandardWebhook("https://example.com/hook", secret)
        assert len(secret) < 10 or secret not in str(caught.value)

    @pytest.mark.parametrize("mark", ["-", "_", " ", "\n", "="])
    def test_a_secret_that_is_no_base64(self, mark):
        """What decodes one would leave such a mark out: nobody else would get the same key."""
        with pytest.raises(InvalidInput, match="24 to 64 bytes in base64"):
            StandardWebhook("https://example.com/hook", NEW[:10] + mark + NEW[11:])

    def test_a_secret_without_its_padding(self):
        StandardWebhook("https://example.com/hook", "whsec_" + "Q" * 43)
        StandardWebhook("https://example.com/hook", "whsec_" + "Q" * 43 + "=")

    @pytest.mark.parametrize("secrets", [[], (), iter([])])
    def test_no_secret(self, secrets):
        """Its events would go out unsigned."""
        with pytest.raises(InvalidInput, match="signed by no secret"):
            StandardWebhook("https://example.com/hook", secrets)

    async def test_secrets_that_can_be_read_once(self, receiver):
        async with publisher(receiver.url, iter([NEW, OLD]), allow=iter(["127.0.0.1"])) as to:
            await to.publish(MESSAGE)
        assert receiver.seen[0][1]["webhook-signature"].count("v1,") == 2

    def test_nothing_secret_is_shown(self):
        shown = repr(StandardWebhook("https://example.com/hook?token=canary", NEW))
        assert "canary" not in shown
        assert NEW not in shown


class TestAnswers:
    async def test_taken(self, receiver):
        for status in (200, 201, 202, 204):
            assert await answered(receiver, status) is None

    async def test_refused(self, receiver):
        for status, code, ill in ((400, "http_400", False), (404, "http_404", False), (500, "http_500", True)):
            error = await answered(receiver, status)
            assert (error.failure.code, error.failure.kind) == (code, "transient")
            assert error.failure.counts_for_breaker is ill

    async def test_gone(self, receiver):
        assert isinstance(await answered(receiver, 410), Permanent)

    async def test_a_redirect_is_not_followed(self, receiver):
        error = await answered(receiver, 302, f"location: http://127.0.0.1:{receiver.port}/elsewhere")
        assert error.failure.code == "http_302"
        assert len(receiver.seen) == 1

    async def test_told_to_wait(self, receiver):
        """In seconds, whatever this host's clock says: the database's decides. At most a day, for a stranger asks."""
        error = await answered(receiver, 429, "retry-after: 120")
        assert isinstance(error, Throttled)
        assert (error.failure.retry_at, error.failure.retry_in) == (None, 120)
        error = await answered(receiver, 503, "retry-after: 31536000")
        assert error.failure.retry_in == 24 * 3600
        error = await answered(receiver, 503)
        assert (error.failure.kind, error.failure.counts_for_breaker) == ("transient", True)

    async def test_an_endless_answer_is_cut_off(self, receiver):
        receiver.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 100_000
        async with asyncio.timeout(LIMIT), publisher(receiver.url) as to:
            await to.publish(MESSAGE)

    async def test_interim_answers_without_end_are_cut_off(self, receiver):
        receiver.answer = b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000
        async with asyncio.timeout(LIMIT / 2), publisher(receiver.url, timeout=LIMIT) as to:
            with pytest.raises(ConnectionLost):
                await to.publish(MESSAGE)

    async def test_an_answer_in_thousands_of_parts_leaves_others_their_turn(self, receiver, monkeypatch):
        """They are here at once, so nothing waits for them; a partner's server must not stop a whole worker."""
        receiver.answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000
        async with publisher(receiver.url, timeout=LIMIT) as to:
            assert 100 < await most_in_a_turn(to.publish(MESSAGE), monkeypatch) < 300

    @pytest.mark.parametrize("after", ["breaks off", "says nothing more"])
    @pytest.mark.parametrize(("status", "code"), [(200, None), (410, "gone"), (500, "http_500")])
    async def test_its_status_counts_whatever_becomes_of_its_body(self, after, status, code):
        """An event that was taken is not posted again."""
        over = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 100\r\n\r\nok".encode())
            await writer.drain()
            if after == "says nothing more":
                await over.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        publishers = Publishers({"partner": StandardWebhook(url, NEW, allow=["127.0.0.1"], timeout=LIMIT)})
        async with asyncio.timeout(LIMIT / 2):
            (error,) = await asyncio.gather(publishers.publish("partner", MESSAGE), return_exceptions=True)
        assert (error and error.failure.code) == code
        over.set()
        await publishers.close()
        server.close()

    async def test_no_answer(self, receiver):
        receiver.answer = b""
        async with publisher(receiver.url, timeout=0.1) as to:
            with pytest.raises(ConnectionLost) as caught:
                await to.publish(MESSAGE)
        assert "canary" not in str(caught.value)


class TestTogether:
    async def test_one_that_gets_no_answer_takes_no_other_with_it(self):
        """A receiver that resets a connection may have taken what is on its way over the others."""

        async def serve(reader, writer):
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                if b"webhook-id: e-1\r" in head.lower():
                    await slow.wait()
                else:
                    slow.set()
                    await gone.wait()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        slow, gone = asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        publishers = Publishers({"partner": StandardWebhook(url, NEW, allow=["127.0.0.1"])})
        other = asyncio.create_task(publishers.publish("partner", MESSAGE._replace(id="e-2")))
        with pytest.raises(ConnectionLost):
            await publishers.publish("partner", MESSAGE)
        await asyncio.sleep(0.05)
        gone.set()
        await other
        await publishers.close()
        server.close()


class TestAddresses:
    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1", "localhost", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "0", "0.0.0.0",  # noqa: S104
            "[::1]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:ffff:7f00:1]", "127.0.0.1.", "LOCALHOST",
        ],
    )  # fmt: skip
    async def test_every_way_to_write_this_machine(self, receiver, host):
        """Nothing is even connected to."""
        network = PublicNetwork()
        with pytest.raises((Permanent, httpcore.ConnectError)):
            await network.connect_tcp(host.strip("[]"), receiver.port, timeout=LIMIT)
        await asyncio.sleep(0)
        assert receiver.connections == 0

    async def test_through_the_whole_client(self, receiver):
        made = StandardWebhook(f"https://localhost:{receiver.port}/", NEW)
        to = await made.connect()
        with pytest.raises(Permanent, match="not a public address: nothing was sent") as caught:
            await to.publish(MESSAGE)
        assert caught.value.failure.code == "address_denied"
        await to.close()
        assert receiver.connections == 0

    async def test_what_was_checked_is_what_is_connected_to(self, receiver, monkeypatch):
        """A name that answers differently the second time (DNS rebinding) is not asked a second time."""
        asked = []

        def rebinding(host, port, **_):
            asked.append(host)
            address = "8.8.8.8" if len(asked) == 1 else "127.0.0.1"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        connected = []

        async def connect(self, host, *_):
            connected.append(host)
            raise httpcore.ConnectError("no network here")

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
        with pytest.raises(httpcore.ConnectError):
            await PublicNetwork().connect_tcp("rebind.example.com", receiver.port)
        assert asked == ["rebind.example.com"]
        assert connected == ["8.8.8.8"]

    async def test_one_bad_address_of_several_is_enough(self, receiver, monkeypatch):
        def both(host, port, **_):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("8.8.8.8", "10.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        with pytest.raises(Permanent, match=r"10\.0\.0\.1"):
            await PublicNetwork().connect_tcp("two.example.com", receiver.port)

    async def test_allowed_by_name_and_by_address(self, receiver):
        for allow in (["localhost"], ["127.0.0.1", "::1"]):
            stream = await PublicNetwork(allow).connect_tcp("localhost", receiver.port, timeout=LIMIT)
            await stream.aclose()

    def test_allowed_in_any_case(self):
        StandardWebhook("http://localhost:8080/hook", NEW, allow=["LocalHost"])

    async def test_proxies_of_the_environment_are_not_asked(self, receiver, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        async with publisher(receiver.url) as to:
            await to.publish(MESSAGE)
        assert len(receiver.seen) == 1

    async def test_no_log_shows_more_of_its_address_than_the_host(self, receiver, caplog):
        caplog.set_level(logging.DEBUG)
        for name in ("httpx", "httpcore"):
            caplog.set_level(logging.DEBUG, logger=name)
        async with publisher(f"http://127.0.0.1:{receiver.port}/canary/hook?token=canary") as to:
            await to.publish(MESSAGE)
        assert receiver.seen[0][0] == "POST /canary/hook?token=canary HTTP/1.1"
        assert "canary" not in caplog.text

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("http://example.com/hook", "use https"),
            ("https://user:canary@example.com/hook", "holds a user or password"),
            ("https://example.com:22/hook", "port 22"),
            ("ftp://example.com/hook", "is no webhook"),
            ("https:///hook", "is no webhook"),
            ("example.com", "is no webhook"),
            ("https://example.com:99999/hook", "is no webhook"),
            ("https://example.com:none/hook", "is no webhook"),
            ("https://[::1/hook", "is no webhook"),
            ("https://0177.0.0.1/hook", "is no webhook"),
            ("https://example.com/hook\r\nx: y", "is no webhook"),
        ],
    )
    def test_urls_that_are_none(self, url, words):
        with pytest.raises(InvalidInput, match=words) as caught:
            StandardWebhook(url, NEW)
        assert "canary" not in str(caught.value)
