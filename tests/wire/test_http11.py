"""The connections of coroutines: what they send, what they wait for, and what they do not believe."""

import asyncio
import contextlib
import random
import select
import socket
import ssl

import httpcore
import httpx
import pytest

from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.sockets import Backend
from resilient.wire.requests.streams import Network
from tests.helpers import LIMIT, most_in_a_turn

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def serving(talk, **settings):
    """A server that does ``talk(reader, writer)``; yields its URL and a client over a pool."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(PoolSettings(**settings))
    transport = pool.for_coroutines
    async with httpx.AsyncClient(transport=transport, timeout=pool.timeout, trust_env=False) as client:
        try:
            yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", client
        finally:
            listening.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await pool.aclose()


async def test_head_and_body_are_sent_at_once():
    """A body behind its head in a packet of its own waits, with some servers, for the acknowledgement of the head."""
    first = []

    async def talk(reader, writer):
        first.append(await reader.read(65_536))
        writer.write(ANSWER)

    async with serving(talk) as (url, client):
        await client.post(url, json={"a": 1})
    assert first[0].endswith(b'\r\n\r\n{"a":1}')


async def test_a_body_in_parts_and_an_answer_beyond_every_buffer():
    """Neither side takes more than it has room for: 8 MB each way."""
    size, part = 8 << 20, bytes(100_000)

    async def talk(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" in head
        while (line := await reader.readline()) != b"0\r\n":
            await reader.readexactly(int(line, 16) + 2)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // len(part)):
            writer.write(part)
            await writer.drain()
        writer.write(bytes(size % len(part)))
        await writer.drain()
        await asyncio.Event().wait()

    async def parts():
        for _ in range(size // len(part)):
            yield part

    async with (
        serving(talk, read=LIMIT, write=LIMIT) as (url, client),
        client.stream("POST", url, content=parts()) as answer,
    ):
        stream = answer.extensions["network_stream"]
        await asyncio.sleep(0)
        most, total = 0, 0
        async for piece in answer.aiter_raw():
            await asyncio.sleep(0)  # the loop reads on meanwhile
            most, total = max(most, stream._size), total + len(piece)
            assert len(piece) <= 65_536
    assert total == size
    assert most < 1 << 20


async def test_each_read_has_its_own_time():
    """One timer serves all reads of a connection: an older one neither hides the time of a later read nor ends it."""
    more = asyncio.Event()

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await reader.readuntil(b"\r\n\r\n")
        await more.wait()
        writer.write(ANSWER)

    async with serving(talk) as (url, client):
        await client.get(url, timeout=LIMIT)
        with pytest.raises(httpx.ReadTimeout):
            await client.get(url, timeout=0.05)
        async with client.stream("GET", url, timeout=LIMIT) as answer:
            stream = answer.extensions["network_stream"]
            await answer.aread()
            reading = asyncio.create_task(stream.read(2, LIMIT))
            await asyncio.sleep(0)
            stream._ring()  # what was set for the read before
            await asyncio.sleep(0)
            assert not reading.done()
            reading.cancel()


async def test_a_connection_that_breaks_while_it_is_read():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER[:-1])
        await writer.drain()

    async with serving(talk) as (url, client):
        with pytest.raises(httpx.RemoteProtocolError, match="closed connection"):
            await client.get(url)


async def test_an_upgraded_connection_is_the_callers():
    """What the server said behind its 101 is read from it first."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello")
        writer.write(await reader.readexactly(3))

    async with (
        serving(talk) as (url, client),
        client.stream("GET", url, headers={"connection": "upgrade", "upgrade": "x"}) as answer,
    ):
        stream = answer.extensions["network_stream"]
        assert await stream.read(1024) == b"hello"
        await stream.write(b"abc")
        assert await stream.read(1024) == b"abc"


async def test_what_is_said_before_tls_is_not_believed():
    """Whoever sits between could put an answer there, which would be read as the server's own."""

    async def talk(_reader, writer):
        writer.write(ANSWER)
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(talk) as (url, _):
        stream = await Network().connect_tcp("127.0.0.1", int(url.rpartition(":")[2]), LIMIT)
        async with asyncio.timeout(LIMIT):
            while not stream.unread:  # noqa: ASYNC110 - the loop's event, not a test's
                await asyncio.sleep(0)
        with pytest.raises(httpcore.ConnectError, match="before TLS began"):
            await stream.start_tls(ssl.create_default_context(), "127.0.0.1", LIMIT)


@pytest.mark.of_asyncio
async def test_a_reset_that_the_loop_has_not_told_yet_is_no_end():
    """Of a body whose end is the end of its connection, a part would be taken for the whole."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(talk, read=LIMIT) as (url, client), client.stream("GET", url) as answer:
        stream = answer.extensions["network_stream"]
        body = answer.aiter_raw()
        assert await anext(body) == b"part"
        stream._transport._fatal_error(ConnectionResetError("reset"))  # what asyncio does when it reads a reset
        with pytest.raises(httpx.ReadError, match="reset"):
            await anext(body)


async def test_what_becomes_of_a_connection_behind_its_end_does_not_undo_the_end():
    """A server answers, ends, and throws away what is still sent to it."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nwhole")

    async with serving(talk, read=LIMIT) as (url, client), client.stream("GET", url) as answer:
        stream = answer.extensions["network_stream"]
        async with asyncio.timeout(LIMIT):
            while not stream._over:  # noqa: ASYNC110 - the loop's event, not a test's
                await asyncio.sleep(0)
        stream.connection_lost(BrokenPipeError())
        assert await answer.aread() == b"whole"


async def test_a_connection_closed_on_this_side_is_no_end_of_a_body():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.Event().wait()

    async with serving(talk, read=LIMIT) as (url, client), client.stream("GET", url) as answer:
        stream = answer.extensions["network_stream"]
        await stream.aclose()
        with pytest.raises(httpx.ReadError, match="on this side"):
            await answer.aread()


async def test_a_connection_that_ends_in_the_moment_tls_has_begun(monkeypatch):
    """asyncio then has no transport to give, and says no error."""

    async def nothing(*_args, **_options):
        return None

    async def talk(_reader, _writer):
        await asyncio.Event().wait()

    async with serving(talk) as (url, client):
        monkeypatch.setattr(asyncio.get_running_loop(), "start_tls", nothing)
        with pytest.raises(httpx.ConnectError, match="hung up while TLS began"):
            await client.get(url.replace("http", "https"))
        assert client._transport._open == 0


async def test_what_comes_while_a_request_waits_for_its_last_look_is_not_its_answer():
    forge, forged = asyncio.Event(), asyncio.Event()

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await forge.wait()
        writer.write(ANSWER.replace(b"ok", b"no"))
        await writer.drain()
        forged.set()
        await asyncio.Event().wait()

    async def again():
        forge.set()
        await forged.wait()

    async with serving(talk, idle_for=LIMIT) as (url, client):
        await client.get(url)
        with pytest.raises(httpx.ConnectError, match="before a byte was sent"):
            await client._transport.send(client.build_request("GET", url), again)
        assert client._transport._open == 0


async def test_a_new_connection_that_ends_while_its_request_waits_for_its_last_look():
    """No byte of the request was sent: it may be sent again, whatever it does."""
    hang_up = asyncio.Event()

    async def talk(_reader, _writer):
        await hang_up.wait()

    async def look():
        hang_up.set()
        stream = await lost
        while not stream._over:  # noqa: ASYNC110 - its end is told to nobody else
            await asyncio.sleep(0)

    async with serving(talk) as (url, client):
        lost = asyncio.get_running_loop().create_future()
        connect = Network.connect_tcp

        async def connect_tcp(*args, **options):
            stream = await connect(*args, **options)
            lost.set_result(stream)
            return stream

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "connect_tcp", connect_tcp)
            with pytest.raises(httpx.ConnectError, match="before a byte was sent"):
                await client._transport.send(client.build_request("POST", url, content=b"x"), look)
        assert client._transport._open == 0


@pytest.mark.parametrize("port", [65_536, 99_999])
async def test_a_port_that_there_is_not(port):
    """Sockets take the number modulo 65536, and asyncio raises IndexError."""
    connections = Pool(PoolSettings()).for_coroutines
    with pytest.raises(httpx.UnsupportedProtocol, match=f"no port {port}"):
        await connections.handle_async_request(httpx.Request("GET", f"http://127.0.0.1:{port}/"))


async def test_a_header_with_the_end_of_a_line_is_named_without_its_value():
    async def talk(reader, _writer):
        assert await reader.read() == b""

    async with serving(talk) as (url, client):
        with pytest.raises(httpx.LocalProtocolError, match="'authorization'") as caught:
            await client.get(url, headers={"authorization": "Bearer geheim\n"})
        every = [caught.value, caught.value.__cause__, caught.value.__cause__.__context__]
        assert "geheim" not in f"{every[:2]}"
        assert caught.value.__cause__.__suppress_context__
        assert client._transport._open == 0


async def test_a_target_of_the_callers_own():
    heads = []

    async def talk(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(ANSWER)

    async with serving(talk) as (url, client):
        await client.options(url, extensions={"target": b"*"})
    assert heads[0].startswith(b"OPTIONS * HTTP/1.1\r\n")


async def test_a_connection_that_rests_keeps_nothing_of_its_last_answer():
    """Its headers may hold another account's cookies."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER.replace(b"content-length", b"set-cookie: canary=1\r\ncontent-length"))
        await reader.read()

    async with serving(talk, idle_for=LIMIT) as (url, client):
        assert "canary" in str((await client.get(url)).headers)
        (connection,) = client._transport._resting
        assert "canary" not in repr(vars(connection))


# -- answers that come before their request is sent -------------------------------------------------------------------

REFUSAL = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"


def refusing(*, ends):
    """A server that answers the head and reads nothing more; ``ends``: it hangs up, which resets the connection."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REFUSAL)
        await writer.drain()
        if not ends:
            await asyncio.Event().wait()

    return talk


async def without_end():
    """It never lets the loop run by itself."""
    while True:
        yield bytes(100_000)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("body", ["whole", "parts"])
async def test_who_refuses_an_upload_before_it_has_come_is_heard(body, ends):
    content = bytes(32 << 20) if body == "whole" else without_end()
    async with serving(refusing(ends=ends), read=LIMIT, write=LIMIT) as (url, client):
        answer = await client.post(url, content=content)
        assert (answer.status_code, answer.content) == (413, b"no")
        assert client._transport._open == 0  # what is left of the request would be read as the next one


async def test_who_refuses_an_upload_of_a_thread_and_hangs_up_is_heard():
    async with serving(refusing(ends=True)) as (url, _):
        pool = Pool(PoolSettings(read=LIMIT, write=LIMIT))
        with httpx.Client(transport=pool.for_threads, timeout=pool.timeout, trust_env=False) as client:
            answer = await asyncio.to_thread(client.post, url, content=bytes(32 << 20))
        assert (answer.status_code, answer.content) == (413, b"no")
        pool.close()


@pytest.mark.parametrize(("answer", "error"), [(REFUSAL, httpcore.WriteError), (b"", httpcore.WriteTimeout)])
def test_a_thread_that_cannot_write_on_reads_if_an_answer_is_here(answer, error):
    """httpcore reads after a `WriteError`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = Backend().connect_tcp(*listening.getsockname(), timeout=LIMIT)
        other, _ = listening.accept()
        with other, contextlib.closing(stream):
            other.sendall(answer)
            if answer:
                select.select([stream.get_extra_info("socket")], [], [], LIMIT)
            with pytest.raises(error):
                stream.write(bytes(32 << 20), timeout=0.1)


@pytest.mark.parametrize("head", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n"])
@pytest.mark.parametrize("body", ["whole", "parts"])
async def test_an_early_word_that_refuses_nothing_ends_no_upload(body, head):
    size, part = 8 << 20, bytes(1 << 16)

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        await writer.drain()
        await reader.readexactly(size)
        writer.write((b"" if b"200" in head else ANSWER[:17] + b"content-length: 8\r\n\r\n") + b"%08d" % size)

    async def parts():
        for _ in range(size // len(part)):
            yield part

    content = bytes(size) if body == "whole" else parts()
    async with serving(talk, read=LIMIT, write=LIMIT) as (url, client):
        answer = await client.post(url, content=content, headers={"content-length": str(size)})
        assert (answer.status_code, answer.content) == (200, b"%08d" % size)
        assert client._transport._open == 1


async def test_who_hangs_up_before_an_upload_has_come_is_not_waited_for():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        await asyncio.Event().wait()

    async with serving(talk, read=LIMIT, write=LIMIT) as (url, client):
        with pytest.raises(httpx.TransportError):
            await client.post(url, content=bytes(32 << 20))
        assert client._transport._open == 0


# -- the same as httpx's ----------------------------------------------------------------------------------------------

HEADS = [b"HTTP/1.1 200 OK", b"HTTP/1.1 204", b"HTTP/1.0 404 \xe4", b"HTTP/1.1 304 ", b"http/1.1 200", b"HTTP/1.1 1000"]
FIELDS = [b"X-A: b", b"connection: close", b"fold: a\r\n b", b"bad header", b"nul: a\0b", b"Set-Cookie: a=b", b"X:"]
BODIES = [
    (b"content-length: 5", b"abcde"), (b"content-length: 6", b"abcde"), (b"content-length: 4", b"abcde"),
    (b"x: y", b"abcde"), (b"content-length: -1", b"abcde"),
    (b"transfer-encoding: gzip", b"abcde"), (b"content-length: 5, 5", b"abcde"),
    (b"transfer-encoding: chunked", b"2;a=b\r\nab\r\n3\r\ncde\r\n0\r\nx-t: 1\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"2\r\nab\r\nzz\r\n"), (b"transfer-encoding: Chunked", b"2\r\nab\r\n"),
    (b"content-length: 3\r\ntransfer-encoding: chunked", b"5\r\nabcde\r\n0\r\n\r\n"),
]  # fmt: skip


def script(dice):
    """An answer, perhaps cut off or with something behind it, in pieces."""
    field, body = dice.choice(BODIES)
    fields = [field, *dice.sample(FIELDS, dice.choice([0, 0, 1, 2]))]
    early = dice.choice([b"", b"", b"HTTP/1.1 103 X\r\nlink: </a>\r\n\r\n", b"HTTP/1.1 101 X\r\n\r\n"])
    whole = early + b"\r\n".join([dice.choice(HEADS), *fields, b"", body])
    whole = dice.choice([whole, whole, whole, whole + ANSWER, whole[: dice.randrange(len(whole))]])
    at = sorted(dice.randrange(len(whole) + 1) for _ in range(dice.choice([0, 1, 3])))
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


async def outcome(client, method, url):
    """All that can be told of an answer, or the class of its error."""
    try:
        answer = await client.request(method, url)
    except httpx.HTTPError as error:
        return type(error)
    return answer.status_code, answer.reason_phrase, answer.http_version, answer.headers.raw, answer.content


async def test_answers_and_errors_are_those_of_httpx():
    dice, pieces = random.Random(11), []

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)

    kinds = set()
    async with serving(talk, read=LIMIT) as (url, own), httpx.AsyncClient(timeout=LIMIT, trust_env=False) as httpxs:
        for _ in range(100):
            pieces[:], method = script(dice), dice.choice(["GET", "GET", "HEAD"])
            one, other = await outcome(own, method, url), await outcome(httpxs, method, url)
            assert one == other, (method, pieces)
            kinds.add(one if isinstance(one, type) else one[0])
    assert {200, 204, 304, 404, httpx.RemoteProtocolError} <= kinds


async def test_interim_answers_without_end_are_no_answer():
    """Each is a word of the server's, so no time that is allowed for a read is ever over."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
            await writer.drain()

    async with asyncio.timeout(LIMIT), serving(talk, read=LIMIT) as (url, client):
        with pytest.raises(httpx.RemoteProtocolError, match="interim answers"):
            await client.get(url)


async def test_a_body_in_thousands_of_parts_leaves_others_their_turn(monkeypatch):
    """They are here at once, so nothing waits for them."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        chunks = b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        await writer.drain()

    async with serving(talk, read=LIMIT) as (url, client):
        assert await most_in_a_turn(client.get(url), monkeypatch) < 300
