"""Several processes, one account, every token refused: the provider sees one refresh."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from resilient import Resilient
from resilient.store.secrets import new_key

KEY, A, JOBS = new_key(), "idp/acct-1", 50
CHILD = """
import asyncio, sys
from resilient import Bearer, Errors, FailureKind, OAuth2, Provider, Resilient, Rotation, Rule, Scope, handler

@handler("me")
async def me(job):
    (await job.client.get("/me")).raise_for_status()

url, server, key, secret = sys.argv[1:]
oauth = OAuth2(token_url=server + "/token", client_id="app", client_secret=secret, rotation=Rotation.SINGLE_USE)
rules = (Rule(FailureKind.AUTH, status=401, scope=Scope.ACCOUNT),)
provider = Provider(name="idp", base_url=server, errors=Errors(rules=rules), auth=(oauth, Bearer()))

async def main():
    async with Resilient(url, handlers=[me], providers=[provider], secrets=[key]) as app:
        await app.credentials("idp/acct-1")
        print("up", flush=True)
        sys.stdin.readline()
        await app.worker(concurrency=20).drain()

asyncio.run(main())
"""


async def test_three_processes_refresh_once(database_url, idp):
    app = Resilient(database_url, providers=[idp.provider()], secrets=[KEY])
    access, refresh = idp.issue()
    ends = datetime.now(UTC) + timedelta(hours=1)
    await app.connections.import_(A, access_token=access, refresh_token=refresh, expires_at=ends)
    children = [
        subprocess.Popen(  # noqa: ASYNC220 - starting takes milliseconds
            [sys.executable, "-c", CHILD, database_url, idp.url, KEY, idp.secret],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        for child in children:
            assert await asyncio.to_thread(child.stdout.readline) == "up\n"
        from resilient import Kind

        await app.enqueue_many(Kind("me"), [None] * JOBS, resource_key=A)
        idp.expire()
        idp.hold.clear()
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        await asyncio.sleep(1)
        idp.hold.set()
        for child in children:
            assert await asyncio.to_thread(child.wait, 60) == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()
        done = await app.jobs.count(state="succeeded")
        await app.close()
    assert done == JOBS
    assert len(idp.asked) == 1
    assert (idp.calls.count((200, "Bearer canary-access-2"))) == JOBS
