"""Tracebacks with the values of local variables, as error trackers collect them, show no credentials."""

from __future__ import annotations

import asyncio
import contextlib
import traceback

import pytest

from resilient import ApiKey, Basic, Bearer, BreakerPolicy, Job, Provider, Resilient, SyncJob, handler
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT

RAISED: list = []


@handler("get")
async def get(job: Job[None]) -> None:
    with noted():
        (await job.client.get("/me", timeout=0.5)).raise_for_status()


@handler("post")
def post(job: SyncJob[None]) -> None:
    with noted():
        job.client.post("/me", json={}, timeout=0.5).raise_for_status()


@handler("call")
async def call(job: Job[None]) -> None:
    with noted():
        async with job.call("GET", f"{job.app.providers['api'].base_url}/me") as one:
            del one  # its headers are the handler's to send
            raise ConnectionResetError


class noted:  # noqa: N801 - as a function
    def __enter__(self):
        return self

    def __exit__(self, _type, error, _traceback):
        RAISED.append(error)


def whole(error):
    """The traceback with its locals, and those of whatever led to it."""
    found, left = [], [error]
    while left:
        one = left.pop()
        found += traceback.TracebackException.from_exception(one, capture_locals=True).format()
        left += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
    return "".join(found)


async def answer(how, reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    if how == "refused":
        writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")
    if how == "cut in its body":
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\n{")
    if how == "silence":
        await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize("how", ["nobody there", "silence", "cut", "cut in its body", "refused"])
@pytest.mark.parametrize(
    ("auth", "given"),
    [
        (Bearer(), {"token": "canary-token"}),
        (Basic(), {"user": "canary-user", "password": "canary-password"}),
        (ApiKey(header="X-Key", prefix=""), {"api_key": "canary-key"}),
        (ApiKey(query="key", prefix=""), {"api_key": "canary-key"}),
    ],
    ids=["bearer", "basic", "header", "query"],
)
async def test_a_failed_request(sqlite_url, how, auth, given):
    RAISED.clear()
    server = await asyncio.start_server(lambda r, w: answer(how, r, w), "127.0.0.1", 0)
    port = 1 if how == "nobody there" else server.sockets[0].getsockname()[1]
    api = Provider(name="api", base_url=f"http://127.0.0.1:{port}", auth=(auth,))
    never = {"api": BreakerPolicy(streak=1000, ratio=None), "api/*": BreakerPolicy(streak=1000, ratio=None)}
    secrets = [new_key()]
    app = Resilient(sqlite_url, handlers=[get, post, call], providers=[api], breakers=never, secrets=secrets)
    await app.connections.add("api/1", **given)
    for kind in (get, post, call):
        await app.enqueue(kind, resource_key="api/1", max_attempts=1)
    await app.worker().drain(timeout=LIMIT)
    assert len(RAISED) == 3
    for error in RAISED:
        text = whole(error)
        assert "job = " in text  # it has locals
        assert [one for one in text.splitlines() if "canary" in one] == []
        assert secrets[0][9:] not in text
    await app.close()
    server.close()
    await server.wait_closed()
