"""Where TLS ends: a body without a length is whole only if the server says so, and not whoever cuts the connection."""

import asyncio
import contextlib
import socket
import ssl
import threading

import httpx
import pytest

from resilient.wire.requests.pool import Pool, PoolSettings
from tests.helpers import LIMIT
from tests.serving import Certificate

BODY = b"1,a\n2,b\n"
UNTIL_THE_END = b"HTTP/1.1 200 OK\r\ncontent-type: text/csv\r\n\r\n" + BODY
WITH_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    made = Certificate(tmp_path_factory.mktemp("tls"))
    return made.server, made.trusting


@contextlib.asynccontextmanager
async def serving(context, answer, *, is_cut):
    """A server that answers once and ends: as TLS wants it, or as if somebody on the way cut the connection."""

    def serve():
        with contextlib.suppress(OSError), listening.accept()[0] as plain:
            secure = context.wrap_socket(plain, server_side=True)
            secure.settimeout(LIMIT)
            secure.recv(65_536)
            secure.sendall(answer)
            secure.settimeout(0)  # the other side need not say that it ends, too
            if not is_cut:
                with contextlib.suppress(ssl.SSLWantReadError):
                    secure.unwrap()
            socket.socket.shutdown(secure, socket.SHUT_WR)
            secure.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}/"
        await asyncio.to_thread(thread.join, LIMIT)


async def body_of(url, pool, *, threads):
    if threads:
        client = httpx.Client(transport=pool.for_threads, trust_env=False, timeout=LIMIT)
        return (await asyncio.to_thread(client.get, url)).content
    client = httpx.AsyncClient(transport=pool.for_coroutines, trust_env=False, timeout=LIMIT)
    return (await client.get(url)).content


@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
async def test_a_body_whose_connection_is_cut_is_not_whole(tls, threads):
    pool = Pool(PoolSettings(verify=tls[1]))
    async with serving(tls[0], UNTIL_THE_END, is_cut=True) as url:
        with pytest.raises(httpx.ReadError):
            await body_of(url, pool, threads=threads)
    await pool.aclose()


@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
@pytest.mark.parametrize(("answer", "is_cut"), [(UNTIL_THE_END, False), (WITH_LENGTH, True), (WITH_LENGTH, False)])
async def test_a_body_is_whole_if_the_server_or_its_length_says_so(tls, threads, answer, is_cut):
    pool = Pool(PoolSettings(verify=tls[1]))
    async with serving(tls[0], answer, is_cut=is_cut) as url:
        assert await body_of(url, pool, threads=threads) == BODY
    await pool.aclose()
