"""Bodies made to fill our memory, or to keep us for ever: over real sockets, for everything that is read."""

import asyncio
import gzip
import tracemalloc
import zlib
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest

from resilient import OAuth2
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.requests.answer import PIECE, AnswerTooLarge, Decoder, DecodingError, Intake
from resilient.wire.requests.client import build_client
from resilient.wire.requests.explain import explain
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog
from tests.helpers import LIMIT, bomb

MIB = 1024 * 1024
nested = partial(bomb, 64, 2)  # in less than two kilobytes
single = partial(bomb, 50, 1)


def answering(body, coding, status=b"200 OK"):
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))

    async def behave(_reader, writer):
        writer.write(head + b"".join(b"content-encoding: %s\r\n" % one for one in coding) + b"\r\n" + body)
        await writer.drain()

    return behave


class Peak:
    """The most memory that Python held at once, in bytes, over what it held before."""

    def __enter__(self):
        tracemalloc.start()
        self.before = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_):
        self.bytes = tracemalloc.get_traced_memory()[1] - self.before
        tracemalloc.stop()


def test_the_bomb_is_small():
    assert len(nested()) < 2_000


@pytest.mark.parametrize(
    "coding", [(b"gzip, gzip",), (b"gzip", b"gzip"), (b"x-gzip,deflate",), (b"br",), (b"zstd, gzip",)]
)
async def test_a_coding_within_a_coding_is_refused(client, rude, coding):
    async with rude(answering(nested(), coding)) as (url, _):
        with Peak() as peak, pytest.raises(httpx.DecodingError):
            await client().get(url)
    assert peak.bytes < 2 * MIB


@pytest.mark.parametrize("coding", [(b"gzip, gzip",), (b"gzip",)])
async def test_the_bodies_of_errors_too(client, rude, coding):
    async with rude(answering(nested() if len(coding[0]) > 4 else single(), coding, b"500 Oops")) as (url, _):
        with Peak() as peak:
            answer = await client().get(url)
    assert answer.status_code == 500
    assert len(answer.content) <= 64 * 1024
    assert peak.bytes < 2 * MIB


async def test_one_coding_is_decoded_no_further_than_the_bound(client, rude):
    async with rude(answering(single(), (b"gzip",))) as (url, _):
        with Peak() as peak, pytest.raises(AnswerTooLarge):
            await client().get(url)
    assert peak.bytes < 4 * MIB  # the pool's bound is 1 MB


async def test_threads_are_kept_from_it_as_well(hooks, rude):
    loop = asyncio.get_running_loop()
    pool = Pool(PoolSettings(largest=1_000_000, tries=1))
    over = build_client(
        RequestLog(hooks), pool, lambda c: asyncio.run_coroutine_threadsafe(c, loop).result(), "http://x"
    )
    for body, coding, error in ((nested(), (b"gzip, gzip",), DecodingError), (single(), (b"gzip",), AnswerTooLarge)):
        async with rude(answering(body, coding)) as (url, _):
            with Peak() as peak, pytest.raises(error):
                await asyncio.to_thread(over.get, url)
        assert peak.bytes < 4 * MIB
    await pool.aclose()


async def test_a_stream_comes_in_small_pieces(client, rude):
    async with rude(answering(single(), (b"gzip",))) as (url, _), client().stream("GET", url) as response:
        sizes = [len(part) async for part in response.aiter_bytes()]
    assert sum(sizes) == 50 * MIB
    assert max(sizes) <= PIECE


@pytest.mark.parametrize(
    ("body", "coding"),
    [(nested, (b"gzip, gzip",)), (single, (b"gzip",)), (lambda: b"{}", (b"br",))],
    ids=["nested", "single", "unknown"],
)
async def test_token_endpoints(rude, body, coding):
    token = TokenClient()
    async with rude(answering(body(), coding)) as (url, _):
        oauth = OAuth2(token_url=url + "/token", client_id="c", client_secret="s")
        with Peak() as peak:
            answer = await token.refresh(oauth, "r", datetime.now(UTC))
    await token.aclose()
    assert answer.failure is not None
    assert peak.bytes < 4 * MIB


async def test_a_coded_body_that_says_nothing_for_ever_ends_with_its_time(client, rude):
    """Empty blocks of deflate: five bytes each, and nothing to count."""

    async def behave(_reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(b"")[:10])
        while True:
            writer.write(b"\0\0\0\xff\xff" * 1_000)
            await writer.drain()
            await asyncio.sleep(0.001)

    quick = Pool(PoolSettings(read=LIMIT, whole=0.3, tries=1))
    async with asyncio.timeout(LIMIT), rude(behave) as (url, _):
        with pytest.raises(AnswerTooLarge):
            await client(over=quick).get(url)
    await quick.aclose()


def test_what_follows_the_end_of_a_coded_body_is_counted_and_dropped():
    intake = Intake("gzip", 1_000, 60)
    assert intake.take(gzip.compress(b"hello"))
    assert intake.take(b"x" * 900)
    assert not intake.take(b"x" * 900)
    assert intake.content() == b"hello"


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZip", "identity, gzip", "deflate", "", "identity", "utf-8"])
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_what_honest_servers_send(coding, step):
    text = b"some text, and more of it; " * 1_000
    low = coding.lower()
    sent = gzip.compress(text) if "gzip" in low else zlib.compress(text) if low == "deflate" else text
    decoder = Decoder(coding)
    got = b"".join(part for at in range(0, len(sent), step) for part in decoder.feed(sent[at : at + step]))
    assert got + decoder.rest() == text


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize("behind", [b"", b"\x1f", b"\x00" * 10])
def test_gzip_of_several_members(step, behind):
    """Servers that join files which are compressed already send it (RFC 1952, 2.2)."""
    sent = gzip.compress(b"one, ") + gzip.compress(b"") + gzip.compress(b"two") + behind
    decoder = Decoder("gzip")
    got = b"".join(part for at in range(0, len(sent), step) for part in decoder.feed(sent[at : at + step]))
    assert got + decoder.rest() == b"one, two"


@pytest.mark.parametrize("step", [1, 2, 7, 100_000])
def test_deflate_without_its_frame(step):
    bare = zlib.compressobj(wbits=-15)
    sent = bare.compress(b"hello" * 100) + bare.flush()
    decoder = Decoder("deflate")
    got = b"".join(part for at in range(0, len(sent), step) for part in decoder.feed(sent[at : at + step]))
    assert got + decoder.rest() == b"hello" * 100


def test_deflate_with_a_wrong_checksum_is_not_read_as_if_it_had_no_frame():
    """Its last bytes, which zlib gets alone, would pass for a whole stream without a frame."""
    size = 4 * 1024 - 7
    block = b"\0" + size.to_bytes(2, "little") + (size ^ 0xFFFF).to_bytes(2, "little") + b"a" * size
    decoder = Decoder("deflate")
    with pytest.raises(DecodingError, match="incorrect data check"):
        list(decoder.feed(zlib.compress(b"")[:2] + block + b"\x03\0" + b"\0" * 4))


async def test_chunks_of_a_size(client, rude):
    behave = answering(gzip.compress(b"0123456789" * 10), (b"gzip",))
    async with rude(behave) as (url, _), client().stream("GET", url) as response:
        chunks = [chunk async for chunk in response.aiter_bytes(30)]
    assert chunks == [b"0123456789" * 3] * 3 + [b"0123456789"]


@pytest.mark.parametrize("body", [b"", b"no gzip at all"])
async def test_bodies_that_are_not_what_they_say(client, rude, body):
    async with rude(answering(body, (b"gzip",))) as (url, _):
        if not body:
            assert (await client().get(url)).content == b""
            return
        with pytest.raises(httpx.DecodingError):
            await client().get(url)


CSV = b"".join(b"%d,%d\n" % (n, n * n) for n in range(5_000))


async def posted(api, url):
    await api.post(url)


async def streamed(api, url):
    async with api.stream("POST", url) as response:
        async for _ in response.aiter_bytes():
            pass


@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("read", [posted, streamed])
async def test_a_body_that_was_cut_behind_its_server_is_not_whole(client, hooks, rude, coding, read):
    """A proxy whose own server is gone may end the answer as if it were whole: only the coding tells."""
    sent = (gzip.compress(CSV) if coding == b"gzip" else zlib.compress(CSV))[:-5_000]
    async with rude(answering(sent, (coding,))) as (url, _):
        with pytest.raises(httpx.RemoteProtocolError, match="ends within its") as raised:
            await read(client(), url)
    assert hooks.steps == ["admit", "mark", "answered", "clear", "cut_off"]
    assert explain(raised.value, RequestLog(hooks), hooks.now()).failure.kind == "ambiguous"
