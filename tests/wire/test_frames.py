"""What an error tracker collects: the values of variables in every frame of every exception of a chain."""

import asyncio
import logging
import sys
from datetime import UTC, datetime

import httpx
import pytest
import requests

from resilient import Credentials, Errors, OAuth2, SetupError
from resilient.core.base.errors import chain
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.requests import redact
from resilient.wire.requests.call import AsyncCall
from resilient.wire.requests.request_log import RequestLog

CANARY = "canary-5f3a"
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def collected(error):
    """Everything a Sentry-like tracker would send: texts, arguments and the variables of the engine's frames."""
    found = []
    for one in chain(error):
        found += [str(one), repr(one), repr(getattr(one, "args", "")), repr(getattr(one, "object", ""))]
        trace = one.__traceback__
        while trace is not None:
            if "/tests/" not in trace.tb_frame.f_code.co_filename:  # the test knows its own canary
                found += [f"{name}={value!r}" for name, value in trace.tb_frame.f_locals.items()]
            trace = trace.tb_next
    return "\n".join(found)


@pytest.mark.parametrize("token", [f"{CANARY}-\u20ac", f"{CANARY}\r\nx: y", f"{CANARY}\0", f"{CANARY}\x7f"])
async def test_a_token_no_header_can_hold(client, hooks, provider, token):
    hooks.credentials = {"Authorization": f"Bearer {token}"}
    with pytest.raises(Exception, match="the value for header Authorization") as caught:
        await client(provider()).get("/x")
    assert CANARY not in collected(caught.value)


async def test_requests_without_an_answer(client, hooks, provider, closed_port):
    hooks.credentials = {"Authorization": f"Bearer {CANARY}"}
    api = client(provider(hosts=(f"http://127.0.0.1:{closed_port}",)))
    with pytest.raises(httpx.ConnectError) as caught:
        await api.get(f"http://127.0.0.1:{closed_port}/x")
    assert CANARY not in collected(caught.value)


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_refused_answers(client, hooks, provider, status):
    hooks.credentials = {"Authorization": f"Bearer {CANARY}"}
    answer = await client(provider()).get(f"/x?status={status}")
    with pytest.raises(Exception, match="answered") as caught:
        answer.raise_for_status()
    assert CANARY not in collected(caught.value)


async def test_what_a_call_raises(hooks, provider):
    hooks.credentials = {"Authorization": f"Bearer {CANARY}"}
    request_log = RequestLog(hooks, provider(errors=Errors(code=("code",))))
    async with AsyncCall(request_log, "GET", f"{request_log.base_url}/x") as call:
        call.report(400, {}, {"message": f"no {CANARY}"})
    with pytest.raises(Exception, match="answered 400") as caught:
        call.raise_for_failure()
    assert CANARY not in collected(caught.value)


@pytest.mark.parametrize("way", ["key", "jwt", "surrogate"])
async def test_token_requests_that_cannot_be_made(way):
    token = TokenClient()
    oauth = OAuth2(
        token_url="https://auth.example/token", client_id="c", client_secret=f"{CANARY}-secret",
        client_auth="jwt" if way == "jwt" else "post",
    )  # fmt: skip
    if way == "key":
        asked = token.by_key(oauth, Credentials(token="", refresh_token=f"{CANARY} no pem", user="u"), NOW)
    else:
        asked = token.refresh(oauth, f"{CANARY}-refresh" + ("\ud800" if way == "surrogate" else ""), NOW)
    with pytest.raises(SetupError) as caught:
        await asked
    assert CANARY not in collected(caught.value)
    await token.aclose()


async def test_a_token_request_that_is_cancelled():
    arrived, over = asyncio.Event(), asyncio.Event()

    async def hang(reader, writer):
        arrived.set()
        await reader.read()  # until the client is gone
        writer.close()
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    token = TokenClient()
    oauth = OAuth2(token_url=f"http://127.0.0.1:{port}/token", client_id="c", client_secret=f"{CANARY}-secret")
    asked = asyncio.create_task(token.refresh(oauth, f"{CANARY}-refresh", NOW))
    await arrived.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await asked
    assert CANARY not in collected(caught.value)
    await token.aclose()
    await over.wait()
    server.close()
    await server.wait_closed()


def test_urllib3_logs_no_query(server, caplog):
    redact.install()
    caplog.set_level(logging.DEBUG, logger="urllib3")
    requests.get(f"{server.url}/x?api_key={CANARY}&status=302&location=/y%3Fkey%3D{CANARY}", timeout=5)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("urllib3"))
    assert "GET /x?api_key=" in text
    assert CANARY not in text
    assert sys.exception() is None
