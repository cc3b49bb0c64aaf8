"""Bodies made to fill our memory, through vendor SDKs' clients."""

import contextlib
import gc
import gzip
import socket
import ssl
import struct
import threading
import tracemalloc

import aiohttp
import pytest
import requests

from resilient import Job, Provider, Resilient, Retry, SyncJob, handler
from resilient.adapters import aiohttp as over_aiohttp
from resilient.adapters import requests as over_requests
from resilient.core.base import bounds
from resilient.testing import job, sync_job
from resilient.wire.requests.body_budget import BODY_BUDGET, Reservation
from tests.helpers import LIMIT, bomb

MIB = 1024 * 1024


@contextlib.contextmanager
def answering(body, coding, status=200, location=""):
    """A server of one answer, byte for byte."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    head += f"content-encoding: {coding}\r\n" if coding else ""
    head += f"location: {location}\r\n" if location else ""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                accepted, _ = listening.accept()
                with accepted:
                    accepted.recv(65536)
                    accepted.sendall(head.encode() + b"\r\n")
                    for part in body if isinstance(body, list) else [body]:
                        accepted.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        thread.join(20)


@pytest.fixture
def small(monkeypatch):
    """A bound of 1 MiB, so that a test need not fill 64."""
    bound = bounds.Bound("answer_body", MIB, "bytes", "it fails")
    monkeypatch.setattr(over_requests, "ANSWER_BODY", bound)
    monkeypatch.setattr(over_aiohttp, "ANSWER_BODY", bound)


BOMBS = [((64, 2), "gzip, gzip"), ((64, 1), "gzip"), ((1, 0), "")]


def bodies(packed):
    """A bomb; where nothing is packed, 40 MiB in parts."""
    mib, codings = packed
    return bomb(mib, codings) if codings else [bytes(mib * MIB)] * 40


@pytest.mark.parametrize(("packed", "coding"), BOMBS, ids=["nested", "single", "plain"])
def test_requests_reads_no_more_than_the_bound(small, packed, coding):
    with answering(bodies(packed), coding) as url, over_requests.session(sync_job(None)) as s:
        tracemalloc.start()
        with pytest.raises(requests.RequestException) as caught:
            s.get(url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 6 * MIB
    assert isinstance(caught.value, (over_requests.AnswerTooLarge, requests.exceptions.ContentDecodingError))


@pytest.mark.parametrize(("packed", "coding"), BOMBS, ids=["nested", "single", "plain"])
def test_of_an_error_only_the_beginning(packed, coding):
    with answering(bodies(packed), coding, 500) as url, over_requests.session(sync_job(None)) as s:
        tracemalloc.start()
        answer = s.get(url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 6 * MIB
    assert (answer.status_code, len(answer.content) <= 64 * 1024) == (500, True)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("packed", "coding"), BOMBS, ids=["nested", "single", "plain"])
def test_of_a_redirect_only_the_beginning(packed, coding, stream):
    """requests reads it, whole, before it goes on to the next hop."""
    with (
        answering(b"there", "") as there,
        answering(bodies(packed), coding, 302, there) as url,
        over_requests.session(sync_job(None)) as s,
    ):
        tracemalloc.start()
        answer = s.get(url, stream=stream)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (answer.content, len(answer.history[0].content) <= 64 * 1024) == (b"there", True)
    assert peak < 6 * MIB


def test_a_stream_of_nested_codings_is_refused():
    refused = pytest.raises(requests.exceptions.ContentDecodingError)
    with answering(bomb(64, 2), "gzip, gzip") as url, over_requests.session(sync_job(None)) as s, refused:
        s.get(url, stream=True)


@pytest.mark.parametrize("coding", ["gzip", "deflate", ""])
def test_honest_answers_are_read_as_ever(coding):
    text = b'{"hello": "there"}' * 1_000
    sent = {"gzip": gzip.compress, "deflate": __import__("zlib").compress, "": bytes}[coding](text)
    with answering(sent, coding) as url, over_requests.session(sync_job(None)) as s:
        assert s.get(url).content == text


def test_a_body_that_was_cut_behind_its_server_is_not_whole():
    sent = gzip.compress(b"".join(b"%d\n" % n for n in range(5_000)))[:-1_000]
    with answering(sent, "gzip") as url, pytest.raises(requests.exceptions.ChunkedEncodingError):
        over_requests.session(sync_job(None)).get(url)


@pytest.mark.parametrize(("packed", "coding"), BOMBS[1:], ids=["single", "plain"])
async def test_aiohttp_reads_no_more_than_the_bound(small, packed, coding):
    with answering(bodies(packed), coding) as url:
        async with over_aiohttp.session(job(None)) as s:
            tracemalloc.start()
            with pytest.raises(over_aiohttp.AnswerTooLarge):
                async with s.get(url) as answer:
                    await answer.text()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < 12 * MIB


async def test_aiohttp_undoes_no_coding_within_a_coding(small):
    with answering(bomb(64, 2), "gzip, gzip") as url:
        async with over_aiohttp.session(job(None)) as s, s.get(url) as answer:
            with contextlib.suppress(aiohttp.ClientPayloadError):
                assert len(await answer.read()) < MIB


async def test_aiohttp_reads_honest_answers_as_ever():
    text = b'{"hello": "there"}'
    with answering(gzip.compress(text), "gzip") as url:
        async with over_aiohttp.session(job(None)) as s, s.get(url) as answer:
            assert await answer.json(content_type=None) == {"hello": "there"}
            assert await answer.read() == text


# -- bodies that are cut off ------------------------------------------------------------------------------------------

BODY = b"1,a\n2,b\n"
UNTIL_THE_END = b"HTTP/1.1 200 OK\r\ncontent-type: text/csv\r\n\r\n" + BODY
WITH_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(BODY) + BODY


@contextlib.contextmanager
def ending(answer, how, context=None):
    """A server of one answer whose connection ends so: "well", "cut" (TLS says nothing) or by a "reset"."""

    def serve():
        with contextlib.suppress(OSError), listening.accept()[0] as plain:
            plain.settimeout(LIMIT)
            sock = plain if context is None else context.wrap_socket(plain, server_side=True)
            sock.recv(65_536)
            sock.sendall(answer)
            if how == "reset":
                arrived.wait(LIMIT)  # what has not arrived by then never does
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "well" and context is not None:
                sock.settimeout(0)  # the other side need not say that it ends, too
                with contextlib.suppress(ssl.SSLWantReadError):
                    sock.unwrap()
            sock.close()

    arrived = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{listening.getsockname()[1]}/", arrived.set
        thread.join(LIMIT)


async def read(url, arrived, cert, *, streams):
    trust = True if cert is None else ssl.create_default_context(cafile=cert)
    async with over_aiohttp.session(job(None)) as session, session.get(url, ssl=trust) as answer:
        arrived()
        if streams:
            return b"".join([part async for part in answer.content.iter_any()])
        return await answer.read()


@pytest.mark.parametrize("streams", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize(("secure", "how"), [(True, "cut"), (True, "reset"), (False, "reset")])
async def test_a_body_without_a_length_that_is_cut_off_is_not_whole(certificate, secure, how, streams):
    """aiohttp takes it for whole, and half an export with it."""
    context, cert = certificate if secure else (None, None)
    with ending(UNTIL_THE_END, how, context) as (url, arrived), pytest.raises(aiohttp.ClientPayloadError):
        await read(url, arrived, cert, streams=streams)


@pytest.mark.parametrize("streams", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize(
    ("secure", "how", "answer"),
    [
        (True, "well", UNTIL_THE_END),
        (True, "cut", WITH_LENGTH),
        (True, "well", WITH_LENGTH),
        (False, "well", UNTIL_THE_END),
    ],
)
async def test_a_body_is_whole_if_its_connection_or_its_length_says_so(certificate, secure, how, answer, streams):
    context, cert = certificate if secure else (None, None)
    with ending(answer, how, context) as (url, arrived):
        assert await read(url, arrived, cert, streams=streams) == BODY


# -- what the process holds at once -----------------------------------------------------------------------------------


@pytest.fixture
def full():
    """The account of `job(None)` holds all that it may."""
    reservation = Reservation("test/account", bounds.ANSWER_BODIES.value)
    assert reservation.grow(bounds.ANSWER_BODIES.value // 2)
    yield
    del reservation


def test_requests_refuses_a_large_body_that_has_no_room(full):
    refused = pytest.raises(over_requests.NoRoomForAnswer, match="test/account holds as much as is left free")
    with answering(bomb(3, 1), "gzip") as url, over_requests.session(sync_job(None)) as s, refused as caught:
        s.get(url)
    assert (caught.value.failure.code, caught.value.failure.counts_for_breaker) == ("no_room_for_answer", False)


async def test_aiohttp_refuses_a_large_body_that_has_no_room(full):
    with answering(bomb(3, 1), "gzip") as url:
        async with over_aiohttp.session(job(None)) as s, s.get(url) as answer:
            with pytest.raises(over_aiohttp.NoRoomForAnswer, match="test/account holds as much as is left free"):
                await answer.read()


async def test_a_large_body_gives_its_room_back():
    before = BODY_BUDGET.total()
    with answering(bomb(3, 1), "gzip") as url, over_requests.session(sync_job(None)) as s:
        answer = s.get(url)
        assert (len(answer.content), BODY_BUDGET.total() - before) == (3 * MIB, 2 * MIB)
    del answer
    with answering(bomb(3, 1), "gzip") as url:
        async with over_aiohttp.session(job(None)) as s, s.get(url) as answer:
            assert (len(await answer.read()), BODY_BUDGET.total() - before) == (3 * MIB, 2 * MIB)
        del answer
    gc.collect()
    assert BODY_BUDGET.total() == before


# -- answers that cannot be read --------------------------------------------------------------------------------------

UNREADABLE = {  # of the server's making, whatever the client raises
    "lengths": b"content-length: 2\r\ncontent-length: 5\r\n\r\nok",
    "chunk": b"transfer-encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n",
    "header": b"x: " + b"a" * 100_000 + b"\r\n\r\n",
}


@contextlib.contextmanager
def speaking(raw, requests_made):
    """A server that answers each connection with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listening.accept()
                    with accepted, contextlib.suppress(OSError):
                        requests_made.append(accepted.recv(65536))
                        accepted.sendall(b"HTTP/1.1 200 OK\r\n" + raw)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(20)


@pytest.mark.parametrize("raw", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("client", ["requests", "aiohttp"])
@pytest.mark.parametrize(("method", "kind"), [("GET", "transient"), ("POST", "ambiguous")])
async def test_an_answer_that_cannot_be_read_is_no_refusal_and_no_bug(sqlite_url, raw, client, method, kind):
    @handler("threaded", retry=Retry(max_attempts=1))
    def threaded(job: SyncJob[str]) -> None:
        with over_requests.session(job) as s:
            s.request(method, job.payload)

    @handler("looped", retry=Retry(max_attempts=1))
    async def looped(job: Job[str]) -> None:
        async with over_aiohttp.session(job) as s, s.request(method, job.payload) as answer:
            await answer.read()

    requests_made = []
    with speaking(raw, requests_made) as url:
        own = Provider(name="own", base_url=url.rstrip("/"), anonymous=True)
        app = Resilient(sqlite_url, handlers=[threaded, looped], providers=[own], upgrade=False)
        made = await app.enqueue(threaded if client == "requests" else looped, url, resource_key="own/one")
        await app.worker().drain()
        found = await app.jobs.get(made.id)
        await app.close()
    assert (found.state.value, str(found.last_error_kind), len(requests_made)) == ("dead", kind, 1)
