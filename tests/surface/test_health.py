"""`worker --health`: alive while its loop beats, ready while it can take jobs; it waits for its database."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import struct
import sys
import threading

import httpx
import pytest

from resilient import Job, Resilient, SetupError, handler
from resilient.surface import probes
from resilient.surface.probes import Address, Probes, Server
from tests.helpers import LIMIT, until

PROGRAM = """
from resilient import Resilient, handler

@handler("push")
async def push(job):
    pass

app = Resilient({url!r}, handlers=[push])
"""


@handler("push")
async def push(job: Job[str]) -> None:
    pass


async def fetch(address, path):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}") as client:
        answer = await client.get(path)
        return answer.status_code, answer.text


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push])
    yield app
    await app.close()


@contextlib.asynccontextmanager
async def probed(app, **where):
    worker = app.worker()
    served = Probes(app, {"": (app, worker)})
    servers = served.open(**{"metrics": None, "health": "0", **where})
    try:
        yield worker, served, servers[0].address
    finally:
        await asyncio.to_thread(served.close)


async def test_ready_from_the_first_beat_until_it_drains(app):
    async with probed(app) as (worker, _, address):
        status, text = await fetch(address, "/readyz")
        assert status == 503
        assert "schema is not checked yet" in text
        assert (await fetch(address, "/livez")) == (200, "ok\n"), "it is alive before it is ready"
        running = asyncio.create_task(worker.run(signals=False))
        await until(lambda: is_ready(address))
        worker.stop()
        status, text = await fetch(address, "/readyz")
        assert (status, text) == (503, "worker is draining\n")
        assert (await fetch(address, "/livez"))[0] == 200
        await running


async def is_ready(address):
    return (await fetch(address, "/readyz"))[0] == 200


async def test_a_loop_that_stands_still_is_not_alive(app, monkeypatch):
    """The server answers from threads, so it can say so."""
    monkeypatch.setattr(probes, "STILL", -1.0)
    async with probed(app) as (_, _, address):
        status, text = await fetch(address, "/livez")
    assert status == 503
    assert re.fullmatch(r"loop has stood still for \d+ s\n", text)


async def test_a_blocked_loop_is_seen(app, monkeypatch):
    monkeypatch.setattr(probes, "STILL", 0.6)
    async with probed(app) as (_, _, address):
        answers, free = [], threading.Event()

        def probe():
            try:
                while not answers or answers[-1] == 200:
                    answers.append(httpx.get(f"http://127.0.0.1:{address[1]}/livez").status_code)
            finally:
                free.set()

        thread = threading.Thread(target=probe)
        thread.start()
        assert free.wait(LIMIT), "the loop is blocked here, and the server answers all the same"
        thread.join()
        assert answers[-1] == 503
        await until(lambda: is_alive(address))


async def is_alive(address):
    return (await fetch(address, "/livez"))[0] == 200


async def test_metrics_and_health_share_an_address(app):
    async with probed(app, metrics="127.0.0.1:0", health="127.0.0.1:0") as (_, _, address):
        assert "resilient_build_info" in (await fetch(address, "/metrics"))[1]
        assert (await fetch(address, "/livez"))[0] == 200
        assert (await fetch(address, "/"))[0] == 404


@pytest.mark.parametrize(("method", "body"), [("POST", b"x" * 100_000), ("DELETE", b""), ("BREW", b"")])
async def test_another_method_is_refused_in_plain_text(app, method, body):
    async with probed(app) as (_, _, address):
        url = f"http://127.0.0.1:{address[1]}/readyz"
        answer = await asyncio.to_thread(httpx.request, method, url, content=body)
    assert (answer.status_code, answer.headers["allow"], answer.headers["connection"]) == (405, "GET, HEAD", "close")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == f"/livez, /readyz: GET or HEAD, not {method}\n"


async def test_what_is_no_request_is_refused_in_plain_text(app):
    async with probed(app) as (_, _, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", address[1])
        writer.write(b"GET / HTTP/x.y\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 400 ")
    assert "Connection: close" in answer
    assert answer.endswith("\r\n\r\nBad Request\n")


async def test_a_length_of_more_digits_than_a_number_has_is_refused_like_any_other(app, caplog):
    async with probed(app) as (_, _, address):
        before = len(caplog.records)
        reader, writer = await asyncio.open_connection("127.0.0.1", address[1])
        writer.write(b"POST /livez HTTP/1.1\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        assert caplog.records[before:] == []
    assert answer.startswith("HTTP/1.1 405 ")


def cut_off(address, sent):
    """Connect and reset, as load balancers do that look whether a port is open, and whoever gives up waiting."""
    with socket.create_connection(("127.0.0.1", address[1])) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.sendall(sent)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost", b"GET /livez HTTP/1.1\r\n\r\n"])
async def test_who_cuts_the_connection_is_no_news(app, sent, capfd, caplog):
    async with probed(app) as (_, served, address):
        before = len(caplog.records)
        met = threading.Semaphore(0)
        server = served._servers[0]._server
        shut = server.shutdown_request
        server.shutdown_request = lambda request: (shut(request), met.release())
        for _ in range(3):
            await asyncio.to_thread(cut_off, address, sent)
            assert await asyncio.to_thread(met.acquire, timeout=LIMIT)
        assert (await fetch(address, "/livez"))[0] == 200
        assert caplog.records[before:] == []
    assert capfd.readouterr().err == ""


async def test_what_a_path_fails_of_is_a_line_of_the_log(app, monkeypatch, capfd, caplog):
    """socketserver would write a traceback on standard error, where each line of `--log json` is an object."""

    def break_down(self):
        raise ZeroDivisionError("nobody foresaw it")

    monkeypatch.setattr(Probes, "livez", break_down)
    async with probed(app) as (_, _, address):
        with pytest.raises(httpx.RemoteProtocolError):
            await fetch(address, "/livez")
        await until(lambda: any(one.exc_info for one in caplog.records))
    assert "a request to the metrics or probes failed" in caplog.text
    assert "nobody foresaw it" in caplog.text
    assert capfd.readouterr().err == ""


def test_an_address_that_is_taken_is_a_sentence():
    first = Server(Address("127.0.0.1", 0), {})
    try:
        reason = r"^cannot listen on 127.0.0.1:\d+: Address already in use; end what listens there, or say another"
        with pytest.raises(SetupError, match=reason):
            Server(Address("127.0.0.1", first.address[1]), {})
    finally:
        first.close()


async def test_a_worker_that_is_started_before_its_database_waits_and_works(own_postgres, tmp_path):
    """As a deployment brings them up, in any order: a process of its own, with the addresses that it logs."""
    url = own_postgres.url(own_postgres.create())
    app = Resilient(url, handlers=[push], upgrade=True)
    await app.enqueue(push, "ok", resource_key="crm/1")
    await app.close()
    own_postgres.stop()
    (tmp_path / "program.py").write_text(PROGRAM.format(url=url))
    command = [sys.executable, "-m", "resilient.surface.cli", "--app", "program:app", "worker"]
    process = await asyncio.create_subprocess_exec(
        *command, "--metrics", "0", "--health", "0", cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    try:
        address = await logged_address(process)
        assert (await fetch(address, "/livez"))[0] == 200
        assert (await fetch(address, "/readyz"))[0] == 503
        assert "resilient_database_up 0.0" in (await fetch(address, "/metrics"))[1]
        own_postgres.start()
        await until(lambda: is_ready(address))
        await until(lambda: has_succeeded(address))
        own_postgres.stop()
        await until(lambda: is_not_ready(address))
        assert (await fetch(address, "/livez"))[0] == 200
        own_postgres.start()
        await until(lambda: is_ready(address))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT):
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def logged_address(process):
    async with asyncio.timeout(LIMIT):
        async for line in process.stderr:
            if found := re.search(r"/metrics, /livez, /readyz at http://(127\.0\.0\.1):(\d+)", line.decode()):
                return found[1], int(found[2])
    raise AssertionError("it ended")


async def is_not_ready(address):
    return not await is_ready(address)


async def has_succeeded(address):
    text = (await fetch(address, "/metrics"))[1]
    return re.search(r'^resilient_executions_total\{[^}]*outcome="succeeded"[^}]*\} 1.0$', text, re.MULTILINE)
