"""A refresh token that came is stored, whatever happens between the answer and the commit: the old one is used up."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from sqlalchemy import text

from resilient import Credentials, GrantState, Resilient, ResourceStopped, Rotation
from resilient.core.base.errors import SecretsUnreadable
from resilient.engine.accounts import grants as engine_grants
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT, until
from tests.idp import connect, me
from tests.tenants import KEY, refreshing

A = "idp/acct-1"


async def read_elsewhere(make):
    """The token that another process finds stored."""
    other = make()
    assert (await other.connections.get(A)).state is GrantState.ACTIVE
    return (await other.credentials(A)).token


@contextmanager
def locked(app):
    """No refresh can be committed in this block."""
    with app.database.sync_engine.begin() as c:
        c.execute(text("UPDATE resilient_grant SET kind = kind"))
        yield


async def test_keys_that_were_changed_meanwhile_lose_none(make, idp):
    """An old worker that winds down lacks the new key; the row under it is still the one it refreshes."""
    old, new = make(), new_key()
    await connect(old, idp, expired=True)
    waiting = await refreshing(old, idp, A)
    both = make(secrets=[new, KEY])
    assert await both.connections.rotate_secrets() == 1
    idp.hold.set()
    with pytest.raises(SecretsUnreadable, match="seal"):  # the connection is signed by the new key
        await asyncio.wait_for(waiting, LIMIT)
    both.grants.accounts.forget()
    assert (await both.credentials(A)).token == "canary-access-2"
    assert await both.connections.rotate_secrets() == 1
    assert (await make(secrets=[new]).credentials(A)).token == "canary-access-2"
    assert len(idp.asked) == 1


HOLDS_UP = "TRIGGER refusing BEFORE UPDATE OF refreshed_at ON resilient_grant"
REFUSING = {
    "sqlite": [f"CREATE {HOLDS_UP} BEGIN SELECT RAISE(ABORT, 'not now'); END"],
    "postgresql": [
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE deadlock_detected; END $$",
        f"CREATE {HOLDS_UP} FOR EACH ROW EXECUTE FUNCTION refuse()",
    ],
}


async def test_a_commit_that_the_database_breaks_off_is_tried_again(make, idp, caplog):
    """A deadlock, a lock that took too long: the database answers, and took nothing."""
    app = make()
    await connect(app, idp, expired=True)
    engine = app.database.sync_engine
    with engine.begin() as c:
        for statement in REFUSING[engine.dialect.name]:
            c.execute(text(statement))
    waiting = asyncio.create_task(app.credentials(A))
    await until(lambda: "could not be stored" in caplog.text or waiting.done())
    with engine.begin() as c:
        c.execute(text("DROP TRIGGER refusing" + (" ON resilient_grant" * (engine.dialect.name == "postgresql"))))
    assert (await asyncio.wait_for(waiting, LIMIT)).token == "canary-access-2"
    assert "canary" not in caplog.text
    assert len(idp.asked) == 1


KEEPS_UP = "TRIGGER refusing BEFORE UPDATE OF lease_until ON resilient_grant"
NOT_KEPT_UP = {
    "sqlite": [f"CREATE {KEEPS_UP} WHEN NEW.state = 'refreshing' BEGIN SELECT RAISE(ABORT, 'not now'); END"],
    "postgresql": [
        REFUSING["postgresql"][0],
        f"CREATE {KEEPS_UP} FOR EACH ROW WHEN (NEW.state = 'refreshing') EXECUTE FUNCTION refuse()",
    ],
}  # fmt: skip


async def test_a_lease_that_the_database_does_not_prolong_takes_no_token_from_its_caller(make, idp, monkeypatch):
    monkeypatch.setattr(engine_grants, "LEASE", 0.5)
    app = make()
    await connect(app, idp, expired=True)
    waiting, tries = await refreshing(app, idp, A), []
    keep_up = grants.keep_up

    def noted(*args):
        tries.append(args)
        return keep_up(*args)

    monkeypatch.setattr(grants, "keep_up", noted)
    engine = app.database.sync_engine
    with engine.begin() as c:
        for statement in NOT_KEPT_UP[engine.dialect.name]:
            c.execute(text(statement))
    before = len(tries)
    await until(lambda: len(tries) > before + 1)  # the first that fails is not the last
    with engine.begin() as c:
        c.execute(text("DROP TRIGGER refusing" + (" ON resilient_grant" * (engine.dialect.name == "postgresql"))))
    idp.hold.set()
    assert (await asyncio.wait_for(waiting, LIMIT)).token == "canary-access-2"


async def test_a_close_that_is_broken_off_breaks_no_refresh_off(make, idp):
    app = make()
    await connect(app, idp, expired=True)
    waiting = await refreshing(app, idp, A)
    closing = asyncio.create_task(app.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    idp.hold.set()
    assert (await asyncio.wait_for(waiting, LIMIT)).token == "canary-access-2"
    assert await read_elsewhere(make) == "canary-access-2"


async def test_a_probe_that_is_broken_off_goes_on(make, idp):
    """A worker that stops cancels its housekeeping."""
    app = make()
    await connect(app, idp)
    idp.hold.clear()
    probing = asyncio.create_task(app.grants.probe(A))
    await until(lambda: idp.asked)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    closing = asyncio.create_task(app.grants.close())
    idp.hold.set()
    await asyncio.wait_for(closing, LIMIT)
    assert await read_elsewhere(make) == "canary-access-2"


async def test_the_end_of_the_loop_waits_for_a_commit_under_way(make, idp, monkeypatch):
    """`asyncio.run` cancels every task that is left, a refresh whose answer has come among them."""
    app, begun = make(), asyncio.Event()
    await connect(app, idp, expired=True)
    commit = engine_grants.Grants._commit

    async def noted(self, *args, **kwargs):
        begun.set()
        await commit(self, *args, **kwargs)

    monkeypatch.setattr(engine_grants.Grants, "_commit", noted)
    waiting = await refreshing(app, idp, A)
    with locked(app):
        idp.hold.set()
        await until(begun.is_set)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name() in ("refresh", "resilient-refresh-lease"):
                task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, LIMIT)
    assert await read_elsewhere(make) == "canary-access-2"
    assert len(idp.asked) == 1


async def test_the_older_refresh_token_that_was_taken_is_the_one_that_is_kept(make, idp):
    """The answer that brought the newer one was lost at the provider, and it gives no new one for the older."""
    app = make(idp.provider(rotation=Rotation.OLD_KEPT))
    idp.rotation = "grace"
    await connect(app, idp, expired=True)
    await app.credentials(A)  # the second refresh token is stored, and the first beside it
    del idp.refresh["canary-refresh-2"]
    idp.refresh["canary-refresh-1"] = None
    idp.rotation = "none"
    for _ in range(2):
        assert await app.grants.renew(A, await app.credentials(A))
    assert [form["refresh_token"][-1] for form in idp.asked] == ["1", "2", "1", "1"]
    assert (await app.connections.get(A)).state is GrantState.ACTIVE


async def test_a_refresh_left_in_another_loop_keeps_nobody_waiting(database_url, idp, monkeypatch):
    """A loop that stands still, as between two calls of `loop.run_until_complete`."""
    monkeypatch.setattr(engine_grants, "LEASE", 0.5)
    monkeypatch.setattr(grants, "LAST_CALL", 0.2)
    app = Resilient(database_url, handlers=[me], providers=[idp.provider(rotation=Rotation.NONE)], secrets=[KEY])
    idp.rotation = "none"
    await connect(app, idp, expired=True)
    begun, may_end = threading.Event(), threading.Event()

    def elsewhere():
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.create_task(app.credentials(A))
            runner.run(until(lambda: idp.asked))
            client = app.grants.client_of("idp")._client  # the next loop has its own
            begun.set()
            may_end.wait(LIMIT)
            runner.run(app.grants._refreshes.wait_all())
            runner.run(client.aclose())

    idp.hold.clear()
    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    try:
        assert await asyncio.to_thread(begun.wait, LIMIT)
        idp.hold.set()
        assert (await asyncio.wait_for(app.credentials(A), LIMIT)).version == 2
    finally:
        idp.hold.set()
        may_end.set()
        await asyncio.to_thread(thread.join, LIMIT)
        await app.close()


class Overtaken:
    """An app's own table, in whose `load` its process stands still until another one has refreshed the account."""

    def __init__(self, credentials):
        self.credentials, self.overtake = credentials, None

    async def load(self, _key):
        credentials = self.credentials
        if self.overtake is not None:
            overtake, self.overtake = self.overtake, None
            overtake()
        return credentials

    async def save(self, _key, expected_version, credentials):
        if self.credentials.version != expected_version:
            return False
        self.credentials = credentials
        return True


async def test_who_lost_the_lease_before_it_could_send_sends_nothing(make, idp, monkeypatch):
    """A refresh token that comes twice ends all tokens of its consent at many providers."""
    monkeypatch.setattr(grants, "LAST_CALL", 0.0)
    access, refresh = idp.issue()
    table = Overtaken(Credentials(token=access, refresh_token=refresh))
    app = make(credentials=table)
    used = await app.credentials(A)
    id_ = (await app.connections.get(A)).grant_id
    monkeypatch.setattr(engine_grants, "LEASE", 0.0)  # it is over as soon as it begins

    def overtake():
        run, taken = app.database.transaction_sync, None
        while taken is None or not taken.may_send:
            taken = run(grants.begin, id_, 1, 60.0, refused=False)
        table.credentials = replace(table.credentials, token="canary-newer", refresh_token="canary-new", version=2)
        idp.access.add("canary-newer")
        assert run(grants.renew_if_held, taken.grant, grants.NewSecrets(None, None, None, None))

    account = await app.grants.accounts.load(A)
    table.overtake = overtake
    app.grants.accounts.load = lambda _key: asyncio.sleep(0, account)
    with suppress(ResourceStopped):
        await app.grants.renew(A, used)
    del app.grants.accounts.load
    assert not idp.asked
    app.grants.accounts.forget()
    assert (await app.credentials(A)).token == "canary-newer"
