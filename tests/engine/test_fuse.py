"""Many grants that die at once: nobody is marked, nobody is told, until a probe or an operator decides."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from datetime import UTC, datetime, timedelta

import pytest
from uuid_utils.compat import uuid7

from resilient import Credentials, GrantState, Job, NeedsReauth, Provider, Resilient, ResourceStopped, handler
from resilient.core.base.errors import Failure, FailureKind
from resilient.engine import alerts
from resilient.engine.jobs import queue
from resilient.store.accounts import fuse, grants
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import controls as gates
from tests import nursery
from tests.helpers import LIMIT, hear
from tests.idp import me

KEY = new_key()
SIX = 6


@handler("customers.tell")
async def tell_customer(job: Job[NeedsReauth]) -> str:
    return job.payload.resource_key


@pytest.fixture
async def make(database_url, idp):
    made = []

    def make_(**options):
        options = {"secrets": [KEY], "providers": [idp.provider()], "on_needs_reauth": tell_customer, **options}
        app = Resilient(database_url, handlers=[me, tell_customer], **options)
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


@pytest.fixture
def told():
    return []


@pytest.fixture
def app(make, told, monkeypatch):
    monkeypatch.setattr(alerts, "FLUSH_EVERY", 3600.0)  # a real second is soon over: `hear` says when
    return make(alerts=told.append)


def keys(count, start=1):
    return [f"idp/acct-{n}" for n in range(start, start + count)]


async def connect(app, idp, names, *, expired=True):
    at = datetime.now(UTC) + timedelta(seconds=-5 if expired else 7200)
    for key in names:
        access, refresh = idp.issue()
        await app.connections.import_(key, access_token=access, refresh_token=refresh, expires_at=at)
    await have_worked(app)


async def have_worked(app):
    """The provider has taken the credentials of every account before: only such deaths are counted."""
    await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {grant} SET worked_at = :now WHERE worked_at IS NULL", {"now": d.now(c)})
    )


async def use(app, names):
    for key in names:
        with pytest.raises(ResourceStopped):
            await app.credentials(key)


async def states(app):
    return [one.state.value for one in await app.connections.list("idp")]


async def auths(app, names):
    return [(await app.resources.get(key)).auth for key in names]


async def a_minute_later(app):
    """The gate shut a minute ago; what a worker's housekeeping does then."""
    ago = "UPDATE {resource} SET auth_since = :ago_at WHERE key = 'idp'"
    chore = "UPDATE {schedule} SET next_at = :ago_at WHERE name = 'engine:credentials:idp'"
    at = datetime.now(UTC) - timedelta(seconds=61)
    for statement in (ago, chore):
        await app.database.transaction(lambda c, d, s=statement: d.run(c, s, {"ago_at": at}))
    await app.grants.fuse.keep_house()


async def blow(app, idp, count=SIX, *, others=0):
    """``count`` accounts whose refresh tokens are refused, and some that are well; the fuse has blown."""
    names = keys(count)
    await connect(app, idp, names)
    good, idp.refresh = idp.refresh, {}
    if others:
        await connect(app, idp, keys(others, 100), expired=False)
    await use(app, names)
    assert await auths(app, ["idp"]) == ["suspect_auth"]
    return names, good


async def test_five_dead_accounts_are_believed(app, idp, told):
    names = keys(5)
    await connect(app, idp, names)
    idp.refresh.clear()
    await use(app, names)
    assert await states(app) == ["needs_reauth"] * 5
    assert await auths(app, ["idp", *names]) == ["ok", *["needs_reauth"] * 5]
    await hear(app)
    assert sorted(n.alert.subject for n in told) == names
    assert await app.jobs.count(kind="customers.tell") == 5


async def test_the_sixth_holds_all_marks_back_and_nobody_is_told(app, idp, told):
    names, _ = await blow(app, idp)
    assert await states(app) == ["suspect"] * SIX
    assert await auths(app, names) == ["ok"] * SIX
    await hear(app)
    assert [(n.alert.subject, n.alert.detail["auth"]) for n in told] == [("idp", "suspect_auth")]
    assert "release" in told[0].text
    assert await app.jobs.count(kind="customers.tell", state="cancelled") == 5
    assert await app.jobs.count(kind="customers.tell") == 5
    await connect(app, idp, keys(2, 50))
    await use(app, keys(2, 50))
    assert len(idp.asked) == SIX  # the others are not even asked
    assert (await states(app)).count("active") == 2


async def test_a_mark_and_who_is_told_of_it_are_one_transaction(app, idp, monkeypatch):
    """A customer's job is never lost beside a mark, and never there without one."""
    (key,) = keys(1)
    await connect(app, idp, [key])
    idp.refresh.clear()

    def broken(*_):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(queue, "write", broken)
    with pytest.raises(RuntimeError):
        await app.credentials(key)
    assert await states(app) == ["refreshing"]
    assert await auths(app, [key]) == ["ok"]
    assert await app.alerts.list() == []
    monkeypatch.undo()
    monkeypatch.setattr(grants, "LAST_CALL", 0.3)
    over = "UPDATE {grant} SET lease_until = :over_at"
    await app.database.transaction(lambda c, d: d.run(c, over, {"over_at": d.now(c)}))
    app.grants.accounts.forget()
    await use(app, [key])
    assert await states(app) == ["needs_reauth"]
    assert [one.subject for one in await app.alerts.list()] == [key]
    (job,) = await app.jobs.list()
    assert (job.kind, job.payload["resource_key"], job.payload["code"]) == ("customers.tell", key, "invalid_grant")


async def test_a_worker_that_cannot_probe_goes_on_with_its_chores(app, make, idp, caplog):
    await blow(app, idp, others=1)
    blind = make(secrets=[])
    await a_minute_later(blind)
    assert "cannot find out whether idp is well" in caplog.text
    assert await auths(app, ["idp"]) == ["suspect_auth"]


async def test_its_healthy_accounts_wait_too_and_lose_nothing(app, idp):
    await blow(app, idp, others=1)
    await app.enqueue(me, resource_key="idp/acct-100")
    await app.worker().drain()
    (job,) = await app.jobs.list(kind="me")
    assert (job.state.value, job.attempts) == ("ready", 0)
    await app.connections.release("idp")
    await app.worker().drain()
    assert (await app.jobs.get(job.id)).state.value == "succeeded"


async def test_a_suspect_that_lives_after_all_acquits_the_others(app, idp):
    names, good = await blow(app, idp)
    await app.grants.fuse.keep_house()
    assert len(idp.asked) == SIX  # not yet: the trouble has only just begun
    idp.refresh = good
    await a_minute_later(app)
    assert await states(app) == ["active"] * SIX
    assert await auths(app, ["idp", *names]) == ["ok"] * (SIX + 1)
    assert (await app.credentials(names[0])).token
    assert await app.jobs.count(kind="customers.tell", state=["scheduled", "ready"]) == 0


async def test_a_provider_that_is_well_and_still_refuses_them_is_believed(app, idp, told):
    names, _ = await blow(app, idp, others=2)
    await a_minute_later(app)
    assert sorted(await states(app)) == ["active"] * 2 + ["needs_reauth"] * SIX
    assert await auths(app, ["idp", *names]) == ["ok", *["needs_reauth"] * SIX]
    await hear(app)
    assert sorted(key for n in told for key in (n.alert.subject, *n.others)) == ["idp", *names]
    assert await app.jobs.count(kind="customers.tell", state="scheduled") == SIX
    await connect(app, idp, names[:1], expired=False)
    assert (await app.credentials(names[0])).token
    await use(app, names[1:2])


async def test_where_nobody_is_well_the_question_stays_open(app, idp):
    await blow(app, idp)
    asked = len(idp.asked)
    await a_minute_later(app)
    assert len(idp.asked) == asked + 3
    assert await states(app) == ["suspect"] * SIX
    await app.grants.fuse.keep_house()  # the next probe is not due
    assert len(idp.asked) == asked + 3


async def test_a_suspect_that_cannot_be_read_keeps_no_other_from_acquitting_them(app, idp):
    _, good = await blow(app, idp)
    first = (await app.database.transaction(fuse.suspects, "idp"))[0]
    spoil = "UPDATE {grant} SET secrets = 'v1:spoilt' WHERE id = :id"
    await app.database.transaction(lambda c, d: d.run(c, spoil, {"id": d.id(first)}))
    idp.refresh = good
    await a_minute_later(app)
    assert await states(app) == ["active"] * SIX


async def test_a_provider_whose_probe_breaks_keeps_no_other_from_its_turn(make, idp, monkeypatch, caplog):
    app = make(providers=[Provider(name="aaa"), idp.provider()])
    _, good = await blow(app, idp)
    await app.database.transaction(lambda c, d: gates.set_auth(c, d, "aaa", "suspect_auth"))
    ago = "UPDATE {resource} SET auth_since = :ago_at WHERE key = 'aaa'"
    await app.database.transaction(lambda c, d: d.run(c, ago, {"ago_at": datetime.now(UTC) - timedelta(seconds=61)}))
    probe = app.grants.fuse._probe_provider

    async def breaks(name, facts):
        if name == "aaa":
            raise KeyError("canary-secret")
        await probe(name, facts)

    monkeypatch.setattr(app.grants.fuse, "_probe_provider", breaks)
    idp.refresh = good
    await a_minute_later(app)
    assert await states(app) == ["active"] * SIX
    assert "cannot find out whether aaa is well again (KeyError)" in caplog.text
    assert "canary-secret" not in caplog.text


async def test_an_outage_during_the_probe_decides_nothing(app, idp):
    await blow(app, idp, others=1)
    idp.script = ["down"] * 4
    await a_minute_later(app)
    assert sorted(await states(app)) == ["active", *["suspect"] * SIX]
    assert await auths(app, ["idp"]) == ["suspect_auth"]


async def test_keys_cannot_be_probed_so_an_operator_decides(app, idp):
    for key in keys(SIX):
        await app.connections.add(key, token=f"canary-{key}")
        await app.enqueue(me, resource_key=key)
    await have_worked(app)
    await app.worker().drain()
    assert await states(app) == ["suspect"] * SIX
    await a_minute_later(app)
    assert await states(app) == ["suspect"] * SIX
    assert await app.connections.confirm("idp") == SIX
    assert await states(app) == ["needs_reauth"] * SIX
    assert await auths(app, ["idp", *keys(SIX)]) == ["ok", *["needs_reauth"] * SIX]
    assert await app.connections.confirm("idp") == 0
    assert await app.jobs.count(kind="customers.tell", state="scheduled") == SIX


async def test_a_suspect_that_is_authorised_again_is_none_any_more(app, idp):
    names, _ = await blow(app, idp)
    await connect(app, idp, names[:1], expired=False)
    assert await app.connections.release("idp") == SIX - 1
    assert await states(app) == ["active"] * SIX


def insert(c, d, count, **changes):
    """Grants without secrets, as many as it takes."""
    for number in range(count):
        grant = grants.new(uuid7(), "idp/x", "oauth2", d.now(c))
        grants.insert_if_new(c, d, grant, None)
        grants.write(c, d, grant.id, d.now(c), **{"worked_at": d.now(c), **changes})
        assert number < count
    return grant


class Silent:
    def tell(self, c, d, dead):
        pass

    def hush(self, c, d, provider, keys):
        pass


def test_two_per_cent_of_many_are_believed(database):
    def run(c, d):
        insert(c, d, 295)
        return [fuse.die_if_version(c, d, insert(c, d, 1), "dead", Silent()).blown for _ in range(8)]

    assert database.transaction_sync(run) == [False] * 6 + [True, False]


def test_deaths_long_ago_do_not_count(database):
    def run(c, d):
        insert(c, d, 9, state="needs_reauth", died_at=d.now(c) - timedelta(minutes=10, seconds=1))
        return fuse.die_if_version(c, d, insert(c, d, 1), "dead", Silent())

    death = database.transaction_sync(run)
    assert (death.died, death.blown, death.grant.state) == (True, False, GrantState.NEEDS_REAUTH)


def test_the_sixth_sees_a_fifth_that_is_not_committed_yet(postgres_database):
    """Two at once, each the fifth by what is committed: without their common lock both would be believed."""
    database, inside, go = postgres_database, threading.Event(), threading.Event()

    class Slow(Silent):
        def tell(self, c, d, dead):  # noqa: ARG002 - a DeathListener
            inside.set()
            assert go.wait(LIMIT)

    def prepare(c, d):
        insert(c, d, 4, state="needs_reauth", died_at=d.now(c))
        return insert(c, d, 1), insert(c, d, 1)

    fifth, sixth = database.transaction_sync(prepare)
    deaths = []

    def die(grant, voice):
        deaths.append(database.transaction_sync(fuse.die_if_version, grant, "dead", voice))

    threads = [threading.Thread(target=die, args=(fifth, Slow())), threading.Thread(target=die, args=(sixth, Silent()))]
    threads[0].start()
    assert inside.wait(LIMIT)
    threads[1].start()
    threads[1].join(0.3)
    assert not deaths
    go.set()
    for thread in threads:
        thread.join(LIMIT)
    assert [death.blown for death in deaths] == [False, True]
    assert database.transaction_sync(lambda c, d: len(fuse.suspects(c, d, "idp"))) == SIX
    assert database.transaction_sync(gates.auth_of, "idp") == "suspect_auth"


CHILD = """
import asyncio, sys
from resilient import OAuth2, Provider, Resilient, ResourceStopped, Rotation, handler

url, server, key, secret, *names = sys.argv[1:]
oauth = OAuth2(token_url=server + "/token", client_id="app", client_secret=secret, rotation=Rotation.SINGLE_USE)
provider = Provider(name="idp", base_url=server, auth=(oauth,))

async def use(app, name):
    try:
        await app.credentials(name)
    except ResourceStopped:
        return

async def main():
    async with Resilient(url, providers=[provider], secrets=[key]) as app:
        print("up", flush=True)
        sys.stdin.readline()
        await asyncio.gather(*(use(app, name) for name in names))

asyncio.run(main())
"""


async def test_two_processes_blow_it_once_and_mark_nobody(app, database_url, idp):
    names = keys(20)
    await connect(app, idp, names)
    idp.refresh.clear()
    children = [
        nursery.start(
            *(CHILD, database_url, idp.url, KEY, idp.secret, *names[n::2]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for n in range(2)
    ]
    try:
        for child in children:
            assert await asyncio.to_thread(child.stdout.readline) == "up\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        for child in children:
            assert await asyncio.to_thread(child.wait, LIMIT) == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()
    found = await states(app)
    assert "needs_reauth" not in found
    assert found.count("suspect") >= SIX
    assert await auths(app, ["idp", *names]) == ["suspect_auth", *["ok"] * 20]
    (alert,) = await app.alerts.list()
    assert (alert.subject, alert.detail["auth"]) == ("idp", "suspect_auth")


async def test_a_refused_application_heals_by_itself_once_it_is_right(make, idp):
    app = make(providers=[idp.provider(client_secret="canary-wrong")])
    names = keys(3)
    await connect(app, idp, names)
    await use(app, names)
    assert len(idp.asked) == 2  # a witness was asked too; the third knows from the gate
    assert await auths(app, ["idp"]) == ["app_refused"]
    assert await states(app) == ["active"] * 3
    await a_minute_later(app)
    assert await auths(app, ["idp"]) == ["app_refused"]
    healed = make()
    await healed.enqueue(me, resource_key=names[0])
    await a_minute_later(healed)
    assert await auths(healed, ["idp"]) == ["ok"]
    await healed.worker().drain()
    assert [job.state.value for job in await healed.jobs.list(kind="me")] == ["succeeded"]


# -- whose notices are taken back --------------------------------------------------------------------------------------

REFUSED = Failure(FailureKind.AUTH, code="refused", status=401)


@pytest.fixture
def keyed(make, clock):
    """An app on a clock that is moved by hand, whose accounts have tokens that cannot be refreshed."""
    return make(clock=clock.now)


async def kill(app, *names):
    for key in names:
        await app.grants.refused(key, await app.credentials(key), REFUSED)


async def add(app, *names):
    for key in names:
        await app.connections.add(key, token=f"canary-{key}")
    await have_worked(app)


async def notices(app, state):
    jobs = await app.jobs.list(kind="customers.tell", state=state)
    return sorted(job.payload["resource_key"] for job in jobs)


async def test_the_notices_of_accounts_that_stay_dead_are_not_taken_back(keyed, clock):
    early, *names = keys(SIX + 1)
    await add(keyed, early, *names)
    await keyed.resources.pause("connections/idp")
    await kill(keyed, early)
    clock.advance(minutes=20)
    await kill(keyed, *names)
    assert await auths(keyed, ["idp", early]) == ["suspect_auth", "needs_reauth"]
    assert (await notices(keyed, ["scheduled", "ready"]), await notices(keyed, "cancelled")) == ([early], names[:5])
    await keyed.connections.release("idp")
    await keyed.resources.resume("connections/idp")
    clock.advance(minutes=2)
    await keyed.worker().drain(timeout=LIMIT)
    assert await notices(keyed, "succeeded") == [early]


async def test_the_notice_of_a_death_that_nobody_doubts_is_not_taken_back(make, clock, idp):
    """A token that is over by its own word is no provider's error."""
    app, (certain, *names) = make(clock=clock.now), keys(SIX + 1)
    await app.connections.import_(certain, access_token="canary-x", expires_at=clock.now() + timedelta(seconds=60))
    await add(app, *names)
    clock.advance(61)
    with pytest.raises(ResourceStopped):
        await app.credentials(certain)
    await kill(app, *names)
    assert (await notices(app, "scheduled"), await notices(app, "cancelled")) == ([certain], names[:5])
    assert idp.asked == []


@pytest.mark.parametrize("way", ["a new token", "another one's grant", "the app's own table"])
async def test_an_account_that_is_connected_again_in_time_is_not_told(make, keyed, clock, way):
    names = keys(3)
    await add(keyed, *names)
    await kill(keyed, *names[:2])
    assert await notices(keyed, "scheduled") == names[:2]
    if way == "a new token":
        await keyed.connections.add(names[0], token="canary-new")
    elif way == "another one's grant":
        await keyed.connections.add(names[0], grant_of=names[2])
    else:
        await make(clock=clock.now, credentials=Table()).connections.restored(names[0])
    assert (await notices(keyed, "scheduled"), await notices(keyed, "cancelled")) == (names[1:2], names[:1])
    clock.advance(minutes=2)
    await keyed.worker().drain(timeout=LIMIT)
    assert await notices(keyed, "succeeded") == names[1:2]


async def test_none_of_those_that_share_it_is_told_of_a_grant_that_is_good_again(keyed):
    names = keys(3)
    await add(keyed, *names[:2])
    await keyed.connections.add(names[2], grant_of=names[0])
    await kill(keyed, *names[:2])
    assert await notices(keyed, "scheduled") == names
    await keyed.connections.add(names[0], token="canary-new")
    assert (await notices(keyed, "scheduled"), await notices(keyed, "cancelled")) == (names[1:2], [names[0], names[2]])


class Table:
    """An app's own table of tokens."""

    async def load(self, key):
        return Credentials(token=f"canary-{key}", version=1)

    async def save(self, key, version, credentials):  # noqa: ARG002 - the signature
        return True
