"""Connections on real databases and a real token endpoint: one refresh, whoever asks, and no account lost by it."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import (
    ConnectionNotFound,
    ConsentRefused,
    Credentials,
    GrantState,
    InvalidInput,
    Job,
    Resilient,
    ResourceStopped,
    Rotation,
    SetupError,
    handler,
)
from resilient.core.base.bounds import OPEN_CONSENTS
from resilient.engine.accounts import access
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT, until
from tests.idp import connect, key_of, me, plain

KEY = new_key()
A = "idp/acct-1"


@handler("post")
async def post(job: Job[None]) -> int:
    response = await job.client.post("/things", json={})
    response.raise_for_status()
    return response.status_code


@handler("abroad")
async def abroad(job: Job[str]) -> int:
    return (await job.client.get(job.payload)).status_code


HANDLERS = [me, post, plain, abroad]


@pytest.fixture
async def make(database_url, idp):
    """Apps on the same database, as other processes would have them."""
    made = []

    def make_(provider=None, **options):
        options = {"secrets": [KEY], **options}
        app = Resilient(database_url, handlers=HANDLERS, providers=[provider or idp.provider()], **options)
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


@pytest.fixture
def app(make):
    return make()


def in_daemon(fn):
    """A call in a daemon thread: one that hangs does not hold up the end of the tests."""
    future = Future()

    def call():
        try:
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001 - the test's own
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return asyncio.wrap_future(future)


async def states(app, **wanted):
    return [job.state.value for job in await app.jobs.list(**wanted)]


# -- refreshing ----------------------------------------------------------------------------------------------


async def test_a_request_carries_the_token_and_an_expired_one_is_refreshed_before_it(app, idp):
    await connect(app, idp, expired=True)
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert await states(app) == ["succeeded"]
    assert idp.calls == [(200, "Bearer canary-access-2")]
    info = await app.connections.get(A)
    assert (info.state, info.version, info.failures) == (GrantState.ACTIVE, 2, 0)


async def test_within_the_margin_it_is_refreshed_although_it_is_still_good(app, idp):
    await connect(app, idp, lasts=100)
    assert (await app.credentials(A)).token == "canary-access-2"
    assert (await app.credentials(A)).token == "canary-access-2"
    assert idp.issued == 1


@pytest.mark.parametrize("kind", [me, post, plain])
async def test_a_refused_token_is_refreshed_and_the_request_repeated_at_once(app, idp, kind):
    await connect(app, idp)
    idp.expire()
    await app.enqueue(kind, resource_key=A)
    await app.worker().drain()
    (job,) = await app.jobs.list()
    assert (job.state.value, job.executions, job.deferrals) == ("succeeded", 1, 0)
    assert [status for status, _ in idp.calls] == [401, 200]


async def test_fifty_refusals_in_three_apps_are_one_refresh(make, idp):
    apps = [make() for _ in range(3)]
    await connect(apps[0], idp)
    seen = [await app.credentials(A) for app in apps]
    idp.expire()
    idp.hold.clear()  # the answer takes a while: everybody arrives meanwhile
    waiting = [app.grants.renew(A, access) for app, access in zip(apps, seen, strict=True) for _ in range(17)]
    task = asyncio.gather(*waiting)
    await asyncio.sleep(0.3)
    idp.hold.set()
    assert await task == [True] * 51
    assert len(idp.asked) == 1
    assert {(await app.credentials(A)).token for app in apps} == {"canary-access-2"}


async def test_the_new_token_is_committed_before_it_is_used(app, idp, read_all):
    await connect(app, idp, expired=True)
    used = await app.credentials(A)
    (row,) = read_all("SELECT * FROM {grant}")
    assert row["version"] == used.version == 2
    assert used.token not in str(row)


async def test_null_fields_wipe_nothing(app, idp):
    idp.script = ["nulls"]
    await connect(app, idp, expired=True)
    idp.rotation = "none"
    assert (await app.credentials(A)).token == "canary-access-2"
    held = await app.grants.accounts.load_usable(A)
    assert held.credentials.refresh_token == "canary-refresh-1"
    assert held.credentials.expires_at is None


async def test_one_grant_for_several_accounts_is_refreshed_once(app, idp):
    await connect(app, idp)
    await app.connections.add("idp/acct-2", grant_of=A)
    seen = [await app.credentials(key) for key in (A, "idp/acct-2")]
    idp.expire()
    assert await asyncio.gather(app.grants.renew(A, seen[0]), app.grants.renew("idp/acct-2", seen[1])) == [True, True]
    assert idp.issued == 1
    assert (await app.credentials("idp/acct-2")).token == "canary-access-2"


async def test_client_credentials(make, idp):
    app = make(idp.provider(flows=("client_credentials",)))
    await app.connections.add(A, client_credentials=True)
    assert (await app.credentials(A)).token == "canary-access-1"
    assert idp.asked[0]["grant_type"] == "client_credentials"


async def test_a_service_account_gets_its_tokens_by_its_key(make, idp, read_all):
    app, pem = make(idp.provider(flows=("jwt_bearer",))), key_of(idp)
    await app.connections.add(A, private_key=pem, issuer="robot@idp", subject="ann", key_id="k1")
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    idp.expire()
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert await states(app) == ["succeeded"] * 2
    assert [read.claims["sub"] for read in idp.claims] == ["ann", "ann"]
    assert all("client_id" not in form for form in idp.asked)
    assert pem.splitlines()[1] not in str(read_all("SELECT * FROM {grant}"))
    for wrong in (
        {"private_key": pem},
        {"issuer": "x", "token": "t"},
        {"private_key": pem, "issuer": "x", "token": "t"},
    ):
        with pytest.raises(InvalidInput, match="with issuer"):
            await app.connections.add(A, **wrong)
    with pytest.raises(SetupError, match="no private key"):
        await app.connections.add(A, private_key="canary", issuer="x")


async def test_an_application_that_proves_itself_by_a_key(make, idp):
    app = make(idp.provider(client_auth="jwt", client_secret=key_of(idp), key_header={"x5t": "thumb"}))
    await connect(app, idp, expired=True)
    assert (await app.credentials(A)).token == "canary-access-2"
    (read,) = idp.claims
    assert (read.claims["sub"], read.header["x5t"], idp.asked[0]["client_id"]) == ("app", "thumb", "app")


# -- killed and lost -----------------------------------------------------------------------------------------


async def overtaken(app, idp):
    """A worker takes the lease, asks, and dies before it commits; its lease ends."""
    held = await app.grants.accounts.load_usable(A)
    begun = await app.database.transaction(grants.begin, held.bound.grant.id, 1, 60, refused=True)
    assert begun.may_send
    answer = await app.grants.client_of("crm").refresh(held.oauth, held.credentials.refresh_token, begun.now)
    assert answer.failure is None
    over = "UPDATE {grant} SET lease_until = :until"
    await app.database.transaction(lambda c, d: d.run(c, over, {"until": begun.now}))
    app.grants.accounts.forget()
    return begun.grant


async def test_killed_before_the_commit_with_a_grace_the_grant_survives(make, idp, monkeypatch):
    monkeypatch.setattr(grants, "LAST_CALL", 0.3)
    idp.rotation = "grace"
    app = make(idp.provider(rotation=Rotation.GRACE, grace=1800))
    await connect(app, idp)
    await overtaken(app, idp)
    assert (await app.credentials(A)).token == "canary-access-3"
    assert (await app.connections.get(A)).state is GrantState.ACTIVE


async def test_killed_before_the_commit_without_a_grace_is_one_try_then_needs_reauth(make, idp, monkeypatch):
    monkeypatch.setattr(grants, "LAST_CALL", 0.3)
    app = make()
    await connect(app, idp)
    await overtaken(app, idp)
    with pytest.raises(ResourceStopped):
        await app.credentials(A)
    assert len(idp.asked) == 2
    assert (await app.connections.get(A)).state is GrantState.NEEDS_REAUTH
    with pytest.raises(ResourceStopped):
        await app.credentials(A)
    assert len(idp.asked) == 2


async def test_a_late_winner_changes_nothing(app, idp):
    await connect(app, idp)
    late = await overtaken(app, idp)
    await connect(app, idp)  # authorised again meanwhile
    nothing = grants.NewSecrets("stale", "key", None, None)
    assert not await app.database.transaction(grants.renew_if_held, late, nothing)
    assert (await app.credentials(A)).token == "canary-access-3"


async def test_a_lost_answer_is_unknown_and_an_outage_never_kills_a_grant(make, idp):
    app = make(idp.provider(rotation=Rotation.SINGLE_USE))
    await connect(app, idp, expired=True)
    idp.script = ["lost"]
    with pytest.raises(ResourceStopped) as stopped:
        await app.credentials(A)
    assert stopped.value.resource == "idp:token"
    info = await app.connections.get(A)
    assert (info.state, info.failures) == (GrantState.UNKNOWN, 1)


# -- the four classes ----------------------------------------------------------------------------------------


async def test_a_dead_grant_gates_the_account_and_authorising_again_lets_its_jobs_go_on(app, idp):
    await connect(app, idp, expired=True)
    await connect(app, idp, "idp/acct-2")
    del idp.refresh["canary-refresh-1"]
    for key in (A, A, "idp/acct-2"):
        await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    assert sorted(await states(app)) == ["ready", "ready", "succeeded"]
    assert len(idp.asked) == 1
    assert (await app.resources.get(A)).auth == "needs_reauth"
    assert all(not job.attempts for job in await app.jobs.list(state="ready"))
    await connect(app, idp)
    await app.worker().drain()
    assert await states(app) == ["succeeded"] * 3


async def test_a_refused_application_gates_the_provider_and_marks_no_account(make, idp):
    app = make(idp.provider(client_secret="canary-wrong"))
    await connect(app, idp, expired=True)
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert (await app.connections.get(A)).state is GrantState.ACTIVE
    assert (await app.resources.get("idp")).auth == "app_refused"
    assert await states(app) == ["ready"]
    healed = make()
    await healed.database.transaction(lambda c, d: d.run(c, "UPDATE {grant} SET retry_at = NULL"))
    await healed.grants.test(A)
    assert (await app.resources.get("idp")).auth == "ok"
    await healed.worker().drain()
    assert await states(app) == ["succeeded"]


async def test_a_throttled_token_endpoint_rests_and_nobody_asks_it_again(app, idp):
    for key in (A, "idp/acct-2"):
        await connect(app, idp, key, expired=True)
    idp.script = ["throttle"]
    for key in (A, "idp/acct-2", A):
        with pytest.raises(ResourceStopped) as stopped:
            await app.credentials(key)
        assert stopped.value.resource == "idp:token"
    assert len(idp.asked) == 1
    assert {c.state for c in await app.connections.list("idp")} == {GrantState.ACTIVE}
    rests = (await app.resources.get("idp:token")).blocked_until
    assert rests > datetime.now(UTC) + timedelta(seconds=100)


@pytest.mark.parametrize("word", ["html", "down"])
async def test_what_is_no_answer_changes_nothing_and_a_token_that_still_lasts_is_used(app, idp, word):
    await connect(app, idp, lasts=100)
    idp.script = [word]
    assert (await app.credentials(A)).token == "canary-access-1"
    assert (await app.credentials(A)).token == "canary-access-1"
    assert len(idp.asked) == 1
    info = await app.connections.get(A)
    assert (info.state, info.failures) == (GrantState.ACTIVE, 1)


async def test_a_job_without_a_usable_token_waits_and_is_charged_nothing(app, idp):
    await connect(app, idp, expired=True)
    idp.script = ["down"]
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    (job,) = await app.jobs.list()
    assert (job.state.value, job.attempts, job.waiting_for) == ("ready", 0, A)
    assert (await app.resources.get(A)).blocked_until is not None


@pytest.mark.parametrize("by", ["token", "password"])
async def test_refused_keys_gate_the_account(app, idp, by):
    if by == "token":
        await app.connections.add(A, token="canary-none")
    else:
        await app.connections.add(A, user="who", password="canary-none")
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    good = by == "password"
    assert await states(app) == ["succeeded" if good else "ready"]
    assert (await app.resources.get(A)).auth == ("ok" if good else "needs_reauth")
    assert len(idp.calls) == 1


async def test_a_fresh_token_that_is_refused_gates_the_account(app, idp):
    await connect(app, idp)
    idp.expire()
    idp.access = type("Never", (set,), {"__contains__": lambda *_: False})()
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert await states(app) == ["ready"]
    assert (await app.connections.get(A)).state is GrantState.NEEDS_REAUTH
    assert len(idp.asked) == 1


# -- where credentials go ------------------------------------------------------------------------------------


async def test_only_declared_hosts_get_credentials(app, idp, stranger):
    await connect(app, idp)
    await app.enqueue(abroad, f"{stranger.url}/me", resource_key=A)
    await app.worker().drain()
    assert stranger.calls == [(401, "")]
    assert not idp.asked


# -- consent -------------------------------------------------------------------------------------------------


async def test_consent(app, idp):
    url = await app.connections.authorize_url(A)
    asked = {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()}
    assert asked["client_id"] == "app"
    assert asked["code_challenge_method"] == "S256"
    info = await app.connections.complete({"state": asked["state"], "code": "canary-code"})
    assert (info.resource_key, info.state) == (A, GrantState.ACTIVE)
    assert idp.asked[0]["code"] == "canary-code"
    assert len(idp.asked[0]["code_verifier"]) >= 43
    assert (await app.credentials(A)).token == "canary-access-1"
    with pytest.raises(ConsentRefused, match="not expected"):
        await app.connections.complete({"state": asked["state"], "code": "canary-code"})


async def test_an_account_has_so_many_consents_under_way(app, idp, read_all):
    """Whoever may begin one may begin it again and again: the latest count, and no other account's are touched."""
    urls = [await app.connections.authorize_url(A) for _ in range(OPEN_CONSENTS.value + 3)]
    others = await app.connections.authorize_url("idp/acct-2")
    states = [parse_qs(urlsplit(url).query)["state"][0] for url in (*urls, others)]
    assert len(read_all("SELECT id FROM {authorization}")) == OPEN_CONSENTS.value + 1
    for state in states[:3]:
        with pytest.raises(ConsentRefused, match="not expected"):
            await app.connections.complete({"state": state, "code": "canary-code"})
    for state in states[3:5] + states[-2:]:
        assert (await app.connections.complete({"state": state, "code": "canary-code"})).state is GrantState.ACTIVE


async def test_consent_refused_forged_or_elsewhere(app, idp):
    with pytest.raises(ConsentRefused):
        await app.connections.complete({"state": "made up", "code": "x"})
    with pytest.raises(InvalidInput, match="redirect_uri"):
        await app.connections.authorize_url(A, redirect_uri="https://evil.example/")
    url = await app.connections.authorize_url(A)
    state = parse_qs(urlsplit(url).query)["state"][0]
    with pytest.raises(ConsentRefused, match="access_denied"):
        await app.connections.complete({"state": state, "error": "access_denied"})
    assert not idp.asked


# -- an app's own table --------------------------------------------------------------------------------------


class Own:
    """Somebody's table of tokens."""

    def __init__(self, credentials):
        self.credentials, self.saves = credentials, 0

    async def load(self, resource_key):
        return self.credentials if resource_key == A else None

    async def save(self, resource_key, expected_version, credentials):
        assert resource_key == A
        if self.credentials.version != expected_version:
            return False
        self.credentials, self.saves = credentials, self.saves + 1
        return True


async def test_the_app_keeps_its_tokens_and_we_refresh_them_once(make, idp, read_all):
    access, refresh = idp.issue()
    own = Own(Credentials(token=access, refresh_token=refresh, version=7))
    apps = [make(credentials=own, secrets=[]) for _ in range(2)]
    seen = [await app.credentials(A) for app in apps]
    idp.expire()
    renewed = [app.grants.renew(A, one) for app, one in zip(apps, seen, strict=True) for _ in range(5)]
    assert await asyncio.gather(*renewed) == [True] * 10
    assert (len(idp.asked), own.saves, own.credentials.version) == (1, 1, 8)
    assert own.credentials.token == "canary-access-2"
    (row,) = read_all("SELECT * FROM {grant}")
    assert row["secrets"] is None
    assert "canary" not in str(row)
    with pytest.raises(ConnectionNotFound):
        await apps[0].credentials("idp/nobody")


async def test_a_table_of_theirs_that_fails_once_loses_no_token(make, idp):
    access, refresh = idp.issue()
    own, troubles = Own(Credentials(token=access, refresh_token=refresh, version=7)), [OSError("canary-away")]
    save = own.save

    async def fails_once(key, expected, new):
        if troubles:
            raise troubles.pop()
        return await save(key, expected, new)

    own.save = fails_once
    app = make(credentials=own, secrets=[])
    seen = await app.credentials(A)
    idp.expire()
    assert await app.grants.renew(A, seen)
    assert (len(idp.asked), own.saves, own.credentials.version) == (1, 1, 8)


async def test_a_table_of_theirs_that_fails_before_the_refresh_keeps_no_lease(make, idp, read_all):
    """Nothing was sent: the next refresh need not wait for the lease to end, and no answer was lost."""
    access, refresh = idp.issue()
    own, troubles = Own(Credentials(token=access, refresh_token=refresh, version=7)), []
    load = own.load

    async def fails_once(key):
        if troubles:
            raise troubles.pop()
        return await load(key)

    own.load = fails_once
    app = make(credentials=own, secrets=[])
    seen = await app.credentials(A)
    idp.expire()
    account = await app.grants.accounts.load(A)
    app.grants.accounts.load = lambda _key: asyncio.sleep(0, account)
    troubles.append(OSError("canary-away"))
    with pytest.raises(OSError, match="away"):
        await app.grants.renew(A, seen)
    (row,) = read_all("SELECT * FROM {grant}")
    assert (row["state"], row["lease_until"], idp.asked) == ("active", None, [])
    del app.grants.accounts.load
    assert await app.grants.renew(A, seen)
    assert len(idp.asked) == 1


async def test_an_own_grant_that_died_goes_on_after_the_app_says_so(make, idp):
    access, refresh = idp.issue()
    own = Own(Credentials(token=access, refresh_token="canary-gone"))
    app = make(credentials=own, secrets=[])
    idp.expire()
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert (await app.resources.get(A)).auth == "needs_reauth"
    access, refresh = idp.issue()
    own.credentials = Credentials(token=access, refresh_token=refresh, version=2)
    await app.connections.restored(A)
    await app.worker().drain()
    assert await states(app) == ["succeeded"]


async def test_consent_fills_the_apps_own_table(make, idp):
    own = Own(None)
    app = make(credentials=own)
    own.save = lambda _, expected, new: _saved(own, expected, new)
    url = await app.connections.authorize_url(A)
    state = parse_qs(urlsplit(url).query)["state"][0]
    info = await app.connections.complete({"state": state, "code": "canary-code"})
    assert (info.state, own.credentials.version, own.credentials.token) == (GrantState.ACTIVE, 1, "canary-access-1")
    assert (await app.credentials(A)).token == "canary-access-1"
    idp.expire()
    idp.refresh.clear()
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert (await app.resources.get(A)).auth == "needs_reauth"
    url = await app.connections.authorize_url(A)
    state = parse_qs(urlsplit(url).query)["state"][0]
    await app.connections.complete({"state": state, "code": "canary-code"})
    await app.worker().drain()
    assert await states(app) == ["succeeded"]
    assert own.credentials.version == 2


async def _saved(own, expected, new):
    if expected != (0 if own.credentials is None else own.credentials.version):
        return False
    own.credentials = new
    return True


class Plain:
    """The same in plain functions, which note the threads they run in."""

    def __init__(self, credentials):
        self.own, self.threads = Own(credentials), set()

    def load(self, resource_key):
        self.threads.add(threading.current_thread().name)
        return self.own.credentials if resource_key == A else None

    def save(self, resource_key, expected_version, credentials):
        assert resource_key == A
        self.threads.add(threading.current_thread().name)
        if self.own.credentials.version != expected_version:
            return False
        self.own.credentials, self.own.saves = credentials, self.own.saves + 1
        return True


async def test_an_own_table_may_be_plain_functions(make, idp):
    access, refresh = idp.issue()
    plain_store = Plain(Credentials(token=access, refresh_token=refresh, version=7))
    app = make(credentials=plain_store, secrets=[])
    await app.credentials(A)
    idp.expire()
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert await states(app) == ["succeeded"]
    assert (plain_store.own.saves, plain_store.own.credentials.version) == (1, 8)
    assert threading.current_thread().name not in plain_store.threads


async def test_half_a_store_is_refused(make):
    with pytest.raises(SetupError, match="needs load"):
        make(credentials=object(), secrets=[])


@pytest.mark.parametrize("own", [False, True])
async def test_threads_share_the_credentials_and_refresh_them_once(make, idp, own):
    access, refresh = idp.issue()
    ends = datetime.now(UTC) - timedelta(seconds=5)
    kept = Plain(Credentials(token=access, refresh_token=refresh, expires_at=ends, refresh_at=ends))
    apps = [make(credentials=kept, secrets=[]) if own else make() for _ in range(2)]
    if not own:
        await apps[0].connections.import_(A, access_token=access, refresh_token=refresh, expires_at=ends)
    idp.hold.clear()
    threads = [asyncio.to_thread(app.sync.credentials, A) for app in apps for _ in range(5)]
    asked = asyncio.gather(*threads, *(app.credentials(A) for app in apps))
    await asyncio.sleep(0.3)
    idp.hold.set()
    assert {one.token for one in await asked} == {"canary-access-2"}
    assert len(idp.asked) == 1
    for app in apps:
        with pytest.raises(ConnectionNotFound):
            await asyncio.to_thread(app.sync.credentials, "idp/nobody")
    apps[0].sync.close()
    assert (await asyncio.to_thread(apps[0].sync.credentials, A)).token == "canary-access-2"
    assert [t.name for t in threading.enumerate()].count("resilient-sync") == 2


class Standstill(Plain):
    """Its `load` does not return before it may."""

    def __init__(self):
        super().__init__(Credentials(token="canary-own", version=1))
        self.begun, self.may_end = threading.Event(), threading.Event()

    def load(self, resource_key):
        self.begun.set()
        self.may_end.wait(LIMIT)
        return super().load(resource_key)


async def test_a_thread_that_waits_hears_that_the_app_is_closed(make):
    table = Standstill()
    app = make(credentials=table, secrets=[])
    asked = in_daemon(partial(app.sync.credentials, A))
    assert await asyncio.to_thread(table.begun.wait, LIMIT)
    await asyncio.to_thread(app.sync.close)
    with pytest.raises(SetupError, match="the app was closed while a thread waited for credentials"):
        await asyncio.wait_for(asked, LIMIT)
    table.may_end.set()
    assert (await asyncio.to_thread(app.sync.credentials, A)).token == "canary-own"


async def test_a_thread_whose_refresh_is_under_way_gets_it_though_the_app_is_closed(make, idp):
    app = make()
    await connect(app, idp, expired=True)
    idp.hold.clear()
    asked = in_daemon(partial(app.sync.credentials, A))
    await until(lambda: idp.asked)
    closed = in_daemon(app.sync.close)
    idp.hold.set()
    assert (await asyncio.wait_for(asked, LIMIT)).token == "canary-access-2"
    await asyncio.wait_for(closed, LIMIT)


class ClosingLock:
    """Whoever releases it for the first time finds the app closed right after."""

    def __init__(self, close):
        self._lock, self._close = threading.Lock(), [close]

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        if self._close:
            self._close.pop()()


async def test_a_call_in_the_moment_of_the_close_hears_of_it_too(make):
    table = Standstill()
    app = make(credentials=table, secrets=[])
    side = app.sync.close.__self__
    side._lock = ClosingLock(side.close)
    with pytest.raises(SetupError, match="the app was closed while a thread waited for credentials"):
        await asyncio.wait_for(in_daemon(partial(app.sync.credentials, A)), LIMIT)
    table.may_end.set()


def test_a_program_without_a_loop(database_url, idp):
    app = Resilient(database_url, handlers=HANDLERS, providers=[idp.provider()], secrets=[KEY])
    access, refresh = idp.issue()
    ends = datetime.now(UTC) - timedelta(seconds=5)
    info = app.sync.connections.import_(A, access_token=access, refresh_token=refresh, expires_at=ends)
    assert info.state is GrantState.ACTIVE
    assert app.sync.credentials(A).headers == {"Authorization": "Bearer canary-access-2"}
    del idp.refresh["canary-refresh-2"]
    idp.expire()
    app.database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {grant} SET expires_at = created_at, refresh_at = created_at")
    )
    app.sync.close()
    with pytest.raises(ResourceStopped):
        app.sync.credentials(A)
    assert app.sync.connections.get(A).state is GrantState.NEEDS_REAUTH
    app.sync.close()
    app.database.close_sync()


# -- secrets -------------------------------------------------------------------------------------------------


async def test_keys_are_changed_while_everything_runs(make, idp, read_all):
    new = new_key()
    app = make()
    await connect(app, idp)
    both = make(secrets=[new, KEY])
    assert (await both.credentials(A)).token == "canary-access-1"
    assert await both.connections.rotate_secrets() == 1
    assert await both.connections.rotate_secrets() == 0
    assert (await make(secrets=[new]).credentials(A)).token == "canary-access-1"
    with pytest.raises(SetupError, match="not among"):
        await make(secrets=[KEY]).credentials(A)


async def test_who_connects_an_account_at_the_same_moment_leaves_one_grant(make, read_all):
    apps = [make() for _ in range(4)]
    for n in range(8):
        await asyncio.gather(*(app.connections.add(f"idp/acct-{n}", token=f"canary-{n}") for app in apps))
    grants_, used = (read_all(f"SELECT {column} FROM {table}") for column, table in (
        ("id", "{grant}"), ("grant_id AS id", "{connection}"),
    ))  # fmt: skip
    assert sorted(str(row["id"]) for row in grants_) == sorted(str(row["id"]) for row in used)
    for n in range(8):
        info = await apps[0].connections.get(f"idp/acct-{n}")
        assert (info.version, info.state) == (4, GrantState.ACTIVE)
        assert (await apps[n % 4].credentials(info.resource_key)).token == f"canary-{n}"


async def test_a_grant_that_nobody_uses_any_more_is_gone_with_its_secrets(app, idp, read_all):
    await connect(app, idp)
    await connect(app, idp, "idp/acct-2")
    await app.connections.add("idp/acct-3", grant_of="idp/acct-2")
    await app.connections.add("idp/acct-2", grant_of=A)
    assert len(read_all("SELECT id FROM {grant}")) == 2  # the third account still has it
    await app.connections.add("idp/acct-3", grant_of=A)
    (left,) = read_all("SELECT id FROM {grant}")
    assert (await app.connections.get("idp/acct-3")).grant_id == (await app.connections.get(A)).grant_id
    await app.connections.add("idp/acct-3", grant_of="idp/acct-3")
    assert read_all("SELECT id FROM {grant}") == [left]


async def test_what_was_refused_is_forgotten_with_the_next_token(app, idp, monkeypatch):
    monkeypatch.setattr(access, "MOST", 3)
    names = [f"idp/acct-{n}" for n in range(6)]
    for key in names:
        await connect(app, idp, key)
    idp.expire()
    for key in names:
        await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    assert await states(app) == ["succeeded"] * 6
    assert len(app.grants._refused_credentials._issues) <= 3
    for key in names:
        await app.credentials(key)
    assert app.grants._refused_credentials._issues == {}


async def test_accounts_that_are_remembered_are_bounded(app, idp, monkeypatch):
    monkeypatch.setattr(access, "MOST", 3)
    for n in range(10):
        await connect(app, idp, f"idp/acct-{n}")
        assert (await app.credentials(f"idp/acct-{n}")).token == f"canary-access-{n + 1}"
        assert len(app.grants.accounts._accounts) <= 3


async def test_without_a_key_it_says_how_to_make_one(make, idp):
    with pytest.raises(SetupError, match="resilient secrets new"):
        await make(secrets=[]).connections.add(A, token="canary-token")


async def test_secrets_of_one_row_cannot_be_read_in_another(app, idp):
    await connect(app, idp)
    await connect(app, idp, "idp/acct-2")
    sealed = "UPDATE {grant} SET secrets = (SELECT max(secrets) FROM {grant})"
    await app.database.transaction(lambda c, d: d.run(c, sealed))
    app.grants.accounts.forget()
    refused = 0
    for key in (A, "idp/acct-2"):
        try:
            await app.credentials(key)
        except SetupError as error:
            refused += "belong to another row" in str(error)
    assert refused == 1


async def test_no_secret_shows_anywhere(app, idp, caplog, read_all, capsys):
    caplog.set_level(logging.DEBUG)
    await connect(app, idp, expired=True)
    idp.script = ["down"]
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    await app.database.transaction(lambda c, d: d.run(c, "UPDATE {grant} SET retry_at = NULL"))
    held = await app.grants.accounts.load_usable(A)
    texts = [caplog.text, *capsys.readouterr(), repr(held), repr(held.access), repr(app.grants.accounts.ring), KEY[9:]]
    shown = [repr(await app.connections.get(A)), str((await app.connections.get(A)).to_json())]
    tables = ("job", "attempt", "resource", "grant", "connection", "alert")
    shown += [str(read_all(f"SELECT * FROM {{{table}}}")) for table in tables]
    idp.refresh.clear()
    try:
        await app.credentials(A)
    except ResourceStopped as error:
        shown.append(str(error))
    for text in (*texts[:-1], *shown, caplog.text):
        assert "canary" not in text
        assert texts[-1] not in text


async def test_revoking_forgets_the_secrets_and_gates_the_account(app, idp, read_all):
    await connect(app, idp)
    assert await app.connections.revoke(A)
    assert not await app.connections.revoke(A)
    (row,) = read_all("SELECT secrets, state FROM {grant}")
    assert row == {"secrets": None, "state": "revoked"}
    assert (await app.resources.get(A)).auth == "revoked"
    with pytest.raises(ResourceStopped):
        await app.credentials(A)
    await connect(app, idp)
    assert (await app.credentials(A)).token == "canary-access-2"


@pytest.mark.parametrize("token", ["canary\n", "canary\r\nx: y", "canary\u20ac", "canary\0", " canary"])
async def test_a_token_that_no_header_can_hold_is_refused(token, sqlite_url):
    app = Resilient(sqlite_url, secrets=[new_key()], upgrade=False)
    for give in (
        app.connections.add("api/one", token=token),
        app.connections.add("api/one", api_key=token),
        app.connections.import_("api/one", access_token=token),
    ):
        with pytest.raises(InvalidInput, match="no header can") as caught:
            await give
        assert "canary" not in str(caught.value)
    await app.close()
