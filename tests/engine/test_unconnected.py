"""Accounts that lack what their provider wants: nothing is sent, nothing is charged, somebody is told, once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from resilient import (
    ConnectionNotFound,
    Credentials,
    Item,
    Job,
    Provider,
    Resilient,
    ResourceStopped,
    SetupError,
    handler,
)
from resilient.engine import alerts
from resilient.engine.accounts import grants as engine_grants
from resilient.engine.inspect import doctor
from resilient.store.accounts.secrets import new_key
from resilient.store.inspect import workers
from resilient.testing import FakeProvider
from tests.helpers import LIMIT, hear, until
from tests.idp import me, plain

KEY = new_key()
A = "idp/acct-1"


@handler("call")
async def call(job: Job[None]) -> None:
    async with job.call("GET", "/me") as asked:
        asked.report(200)


@handler("open", anonymous=True)
async def open_(job: Job[None]) -> int:
    return (await job.client.get("/me")).status_code


@handler("late")
async def late(job: Job[str]) -> None:
    if job.deps:
        await job.deps.pop()()
    if job.payload == "call":
        async with job.call("GET", "/me") as asked:
            asked.report(200)
    else:
        (await job.client.get("/me")).raise_for_status()


HANDLERS = [me, plain, call, open_, late]


@pytest.fixture
async def make(database_url, idp):
    made = []

    def make_(**options):
        options = {"secrets": [KEY], "providers": [idp.provider()], **options}
        made.append(Resilient(database_url, handlers=HANDLERS, **options))
        return made[-1]

    yield make_
    for app in made:
        await app.close()


async def states(app):
    return {(job.state.value, job.attempts) for job in await app.jobs.list(limit=200)}


@pytest.mark.parametrize("kind", [me, plain, call])
async def test_an_account_that_was_never_connected_sends_nothing_and_goes_on_when_it_is(make, idp, kind, monkeypatch):
    told = []
    monkeypatch.setattr(alerts, "FLUSH_EVERY", 3600.0)  # a real second is soon over: the test says when
    app = make(alerts=told.append)
    for _ in range(20):
        job = await app.enqueue(kind, resource_key=A)
    await app.worker().drain()
    assert not idp.calls
    assert await states(app) == {("ready", 0)}
    assert (await app.resources.get(A)).auth == "not_connected"
    assert f"resilient connect idp {A}" in (await app.jobs.why(job.id)).text
    await hear(app)
    assert [(n.alert.name, n.alert.subject) for n in told] == [("needs_reauth", A)]
    assert "never connected" in told[0].text
    idp.access.add("canary")
    await app.connections.add(A, token="canary")
    await app.worker().drain()
    assert await states(app) == {("succeeded", 0)}


async def test_anonymous_requests_are_declared(make, idp):
    app = make()
    await app.enqueue(open_, resource_key=A)
    await app.worker().drain()
    assert idp.calls == [(401, "")]
    public = make(providers=[idp.provider().configured(anonymous=True)])
    await public.enqueue(me, resource_key="idp/acct-2")
    await public.worker().drain()
    assert len(idp.calls) > 1


async def test_a_whole_provider_is_no_account_and_never_gated_for_it(make, idp):
    app = make()
    job = await app.enqueue(me, resource_key="idp")
    idp.access.add("canary")
    await app.connections.add(A, token="canary")
    await app.worker().drain()
    found = await app.jobs.get(job.id)
    assert found.state.value == "dead"
    assert "idp/main" in found.last_error
    other = await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert (await app.jobs.get(other.id)).state.value == "succeeded"


class Own:
    """Somebody's table of tokens."""

    def __init__(self):
        self.known = {}

    async def load(self, resource_key):
        return self.known.get(resource_key)

    async def save(self, resource_key, expected_version, credentials):  # noqa: ARG002 - a CredentialStore
        self.known[resource_key] = credentials
        return True


@pytest.mark.parametrize("says_so", [True, False])
async def test_an_apps_own_table_that_has_it_later(make, idp, says_so):
    own = Own()
    app = make(credentials=own)
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert not idp.calls
    idp.access.add("canary")
    own.known[A] = Credentials(token="canary")
    await (app.connections.restored(A) if says_so else app.grants.keep_house())
    await app.worker().drain()
    assert await states(app) == {("succeeded", 0)}


async def test_no_account_keeps_others_from_being_found_in_an_apps_own_table(make, idp, monkeypatch):
    """Neither many that never come, nor one whose row cannot be read, nor one whose look-up does not end."""
    monkeypatch.setattr(engine_grants, "LOOK", 0.5)
    own, keys = Own(), [f"idp/acct-{n:03}" for n in range(60)]
    app = make(credentials=own)
    for key in keys:
        await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    assert (await app.resources.get(keys[-1])).auth == "not_connected"

    async def load(key):
        if key == keys[0]:
            raise KeyError("canary-secret")
        if key == keys[1]:
            await asyncio.Event().wait()
        return own.known.get(key)

    monkeypatch.setattr(app.grants._store, "load", load)
    idp.access.add("canary")
    own.known[keys[-1]] = Credentials(token="canary")

    async def is_found():
        """After one more look; how many it takes depends on how many accounts a look's time is enough for."""
        await app.grants.keep_house()
        return (await app.resources.get(keys[-1])).auth == "ok"

    await until(is_found)
    await app.worker().drain()
    assert await app.jobs.count(resource=keys[-1], state="succeeded") == 1


async def test_a_look_gets_on_by_one_account_however_slow_the_database_is(make, idp, monkeypatch):
    own, keys = Own(), [f"idp/acct-{n}" for n in range(3)]
    app = make(credentials=own)
    for key in keys:
        await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    own.known[keys[-1]] = Credentials(token="canary")
    hours = SimpleNamespace(monotonic=partial(next, count(0.0, 3600.0)))
    monkeypatch.setattr(engine_grants, "time", hours)  # a look's time is over as soon as it has begun
    for expected in ("not_connected", "not_connected", "ok"):
        await app.grants.keep_house()
        assert (await app.resources.get(keys[-1])).auth == expected


@pytest.mark.parametrize("kind", [me, plain, call])
async def test_where_a_placeholder_is_missing_too(make, idp, kind):
    facts = Provider(name="idp", base_url="https://{shop}.example.com", auth=idp.provider().auth)
    app = make(providers=[facts])
    job = await app.enqueue(kind, resource_key=A)
    await app.worker().drain()
    assert (await app.jobs.get(job.id)).state.value == "ready"
    assert (await app.resources.get(A)).auth == "not_connected"


@pytest.mark.parametrize("way", ["client", "call"])
@pytest.mark.parametrize("where", ["address", "header"])
async def test_an_account_that_is_connected_while_its_job_runs(make, idp, way, where):
    """What its connection says of address and headers was looked up before: the job begins anew, uncharged."""
    facts = {"base_url": idp.url + "/{shop}"} if where == "address" else {"headers": {"X-Shop": "{shop}"}}
    facts = Provider(**{"name": "idp", "base_url": idp.url, "auth": idp.provider().auth, **facts})

    async def connect():
        idp.access.add("canary")
        await app.connections.add(A, token="canary", details={"shop": "acme"})

    app = make(providers=[facts], deps=[connect])
    job = await app.enqueue(late, way, resource_key=A)
    await app.worker().drain()
    done = await app.jobs.get(job.id)
    assert (done.state.value, done.attempts, done.executions) == ("succeeded", 0, 2)


async def test_a_fake_provider_wants_credentials_unless_it_says_otherwise(make):
    with FakeProvider("github") as fake, FakeProvider("github", anonymous=True) as public:
        for one, auth in ((fake, "not_connected"), (public, "ok")):
            app = make(providers=[one.provider])
            key = f"github/{auth}"
            await app.enqueue(me, resource_key=key)
            await app.worker().drain()
            assert (await app.resources.get(key)).auth == auth
        assert not fake.log.api
        assert public.log.api[0].status != 401


# -- keys for secrets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[], [new_key()]])
async def test_a_worker_without_the_key_refuses_to_start(make, idp, keys):
    app = make()
    idp.access.add("canary")
    await app.connections.add(A, token="canary")
    await app.enqueue(me, resource_key=A)
    wrong = make(secrets=keys)
    with pytest.raises(SetupError, match=r"none of the stored credentials .1. can be read with the keys given .[01].:"):
        await wrong.worker().drain()
    with pytest.raises(SetupError, match="RESILIENT_SECRETS"):
        await wrong.worker().run(signals=False)
    assert await states(app) == {("ready", 0)}
    await app.worker().drain()
    assert await states(app) == {("succeeded", 0)}


async def test_where_some_can_be_read_the_others_wait_uncharged(make, idp):
    idp.access.add("canary")
    old, new = new_key(), new_key()
    await make(secrets=[old]).connections.add(A, token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    app = make(secrets=[new])
    for key in (A, A, "idp/acct-2"):
        job = await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    assert await states(app) == {("ready", 0), ("succeeded", 0)}
    assert (await app.resources.get(A)).auth == "unreadable"
    assert (await app.jobs.get(job.id)).state.value == "succeeded"
    found = {one.name: one for one in await doctor.examine(app.database, keys=app.grants.accounts.ring.key_ids)}
    assert (found["secrets"].level, found["secrets"].message[:6]) == ("fail", "1 of 2")
    both = make(secrets=[new, old])
    await both.grants.keep_house()
    await both.worker().drain()
    assert await states(app) == {("succeeded", 0)}


async def with_others(app):
    """Another process has a worker, which may have other keys."""
    row = workers.Beat("other", "host", 1, ["me"], 4, 0, "1", stopping=False)
    await app.database.transaction(lambda c, d: workers.beat(c, d, row, d.now(c)))


@pytest.mark.parametrize("key", [A, f"{A}/contacts"])
async def test_a_worker_that_lacks_a_key_leaves_the_account_to_others(make, idp, key, caplog):
    """Its gate stays open, nothing is charged, and the worker takes no more jobs of it for a while."""
    idp.access.add("canary")
    old, new = new_key(), new_key()
    await make(secrets=[old]).connections.add(A, token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    told = []
    app = make(secrets=[new], alerts=told.append)
    await with_others(app)
    jobs = [await app.enqueue(me, resource_key=key) for _ in range(40)]
    ended = await app.worker(concurrency=2).drain(timeout=LIMIT)
    assert 0 < ended < 40  # one claim, and no more
    assert await states(app) == {("ready", 0), ("scheduled", 0)}
    assert (await app.resources.get(A)).auth == "ok"
    text = " ".join([(await app.jobs.why(job.id)).text for job in jobs])
    assert "RESILIENT_SECRETS" in text
    await hear(app)
    assert [one.subject for one in await app.alerts.list()] == [A]
    assert caplog.text.count("is left to other workers") == 1
    assert await app.worker().drain(timeout=LIMIT) == 0
    both = make(secrets=[old, new], clock=lambda: datetime.now(UTC) + timedelta(minutes=1))
    if app.database.is_sqlite:  # PostgreSQL's own clock counts: the rest is due within a second
        await both.worker().drain(timeout=LIMIT)
        assert {(await app.jobs.get(job.id)).state for job in jobs} == {"succeeded"}


async def test_who_asks_why_hears_of_the_key_that_the_workers_lack(make, idp):
    """Of every job, also of those that no worker has looked at, and by what on-call asks first."""
    old, new = new_key(), new_key()
    await make(secrets=[old]).connections.add(A, token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    app = make(secrets=[new])
    await with_others(app)
    jobs = [await app.enqueue(me, resource_key=key) for key in (A, f"{A}/contacts") for _ in range(10)]
    await app.worker(concurrency=2).drain(timeout=LIMIT)

    async def answers():
        texts = [str(await app.jobs.why(job.id)) for job in jobs] + [str(await app.resources.why(A))]
        findings = await doctor.examine(app.database, keys=[])  # whoever looks may have other keys than the workers
        return texts, [one.message for one in findings if one.name == "missing_key"]

    texts, findings = await answers()
    assert [text for text in texts if "RESILIENT_SECRETS" not in text or "Nothing stops" in text] == []
    assert findings == [f"1 account is passed over by workers that lack the key of the credentials: {A}"]
    assert (await app.resources.why(A)).reasons[0].code == "missing_key"
    for column, ago in (("last_success_at", 0), ("last_error_at", 20)):  # another worker has the key; long ago
        await app.database.transaction(note, column, timedelta(minutes=ago))
        texts, findings = await answers()
        assert findings == []
        assert texts[-1].startswith(f"Nothing stops {A}.")


def note(c, d, column, ago):
    d.run(c, "UPDATE {resource} SET last_success_at = NULL")
    d.run(c, f"UPDATE {{resource}} SET {column} = :at", {"at": d.now(c) - ago})


async def test_a_worker_that_lacks_the_key_of_thousands_passes_over_all_of_them(make):
    """Else it meets the others every second, and has no slot for jobs that it can run."""
    old, new = new_key(), new_key()
    await make(secrets=[old]).connections.add(A, token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    app = make(secrets=[new])
    await with_others(app)
    missing = app.grants.missing_keys
    assert missing.pause() == 60
    missing.resources.update(f"idp/other-{n}" for n in range(3_000))
    keys = [f"{A}/{n}" for n in range(3)]
    await app.enqueue_many(me, [Item(None, resource_key=key) for key in keys])
    await app.worker().drain(timeout=LIMIT)
    assert missing.resources > {A, *keys}
    assert missing.pause() == pytest.approx(300, abs=1)  # ten a second
    missing.resources.update(str(n) for n in range(10_000))
    assert missing.pause() == 600


async def test_a_gate_that_a_lonely_worker_shut_is_opened_once_others_may_have_the_key(make, idp):
    """Whoever keeps house may lack the key itself."""
    old, new = new_key(), new_key()
    await make(secrets=[old]).connections.add(A, token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    app = make(secrets=[new])
    await app.enqueue(me, resource_key=A)
    await app.worker().drain(timeout=LIMIT)
    await app.grants.keep_house()
    assert (await app.resources.get(A)).auth == "unreadable"
    await with_others(app)
    await app.grants.keep_house()
    assert (await app.resources.get(A)).auth == "ok"


async def test_a_program_hears_that_there_is_no_connection(make):
    with pytest.raises(ConnectionNotFound):
        await make().credentials(A)


@pytest.mark.parametrize("others", [True, False])
async def test_a_missing_key_is_one_line_a_minute_for_all_of_its_accounts(make, caplog, others):
    caplog.set_level("DEBUG", logger="resilient.connections")
    old, older, new = new_key(), new_key(), new_key()
    keys = [f"idp/acct-{n}" for n in range(10, 15)]
    for key in keys:
        await make(secrets=[old]).connections.add(key, token="canary")
    await make(secrets=[older]).connections.add("idp/acct-3", token="canary")
    await make(secrets=[new]).connections.add("idp/acct-2", token="canary")
    app, now = make(secrets=[new]), [0.0]
    app.grants.missing_keys.monotonic = lambda: now[0]
    if others:
        await with_others(app)

    async def warnings(keys):
        caplog.clear()
        for key in keys:
            with pytest.raises(ResourceStopped):
                await app.grants.located(key)
        return [one.args[0] for one in caplog.records if one.levelname == "WARNING"]

    assert await warnings(keys[:3]) == keys[:1]
    assert await warnings([keys[3], "idp/acct-3"]) == ["idp/acct-3"]
    now[0] = 61.0
    assert await warnings(keys[4:]) == keys[4:]
