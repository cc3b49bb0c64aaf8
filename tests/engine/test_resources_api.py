"""`app.resources`: what is stopped, and stopping it; on both databases."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from resilient import (
    BadResourceKey,
    BreakerPolicy,
    Changed,
    Count,
    Failure,
    FailureKind,
    InvalidInput,
    Kind,
    Limit,
    NaiveDatetime,
    Resilient,
)
from resilient.core.gates.admission import stop_of
from resilient.core.gates.breaker import Report
from resilient.core.gates.policy import Policies
from resilient.store.gates import circuits, limits, resources, turns
from resilient.store.gates import controls as gates
from resilient.store.gates.turns import Parking
from resilient.store.inspect import resources as resource_queries
from resilient.store.inspect.resources import RESOURCE
from resilient.surface.cli.output import resource_row

KIND = Kind("mail.send")


@pytest.fixture
async def app(database):
    app = Resilient(
        database,
        kinds=[KIND],
        limits={"github/*": [Limit(60, per=60)]},
        concurrency={"github": 3},
        upgrade=False,
    )
    yield app
    await app.close()


@pytest.fixture
def use(app):
    """Resources in use, with so many ready jobs each."""

    async def put(**jobs):
        for name, count in jobs.items():
            key = name.replace("__", "/")
            app.database.transaction_sync(resources.ensure, [key])
            if count:
                await app.enqueue_many(KIND, [None] * count, resource_key=key)

    return put


@pytest.fixture
def park(app):
    """The turns of these keys wait on a resource."""

    def put(on, *keys):
        def run(c, d):
            far = d.now(c) + timedelta(hours=1)
            facts = resources.read(c, d, [on])
            judged = {on: facts[on].revision}
            turns.take(c, d, turns.Selection(1000))
            turns.park(c, d, [Parking(key, 0, on, far, far) for key in keys], judged)

        app.database.transaction_sync(run)

    return put


def taken(app):
    return {t.resource_key for t in app.database.transaction_sync(turns.take, turns.Selection(1000))}


def stop(app, key):
    def run(c, d):
        facts = resources.read(c, d, [key])
        return stop_of(facts[key], d.now(c)) if key in facts else None

    found = app.database.transaction_sync(run)
    return found and found.gate


# -- looking ---------------------------------------------------------------------------------------------------------


async def test_get_counts_what_waits_and_runs_at_or_below(app, use):
    await use(github=0, github__a=2, github__a__search=3, github__ab=4)
    info = await app.resources.get("github/a")
    assert (info.waiting, info.running, info.gate, info.breaker) == (5, 0, None, "closed")
    assert (await app.resources.get("github")).waiting == 9
    assert info.created_at is not None
    unused = await app.resources.get("gitlab/x")
    assert (unused.created_at, unused.waiting, unused.auth) == (None, 0, "ok")
    with pytest.raises(BadResourceKey):
        await app.resources.get("no spaces")


async def test_list_by_pattern_gate_and_page(app, use):
    await use(github=0, github__a=0, github__b=0, gitlab__a=0)
    await app.resources.pause("github/b", reason="why not")
    await app.resources.open("gitlab/a")
    assert [r.key for r in await app.resources.list()] == ["github", "github/a", "github/b", "gitlab/a"]
    assert [r.key for r in await app.resources.list(limit=2, after="github/a")] == ["github/b", "gitlab/a"]
    assert [r.key for r in await app.resources.list("github/*")] == ["github/a", "github/b"]
    assert [r.key for r in await app.resources.list(gate="any")] == ["github/b", "gitlab/a"]
    paused = (await app.resources.list(gate="pause"))[0]
    assert (paused.key, paused.gate, paused.code) == ("github/b", "pause", "why not")
    assert [r.key for r in await app.resources.list("github/*", gate="breaker")] == []
    for wrong in ({"gate": "limit"}, {"limit": 0}):
        with pytest.raises(InvalidInput):
            await app.resources.list(**wrong)


async def test_an_error_stands_beside_the_circuit_it_opened_and_no_other_gate(clock, app, use):
    await use(github__a=1, github__b=1, github__c=1)

    def fail(count):
        failures = circuits.Evidence(
            "github/a",
            Report(0, failed=count, trailing=count, children_failed=frozenset(".")),
            Failure(FailureKind.TRANSIENT, status=500),
        )
        return lambda c, d: circuits.report_if_current(c, d, [failures], Policies(), lambda: 0.5)

    def cool(c, d):
        gates.cool_down(c, d, "github/a", d.now(c) + timedelta(seconds=5), "http_429", 0.0, exact=True)
        gates.open_(c, d, "github/b", reason="incident 7")
        gates.close(c, d, "github/b")
        gates.cool_down(c, d, "github/b", d.now(c) + timedelta(seconds=5), "http_429", 0.0, exact=True)

    app.database.transaction_sync(fail(2))  # too few to open it
    clock.advance(1)
    app.database.transaction_sync(cool)
    (group,) = await app.resources.summary()
    assert (group.gate, group.code, group.last_error, group.reason) == ("cooldown", "http_429", None, None)
    infos = {info.key: info for info in await app.resources.list("github/*")}
    assert resource_row(infos["github/a"], clock.now()).remark == ""
    clock.advance(60)
    app.database.transaction_sync(fail(5))
    (group,) = await app.resources.summary()
    assert (group.gate, group.last_error) == ("breaker", "HTTP 500")


async def test_the_summary_groups_by_provider_gate_and_code(clock, app, use):
    await use(github__a=3, github__b=5, github__c=0, hubspot__a=1, gitlab__a=7)
    until = clock.now() + timedelta(minutes=5)

    def throttle(c, d):
        for key, seconds in (("github/a", 0), ("github/b", 60)):
            gates.cool_down(c, d, key, until + timedelta(seconds=seconds), "http_429", 0.0, exact=True)

    app.database.transaction_sync(throttle)
    await app.resources.pause("github/c", reason="x")
    clock.advance(10)
    app.database.transaction_sync(gates.set_auth, "hubspot/a", "needs_reauth")
    groups = await app.resources.summary()
    assert [(g.provider, g.gate, g.code, g.resources, g.waiting) for g in groups] == [
        ("github", "cooldown", "http_429", 2, 8),
        ("hubspot", "auth", "needs_reauth", 1, 1),
        ("github", "pause", None, 1, 0),
    ]
    cooldown = groups[0]
    assert (cooldown.since, cooldown.until) == (
        clock.now() - timedelta(seconds=10),
        until + timedelta(seconds=60),
    )
    assert (cooldown.first_until, cooldown.reason, groups[2].reason) == (until, None, "x")
    assert cooldown.example == "github/b"
    assert (await app.jobs.get(cooldown.example_job)).resource_key == "github/b"
    assert groups[1].until is None
    assert cooldown.to_json()["waiting"] == 8


async def test_waiting_is_counted_up_to_a_bound(app, use):
    await use(github__a=5, github__a__search=4)
    counts = app.database.transaction_sync(resource_queries.waiting, ["github/a", "github/b"], limit=9)
    assert counts == {"github/a": 9, "github/b": 0}
    capped = app.database.transaction_sync(resource_queries.waiting, ["github/a"], limit=3)["github/a"]
    assert (capped.more, str(capped)) == (True, "3+")


async def test_why(app, use):
    await use(github__a=2)
    await app.resources.open("github", reason="incident 7", until=timedelta(hours=1))
    why = await app.resources.why("github/a")
    assert (why.state, why.waiting, [r.code for r in why.reasons]) == (
        "stopped",
        2,
        ["breaker", "waiting", "no_worker"],
    )
    assert "The circuit of github was opened by hand (incident 7)" in why.text
    assert why.until is not None
    assert (await app.resources.why("other")).state == "open"


# -- stopping and letting go -----------------------------------------------------------------------------------------


async def test_pause_and_resume(app, use, park):
    await use(github=0, github__a=1)
    assert await app.resources.pause("github", reason="r") == Changed(("github",))
    park("github", "github/a")
    assert (stop(app, "github"), taken(app)) == ("pause", set())
    assert await app.resources.resume("github") == Changed(("github",))
    assert (stop(app, "github"), taken(app)) == (None, {"github/a"})


@pytest.mark.parametrize("reason", ["a\0b", "\ud800"])
@pytest.mark.parametrize("action", ["pause", "open"])
async def test_a_reason_that_no_database_stores_is_refused(app, action, reason):
    with pytest.raises(InvalidInput, match="reason has a character that no database stores"):
        await getattr(app.resources, action)("github/a", reason=reason)
    assert await app.resources.list() == []


async def test_a_pause_ends_by_itself(clock, app):
    await app.resources.pause("github/a", until=timedelta(minutes=5))
    await app.resources.pause("github/b", until=clock.now() + timedelta(minutes=5))
    assert (stop(app, "github/a"), stop(app, "github/b")) == ("pause", "pause")
    clock.advance(301)
    assert (stop(app, "github/a"), stop(app, "github/b")) == (None, None)


async def test_open_and_close(app, use, park):
    await use(github__a=1)
    await app.resources.open("github/a", reason="r")
    park("github/a", "github/a")
    assert stop(app, "github/a") == "breaker"
    assert (await app.resources.get("github/a")).code == "isolated"
    await app.resources.close("github/a")
    assert (stop(app, "github/a"), taken(app)) == (None, {"github/a"})


async def test_reset_ends_whatever_can_be_ended_by_hand(app, use, park):
    await use(github__a=1)
    await app.resources.pause("github/a")
    await app.resources.open("github/a")
    app.database.transaction_sync(gates.cool_down, "github/a", datetime(2199, 1, 1, tzinfo=UTC), "http_429", 0.0)
    app.database.transaction_sync(gates.set_auth, "github/a", "needs_reauth")
    park("github/a", "github/a")
    await app.resources.reset("github/a")
    assert stop(app, "github/a") == "auth"
    app.database.transaction_sync(gates.set_auth, "github/a", "ok")
    assert stop(app, "github/a") is None


async def test_reset_forgets_what_answers_said_is_left(app, clock):
    """Of a declared limit, of one that nobody declared, of a named budget; what was drawn is not forgotten."""
    declared, core, now = Limit(60, per=60), Limit.stated("core", 100, 86_400), clock.now().timestamp()
    places = [("github/a", declared), ("github/a", core), ("github/a/budget:search", core)]
    app.database.transaction_sync(resources.ensure, [key for key, _ in places])
    said = [limits.Observation(key, limit, 1, now + 86_400, now) for key, limit in places]
    app.database.transaction_sync(limits.observe, said)
    for place in places:
        app.database.transaction_sync(limits.draw, [limits.Ask((place,))])
    assert "used up until" in (await app.resources.why("github/a")).text
    await app.resources.reset("github/a")
    app.database.transaction_sync(limits.observe, [replace(one, sent_at=now - 1) for one in said])  # it was on its way
    asked = app.database.transaction_sync(limits.draw, [limits.Ask((place,), patience=2) for place in places])
    assert [one.draw.granted for one in asked] == [True] * 3
    assert asked[0].draw.wait == pytest.approx(declared.interval), "as if it had just been used up"
    assert (await app.resources.why("github/a")).until < clock.now() + timedelta(seconds=2)


@pytest.mark.parametrize(
    ("until", "error"),
    [
        (timedelta(seconds=-1), InvalidInput),
        (datetime(2000, 1, 1, tzinfo=UTC), InvalidInput),
        (datetime(2199, 1, 1), NaiveDatetime),  # noqa: DTZ001
    ],
)
async def test_an_end_that_cannot_be_meant(app, until, error):
    for call in (app.resources.pause, app.resources.open):
        with pytest.raises(error, match="until="):
            await call("github/a", until=until)
    assert stop(app, "github/a") is None


@pytest.mark.parametrize("pattern", [None, 5, b"a/*"])
def test_a_pattern_that_is_no_text(pattern):
    with pytest.raises(BadResourceKey, match="is not a resource pattern"):
        Resilient("sqlite:///never.db", limits={pattern: [Limit(1, per=1)]})


@pytest.mark.parametrize("text", ["a\0", "\ud800"])
async def test_what_no_database_can_be_asked_for_is_refused(app, text):
    calls = (
        lambda: app.resources.list(after=text),
        lambda: app.connections.list(after=text),
        lambda: app.connections.list(text),
        lambda: app.streams.list(text),
        lambda: app.streams.list(part=text),
        lambda: app.streams.reset("contacts", reason=text),
        lambda: app.audit.list(who=text),
        lambda: app.audit.list(subject=text),
    )
    for call in calls:
        with pytest.raises(InvalidInput, match="has a character that no database stores"):
            await call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": "x"}, r"app.resources.pause\(limit=...\) takes"),
        ({"stopped_after": 5}, r"app.resources.pause\(stopped_after=...\) takes"),
        ({"stopped_before": "x"}, r"app.resources.pause\(stopped_before=...\) takes"),
    ],
)
async def test_a_bound_of_a_wrong_type_is_named(app, options, words):
    with pytest.raises(InvalidInput, match=words):
        await app.resources.pause("github/*", gate="any", **options)


async def test_what_is_cleared_may_be_one_word(app):
    await app.resources.limit("github/a", limits=["5/s"])
    await app.resources.limit("github/a", clear="limits")
    with pytest.raises(InvalidInput, match=r"nothing to clear is called \['limits'\]"):
        await app.resources.limit("github/a", clear=[["limits"]])


# -- by pattern ------------------------------------------------------------------------------------------------------


async def test_a_pattern_means_existing_resources_and_a_gate_narrows_it(app, use, monkeypatch):
    monkeypatch.setattr(resource_queries, "KEYS_PAGE", 2)
    await use(github__a=0, github__b=0, github__c=0, gitlab__a=0)
    all_three = Changed(("github/a", "github/b", "github/c"))
    assert await app.resources.pause("github/*", dry_run=True) == all_three
    assert stop(app, "github/a") is None
    assert await app.resources.pause("github/*") == all_three
    assert stop(app, "gitlab/a") is None
    await app.resources.resume("github/b")
    assert await app.resources.resume("github/*") == Changed(("github/a", "github/c"))
    assert await app.resources.close("github/*") == Changed()
    assert len(await app.resources.reset("**", dry_run=True)) == 0
    with pytest.raises(BadResourceKey):
        await app.resources.pause("git hub/*")


@pytest.mark.parametrize("many", [False, True])
async def test_a_pattern_binds_keys_that_only_have_jobs(app, use, many):
    """Keys of jobs that no worker has looked at yet: paused by pattern, they must not run either."""
    await use(r__used=1)
    for key, options in (("r/1", {}), ("r/2", {"delay": 60}), ("r/3", {"ordering_key": "o"}), ("s/1", {})):
        await app.enqueue_many(KIND, [None] * (60 if many else 2), resource_key=key, **options)
    later = ("r/1", "r/2", "r/3")
    meant = Changed((*later, "r/used"), later)
    assert await app.resources.pause("r/*", dry_run=True) == meant
    assert (await app.resources.pause("r/*", dry_run=True, limit=2)).keys == ("r/1", "r/used")
    assert (await app.resources.pause("r/*", gate="breaker")).keys == ()  # those that a gate stops: none
    assert await app.resources.pause("r/*") == meant
    assert [stop(app, key) for key in (*later, "s/1")] == ["pause"] * 3 + [None]
    assert await app.resources.pause("r/*") == Changed(meant.keys)  # by now they have a row
    assert await app.resources.pause("?", dry_run=True) == Changed(("r", "s"), ("r", "s"))  # what is above
    assert await app.resources.pause("s/**", dry_run=True) == Changed(("s/1",), ("s/1",))


async def test_those_stopped_in_a_time(clock, app, use):
    await use(github__a=0, github__b=0, github__c=0, github__d=0)
    for key, call in (("a", app.resources.open), ("b", app.resources.pause), ("c", app.resources.open)):
        await call(f"github/{key}")
        clock.advance(minutes=10)
    dry = {"dry_run": True}
    assert (await app.resources.reset("github/*", **dry)).keys == ("github/a", "github/b", "github/c")
    early = await app.resources.reset("github/*", stopped_before=timedelta(minutes=15), **dry)
    assert early.keys == ("github/a", "github/b")
    late = await app.resources.close("github/*", stopped_after=clock.now() - timedelta(minutes=15), **dry)
    assert late.keys == ("github/c",)
    assert (await app.resources.pause("github/*", stopped_after=timedelta(minutes=25), **dry)).keys == (
        "github/b", "github/c",
    )  # fmt: skip
    assert (await app.resources.reset("github/*", limit=2)).keys == ("github/a", "github/b")
    assert (await app.resources.reset("github/*", stopped_before=timedelta(hours=1))).keys == ()
    assert stop(app, "github/c") is not None


async def test_a_rate_spreads_the_changes_and_what_changed_meanwhile_is_left_alone(app, use, monkeypatch):
    await use(github__a=0, github__b=0, github__c=0)
    await app.resources.open("github/*")
    rests = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(rests))
    monkeypatch.setattr("resilient.engine.gates.api.time", clock)

    async def sleep(seconds):
        rests.append(seconds)
        if len(rests) == 1:
            assert [stop(app, f"github/{k}") is None for k in "abc"] == [True, False, False]
            app.sync.resources.close("github/b")
            app.sync.resources.pause("github/b")  # not what a close would be for

    monkeypatch.setattr("resilient.engine.ground.sessions.asyncio", SimpleNamespace(sleep=sleep))
    assert await app.resources.close("github/*", rate="30/min") == Changed(("github/a", "github/c"))
    assert rests == pytest.approx([2.0, 2.0])
    assert stop(app, "github/b") == "pause"


def test_a_rate_in_a_synchronous_program(app, monkeypatch):
    for key in "abc":
        app.sync.resources.pause(f"github/{key}")
    rests = []
    monkeypatch.setattr("resilient.engine.ground.sessions.time", SimpleNamespace(sleep=rests.append))
    assert len(app.sync.resources.resume("github/*", rate=1)) == 3
    assert len(rests) == 2
    assert 0.5 < rests[0] <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0}, "rate"),
        ({"limit": 0}, "limit=0: at least 1"),
        ({"stopped_before": datetime(2030, 1, 1)}, "stopped_before=.* has no time zone"),  # noqa: DTZ001
    ],
)
async def test_bounds_that_cannot_be_meant(app, use, options, words):
    await use(github__a=0)
    with pytest.raises(InvalidInput, match=words):
        await app.resources.pause("github/*", **options)
    assert stop(app, "github/a") is None


async def test_a_gate_narrows_a_key_too(app, use):
    await use(github__a=0, github__b=0)
    await app.resources.pause("github/a")
    await app.resources.open("github/a")
    for key, gate in (("github/b", "breaker"), ("github/b", "any"), ("github/new", "pause"), ("github/a", "cooldown")):
        for change in (app.resources.pause, app.resources.open, app.resources.reset):
            for dry_run in (True, False):
                assert await change(key, gate=gate, dry_run=dry_run) == Changed()
    assert [stop(app, key) for key in ("github/a", "github/b", "github/new")] == ["breaker", None, None]
    assert await app.resources.reset("github/a", gate="pause", dry_run=True) == Changed(("github/a",))
    assert await app.resources.reset("github/a", gate="pause") == Changed(("github/a",))
    assert stop(app, "github/a") is None  # all of it: the gate says which resources are meant
    with pytest.raises(InvalidInput, match="'door' is not a gate"):
        await app.resources.pause("github/a", gate="door")
    for change in (app.resources.resume, app.resources.close, app.resources.reset):
        assert await change("github/a") == Changed(("github/a",))  # without one a key is changed whatever stops it
    assert await app.resources.reset("github/*", gate=None, dry_run=True) == Changed(("github/a", "github/b"))


async def test_of_a_key_a_gate_is_looked_at_once_more_before_the_change(app, use, monkeypatch):
    await use(github__a=0)
    await app.resources.open("github/a")
    real = app.resources._db.write

    async def write(*args, **options):
        app.sync.resources.close("github/a")
        return await real(*args, **options)

    monkeypatch.setattr(app.resources._db, "write", write)
    assert await app.resources.pause("github/a", gate="breaker") == Changed()
    assert stop(app, "github/a") is None


async def test_bounds_that_are_none_do_not_narrow_a_key(app):
    none = {"limit": None, "stopped_after": None, "stopped_before": None, "rate": None}
    assert await app.resources.pause("github/a", **none) == Changed(("github/a",))
    assert stop(app, "github/a") == "pause"


async def test_bounds_need_a_pattern_and_a_rate_its_own_transactions(app, database):
    with pytest.raises(InvalidInput, match="limit= narrows a pattern; 'github/a' is one key"):
        await app.resources.pause("github/a", limit=1)
    with database.sync_engine.connect() as c, c.begin(), pytest.raises(InvalidInput, match="leave out session="):
        app.sync.resources.pause("github/*", rate=1, session=c)


# -- limits ----------------------------------------------------------------------------------------------------------


async def test_limits_are_overridden_per_resource_and_dropped_again(app):
    def policy(info):
        return app.policies.for_key(info.key, info.policy)

    await app.resources.limit("github/a", limits=["100/min"], concurrency=2)
    info = await app.resources.get("github/a")
    assert [x.name for x in policy(info).limits] == ["100/60s"]
    assert policy(info).concurrency == 2
    await app.resources.limit("github/a", concurrency=None, breaker={"streak": 9})
    await app.resources.limit("github/a", breaker={"window": 5})
    info = await app.resources.get("github/a")
    assert (policy(info).concurrency, policy(info).breaker) == (None, BreakerPolicy(streak=9, window=5))
    assert [x.name for x in policy(info).limits] == ["100/60s"]
    await app.resources.limit("github/a", clear=["limits"])
    assert [x.name for x in policy(await app.resources.get("github/a")).limits] == ["60/60s"]
    await app.resources.limit("github/a", limits=None)
    assert policy(await app.resources.get("github/a")).limits == ()
    await app.resources.limit("github/a", breaker=BreakerPolicy(streak=2))
    assert policy(await app.resources.get("github/a")).breaker == BreakerPolicy(streak=2)
    await app.resources.limit("github/a", clear=True)
    assert (await app.resources.get("github/a")).policy is None


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"limits": ["many"]}, {"concurrency": 0}, {"breaker": {"colour": 1}}, {"breaker": {"window": -1}},
        {"clear": ["colour"]}, {"limits": ["1/s", "1/s"]},
    ],
)  # fmt: skip
async def test_a_wrong_policy_changes_nothing(app, wrong):
    with pytest.raises(InvalidInput):
        await app.resources.limit("github/a", **wrong)
    assert (await app.resources.get("github/a")).policy is None


async def test_a_wider_limit_releases_what_waited_for_the_old_one(app, use, park):
    await use(github__a=1)
    park("github/a", "github/a")
    await app.resources.limit("github/a", concurrency=9)
    assert taken(app) == {"github/a"}


# -- the caller's transaction and the synchronous face ----------------------------------------------------------------


async def test_in_the_caller_s_transaction_and_synchronously(app, database, use):
    await use(github__a=2)
    sync = app.sync.resources
    with contextlib.closing(Session(database.sync_engine)) as session:
        sync.pause("github/a", session=session)
        assert sync.get("github/a", session=session).gate == "pause"
        session.rollback()
    assert sync.get("github/a").gate is None
    sync.open("github/a")
    assert (sync.why("github/a").state, len(sync.summary()), len(sync.list())) == ("stopped", 1, 1)
    sync.close("github/a")
    sync.limit("github/a", concurrency=1)
    assert sync.reset("github/*") == sync.resume("github/*") == Changed()


async def test_counts_print_their_bound():
    assert f"{Count(10_000, more=True)}" == "10000+"


async def test_a_resource_row_stays_as_it_is_when_only_looked_at(app, use, read_all):
    await use(github__a=1)
    before = read_all("SELECT * FROM {resource}")
    await app.resources.summary()
    await app.resources.why("github/a")
    await app.resources.get("github/a")
    assert read_all("SELECT * FROM {resource}") == before
    assert sa.inspect(app.database.sync_engine).has_table(RESOURCE.name)
