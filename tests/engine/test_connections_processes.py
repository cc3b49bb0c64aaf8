"""Several processes, one account, every token refused: the provider sees one refresh, whoever is killed in it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial

import pytest

from resilient import GrantState, Kind, Resilient, ResourceStopped, Rotation
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from tests import nursery
from tests.helpers import LIMIT, until
from tests.idp import connect

KEY, A = new_key(), "idp/acct-1"
PROCESSES, WORKERS, JOBS = 5, 10, 1000  # ten workers in each process: fifty, of twenty slots each
CHILD = """
import asyncio, os, signal, sys
from resilient import Bearer, Errors, FailureKind, OAuth2, Provider, Resilient, Rotation, Rule, Scope, handler
from resilient.store.accounts import grants

@handler("me", timeout=None)
async def me(job):
    (await job.client.get("/me")).raise_for_status()

url, server, key, secret, what = sys.argv[1:]
oauth = OAuth2(token_url=server + "/token", client_id="app", client_secret=secret, rotation=Rotation.SINGLE_USE)
rules = (Rule(FailureKind.AUTH, status=401, scope=Scope.ACCOUNT),)
provider = Provider(name="idp", base_url=server, errors=Errors(rules=rules), auth=(oauth, Bearer()))

async def main():
    async with Resilient(url, handlers=[me], providers=[provider], secrets=[key]) as app:
        if not what.isdigit():
            die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            if what == "begun":
                app.grants._send = die
            elif what == "answered":
                grants.renew_if_held = die
            else:
                app.grants._application.note_accepted = die
            await app.credentials("idp/acct-1")
        await app.credentials("idp/acct-1")
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        workers = [app.worker(concurrency=20) for _ in range(int(what))]
        running = [asyncio.create_task(worker.run(signals=False)) for worker in workers]
        await asyncio.to_thread(sys.stdin.readline)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Nobody waits long for a process that is dead."""
    monkeypatch.setattr(grants, "LAST_CALL", 0.3)


@pytest.fixture
def child(database_url, idp):
    """``child(what)``: a process that works with so many workers, or dies at that step of a refresh."""
    children = []

    def start(what):
        arguments = (CHILD, database_url, idp.url, KEY, idp.secret, what)
        children.append(nursery.start(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return children[-1]

    yield start
    for one in children:
        one.kill()
        one.communicate()


def say(children):
    for one in children:
        one.stdin.write("\n")
        one.stdin.flush()


async def more(app, idp, before):
    """How many jobs have succeeded, and the provider's calls, once one of them is more than before."""
    now = await app.jobs.count(state="succeeded"), len(idp.calls)
    return now if now != before else None


@pytest.mark.proof("test_connections.py: fifty refusals in three apps")
async def test_a_thousand_refusals_at_once_in_fifty_workers_are_one_refresh(database_url, idp, child):
    app = Resilient(database_url, providers=[idp.provider()], secrets=[KEY])
    await connect(app, idp)
    children = [child(str(WORKERS)) for _ in range(PROCESSES)]
    try:
        for one in children:
            assert await asyncio.to_thread(one.stdout.readline) == "up\n"
        await app.enqueue_many(Kind("me"), [None] * JOBS, resource_key=A)
        idp.expire()
        idp.crowd = JOBS
        say(children)
        done, calls = 0, 0
        while done < JOBS:  # on a machine that is busy with something else it goes on slowly, but it goes on
            done, calls = await until(partial(more, app, idp, (done, calls)))
        say(children)
        for one in children:
            assert await asyncio.to_thread(one.wait, LIMIT) == 0
    finally:
        await app.close()
    refused = [status for status, _ in idp.calls].count(401)
    sys.stdout.write(f"{refused} refusals at once in {PROCESSES} processes: {len(idp.asked)} refresh\n")
    assert done == JOBS
    assert len(idp.asked) == 1
    assert refused >= JOBS / 2  # on a slow machine some may come when the refresh is done
    assert idp.calls.count((200, "Bearer canary-access-2")) == JOBS


@pytest.mark.parametrize("grace", [True, False])
async def test_killed_between_the_answer_and_the_commit(database_url, idp, child, grace):
    facts = {"rotation": Rotation.GRACE, "grace": 1800} if grace else {"rotation": Rotation.SINGLE_USE}
    idp.rotation = "grace" if grace else "single_use"
    app = Resilient(database_url, providers=[idp.provider(**facts)], secrets=[KEY])
    try:
        await connect(app, idp, expired=True)
        assert await asyncio.to_thread(child("answered").wait, LIMIT) == -9
        assert len(idp.asked) == 1
        over = "UPDATE {grant} SET lease_until = created_at"
        await app.database.transaction(lambda c, d: d.run(c, over))
        app.grants.accounts.forget()
        for _ in range(3):
            if grace:
                assert (await app.credentials(A)).token == "canary-access-3"
            else:
                with pytest.raises(ResourceStopped):
                    await app.credentials(A)
        info = await app.connections.get(A)
    finally:
        await app.close()
    assert len(idp.asked) == 2  # one try more, and no other
    assert info.state is (GrantState.ACTIVE if grace else GrantState.NEEDS_REAUTH)


@pytest.mark.parametrize("step", ["begun", "committed"])
async def test_killed_before_the_request_or_after_the_commit_costs_no_grant(database_url, idp, child, step):
    """Where a refresh token works once: it was not sent yet, or its successor is stored."""
    idp.rotation = "single_use"
    app = Resilient(database_url, providers=[idp.provider(rotation=Rotation.SINGLE_USE)], secrets=[KEY])
    try:
        await connect(app, idp, expired=True)
        assert await asyncio.to_thread(child(step).wait, LIMIT) == -9
        assert len(idp.asked) == (step == "committed")
        await app.database.transaction(lambda c, d: d.run(c, "UPDATE {grant} SET lease_until = created_at"))
        app.grants.accounts.forget()
        assert (await app.credentials(A)).token == "canary-access-2"
        info = await app.connections.get(A)
    finally:
        await app.close()
    assert len(idp.asked) == 1
    assert info.state is GrantState.ACTIVE
