"""The gate of a worker on real databases: what it knows, refuses, counts and writes."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import (
    AnswerFacts,
    Batch,
    BreakerPolicy,
    DatabaseUnreachable,
    Failure,
    FailureKind,
    Item,
    Job,
    Limit,
    Provider,
    Resilient,
    ResourceStopped,
    Scope,
    SyncJob,
    Throttled,
    handler,
)
from resilient.core.base.budgets import Budget
from resilient.core.gates.admission import Level, admit
from resilient.core.gates.learnt import Answers
from resilient.core.gates.policy import Policies, Policy, Tenancy
from resilient.core.jobs.outcomes import SUCCEEDED, Deferred, Failed, HandedBack
from resilient.engine.gates.gate import Gate
from resilient.engine.run import execution
from resilient.store.gates import circuits, resources
from resilient.store.gates import controls as gates
from tests.helpers import LIMIT

POLICIES = Policies(limits={"q/*": [Limit(100, 1, burst=100, name="core")]}, concurrency={"p": 5})
OK = AnswerFacts(200)
DOWN = Failure(FailureKind.TRANSIENT, status=503, code="http_503", provider_wide=True)
THROTTLED = Failure(FailureKind.THROTTLED, status=429, code="http_429")


@pytest.fixture
async def make(database):
    """A gate, as a worker of its own has one."""
    made = []

    async def make(owner="w1", **options):
        gate = Gate(database, options.pop("policies", POLICIES), owner=owner, **options)
        await gate.start()
        made.append(gate)
        return gate

    yield make
    for gate in made:
        await gate.close()


@pytest.fixture
async def gate(make):
    return await make()


@pytest.fixture
def statements(database, monkeypatch):
    """The names of the store functions that ran in transactions of their own."""
    seen, real = [], database.transaction

    async def transaction(fn, *args, **kwargs):
        seen.append(fn.__name__)
        return await real(fn, *args, **kwargs)

    monkeypatch.setattr(database, "transaction", transaction)
    return seen


def facts(database, key):
    return database.transaction_sync(circuits.lock, [key])[key]


async def fails(gate, key, count=5, failure=DOWN):
    for _ in range(count):
        await gate.answered(await gate.admit(key), key, AnswerFacts(503), failure)
    await gate.flush()


async def outage(gate, key="p/a"):
    """The circuit of an account and that of its provider open."""
    for other in ("p/x", "p/y"):
        await fails(gate, other, 1)
    await fails(gate, key)


def elect(database, key, owner="w1"):
    """What a claim of one job does to the circuits of its path, and what it tells the worker."""

    def fn(c, d):
        path = [key, *([key.rpartition("/")[0]] if "/" in key else [])]
        found = resources.lock_waiting(c, d, path)
        old = [Level(found[k], Policy(), {}) for k in path]
        verdict = admit(old, 1, d.now(c), owner)
        resources.write_levels(c, d, old, verdict.levels, d.now(c))
        after = {x.facts.key: x.facts for x in verdict.levels}
        return tuple((key, after[key].breaker.generation) for key in verdict.probes), after, d.now(c)

    return database.transaction_sync(fn)


# -- knowing -------------------------------------------------------------------------------------------------


async def test_a_new_key_is_let_through_and_gets_rows(clock, database, gate, read_all):
    permit = await gate.admit("p/a/search")
    assert permit.generations == (0, 0, 0)
    assert {r["key"] for r in read_all("SELECT key FROM {resource}")} == {"p", "p/a", "p/a/search"}


async def test_what_others_do_is_known_within_its_age(clock, database, gate):
    await gate.check("p/a")
    database.transaction_sync(gates.pause, "p", reason="unpaid")
    await gate.check("p/a")
    clock.advance(0.3)
    with pytest.raises(ResourceStopped) as stopped:
        await gate.check("p/a")
    assert (stopped.value.resource, stopped.value.gate) == ("p", "pause")
    database.transaction_sync(gates.resume, "p")
    gate.forget(["p"])  # a notification came
    await gate.check("p/a")


async def test_a_gate_that_closes_waits_for_no_task_that_has_ended(gate):
    """Since Python 3.12 to gather such tasks lets the loop not turn, so they would never leave their set."""
    ended = asyncio.create_task(asyncio.sleep(0))
    await ended
    gate._reporter._tasks.add(ended)
    async with asyncio.timeout(5):
        await gate.close()


async def test_what_a_program_holds_keeps_nobody_else_waiting(postgres_url, open_database):
    """It pauses an account, a new one too, and does not commit yet."""
    database = open_database(postgres_url)
    app, gate = Resilient(database), Gate(database, POLICIES, owner="w1")
    await gate.start()
    for key in ("p/a", "q/b"):
        await gate.check(key)
    with Session(database.sync_engine) as s:
        for key in ("p/new", "q/b"):
            app.sync.resources.pause(key, session=s)
        async with asyncio.timeout(LIMIT):
            await gate.check("p/new")
            for key in ("p/a", "q/b"):
                for _ in range(5):
                    await gate.answered(await gate.admit(key), key, AnswerFacts(503), DOWN)
            with pytest.raises(DatabaseUnreachable, match="holds resource q/b"):
                await gate.flush()
        assert database.transaction_sync(resources.read, ["p/a", "q/b"])["p/a"].breaker.state == "open"
        s.rollback()
    await gate.flush()
    assert facts(database, "q/b").breaker.state == "open"
    await gate.close()


async def test_waiting_requests_share_one_query(clock, gate, statements):
    await asyncio.gather(*(gate.check(f"p/{n}") for n in range(200)))
    assert len(statements) <= 4
    clock.advance(1)
    statements.clear()
    await asyncio.gather(*(gate.check(f"p/{n}") for n in range(200)))
    assert statements.count("_read") <= 2


async def test_what_a_claim_read_needs_no_query(clock, database, gate, statements):
    database.transaction_sync(resources.ensure, ["p", "p/a"])
    now, _, found = database.transaction_sync(resources.lock_leaves, ["p/a"], ["p"])
    gate.learn(found, now)
    await gate.check("p/a")
    assert gate.stop("p/a") is None
    assert statements == []


async def test_capped(clock, database, gate):
    assert list(gate.capped("p/a")) == ["p"]
    assert list(gate.capped("q/a")) == []
    database.transaction_sync(resources.ensure, ["q", "q/a"])
    database.transaction_sync(gates.close, "q/a")  # ramps
    database.transaction_sync(gates.set_policy, "q", {"concurrency": 1})
    await gate.check("q/a")
    assert list(gate.capped("q/a")) == ["q/a", "q"]
    clock.advance(31)
    assert list(gate.capped("q/a")) == ["q"]


# -- throttles -----------------------------------------------------------------------------------------------


async def test_one_throttle_however_many_were_in_flight(clock, database, gate, statements, caplog):
    caplog.set_level(logging.INFO, "resilient.gate")
    permits = [await gate.admit("p/a") for _ in range(20)]
    statements.clear()
    told = Failure(FailureKind.THROTTLED, status=429, code="http_429", retry_at=clock.now() + timedelta(seconds=60))
    await asyncio.gather(*(gate.answered(t, "p/a", AnswerFacts(429), told) for t in permits))
    assert statements.count("cool_down") == 1
    with pytest.raises(ResourceStopped) as stopped:
        await gate.admit("p/a")
    assert (stopped.value.resource, stopped.value.gate) == ("p/a", "cooldown")
    assert stopped.value.until >= clock.now() + timedelta(seconds=61)
    assert facts(database, "p/a").blocked_until == stopped.value.until
    assert facts(database, "p/a").breaker.streak == 0
    assert [r.message.split(" until")[0] for r in caplog.records] == ["p/a is throttled"]
    assert gate.stop("p/b") is None


async def test_a_cooldown_of_days_is_told(clock, make, caplog):
    told = []
    gate = await make(on_cooldown=told.append)
    await gate.admit("p/a")
    await gate.cool_down("p/a", clock.now() + timedelta(days=3), "daily_quota")
    await gate.cool_down("p/a", clock.now() + timedelta(days=2), "daily_quota")
    assert [f.blocked_code for f in told] == ["daily_quota"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]


async def test_it_counts_here_before_it_is_written(clock, gate):
    await gate.admit("p/a")
    writing = asyncio.ensure_future(gate.cool_down("p/a", clock.now() + timedelta(seconds=60), "x"))
    await asyncio.sleep(0)
    assert gate.stop("p/a").gate == "cooldown"
    await writing
    assert gate.stop("p/a").code == "x"


async def test_other_workers_hear_of_it(clock, gate, make):
    other = await make("w2")
    await other.admit("p/a")
    await gate.answered(await gate.admit("p/a"), "p/a", AnswerFacts(429), THROTTLED)
    clock.advance(0.3)
    with pytest.raises(ResourceStopped):
        await other.admit("p/a")


async def test_throttles_name_their_scope(clock, database, gate):
    wide = Failure(FailureKind.THROTTLED, scope=Scope.PROVIDER, status=429, retry_in=30)
    narrow = Failure(FailureKind.THROTTLED, scope=Scope.ENDPOINT, status=429, retry_in=30)
    await gate.answered(await gate.admit("p/a/s"), "p/a/s", AnswerFacts(429), narrow)
    assert gate.stop("p/a/s").resource == "p/a/s"
    await gate.admit("p/a")  # the account's other endpoints flow
    await gate.answered(await gate.admit("p/a"), "p/a", AnswerFacts(429), wide)
    assert gate.stop("p/b").resource == "p"


# -- circuits ------------------------------------------------------------------------------------------------


async def test_failures_open_the_circuit(clock, database, make, caplog):
    changes = []
    gate = await make(on_change=changes.append)
    await fails(gate, "p/a", 4)
    assert facts(database, "p/a").breaker.state == "closed"
    await fails(gate, "p/a", 1)
    assert {c.after.key for c in changes} == {"p/a"}  # the only account there is, and not its provider
    assert gate.stop("p/a").gate == "breaker"
    (line,) = [r.message for r in caplog.records if r.message.startswith("p/a:")]
    assert "circuit open until" in line
    assert "5 failures in a row, latest http_503" in line


async def test_failures_are_written_promptly(database, make):
    gate = await make(policies=Policies())  # by the real clock
    for _ in range(5):
        await gate.answered(await gate.admit("p/a"), "p/a", AnswerFacts(503), DOWN)
    async with asyncio.timeout(LIMIT):
        while gate.stop("p/a") is None:  # noqa: ASYNC110 - nobody tells when it is written
            await asyncio.sleep(0.005)


async def test_successes_of_a_healthy_resource_cost_next_to_nothing(clock, database, make, statements):
    gate = await make(monotonic=lambda: clock.now().timestamp())
    for _ in range(10):
        for n in range(30):
            key = f"p/{n}"
            await gate.answered(await gate.admit(key), key, OK, None)
        clock.advance(1)
        await gate._reporter._write()
    assert statements.count("report_if_current") <= 10
    await gate.flush()
    found = facts(database, "p")
    assert found.breaker.window.ok + found.breaker.window.ok_before == 300
    assert len(found.breaker.window.well) == 16


async def test_three_sick_accounts_stop_their_provider_unless_more_are_well(clock, database, gate):
    for key in ("p/e", "p/f", "p/g", "p/h"):
        await gate.answered(await gate.admit(key), key, OK, None)
    for key in ("p/a", "p/b", "p/c"):
        await fails(gate, key)
    assert facts(database, "p").breaker.state == "closed"
    await fails(gate, "p/d", 1)
    assert facts(database, "p").breaker.state == "open"


async def test_a_told_time_binds_the_account_that_was_told(clock, database, gate):
    told = Failure(FailureKind.TRANSIENT, status=503, code="http_503", provider_wide=True, retry_in=7200.0)
    for key in ("p/a", "p/b", "p/c"):
        await fails(gate, key, 5, told)
    assert facts(database, "p/a").breaker.open_until >= clock.now() + timedelta(seconds=7200)
    assert facts(database, "p").breaker.open_until <= clock.now() + timedelta(seconds=22.5)


HOSTS_OF_TENANTS = Policies(tenancies={"p": Tenancy.APART, "q": Tenancy.SUBDOMAIN})
AWAY = Failure(FailureKind.TRANSIENT, code="connect", provider_wide=True)


@pytest.mark.parametrize(
    ("root", "failure", "state"),
    [("p", DOWN, "closed"), ("p", AWAY, "closed"), ("q", AWAY, "closed"), ("q", DOWN, "open")],
)
async def test_hosts_of_accounts_do_not_open_the_circuit_of_all(clock, database, make, root, failure, state):
    gate = await make(policies=HOSTS_OF_TENANTS)
    for account in "abc":
        await fails(gate, f"{root}/{account}", 5, failure)
        assert facts(database, f"{root}/{account}").breaker.state == "open"
    assert facts(database, root).breaker.state == state


async def test_an_account_on_its_own_host_cannot_throttle_its_provider(clock, database, make):
    gate = await make(policies=HOSTS_OF_TENANTS)
    wide = Failure(FailureKind.THROTTLED, scope=Scope.PROVIDER, status=429, retry_in=3600.0)
    await gate.answered(await gate.admit("p/a"), "p/a", AnswerFacts(429), wide)
    gate.ended("p/b", (), Failed(Failure(FailureKind.THROTTLED, scope=Scope.PROVIDER, retry_in=60.0)), answered=False)
    await gate._reporter.close()
    assert facts(database, "p").blocked_until is None
    assert facts(database, "p/a").blocked_until >= clock.now() + timedelta(seconds=3600)
    assert facts(database, "p/b").blocked_until >= clock.now() + timedelta(seconds=60)


async def test_one_sick_account_does_not_stop_its_provider(clock, database, gate):
    for key in ("p/b", "p/c"):
        await gate.answered(await gate.admit(key), key, OK, None)
    await fails(gate, "p/a", 9)
    assert facts(database, "p/a").breaker.state == "open"
    assert facts(database, "p").breaker.state == "closed"
    await gate.admit("p/b")


async def test_a_failing_account_is_not_the_providers_failure(clock, database, gate):
    for _ in range(5):
        permit = await gate.admit("p/a")
        await gate.failed(permit, "p/a", Failure(FailureKind.TRANSIENT))
    await gate.flush()
    assert facts(database, "p/a").breaker.state == "open"
    assert facts(database, "p").breaker.streak == 0


async def test_late_answers_count_under_the_generation_they_were_sent(clock, database, gate):
    late = [await gate.admit("p/a") for _ in range(3)]
    await fails(gate, "p/a")
    before = facts(database, "p/a").breaker
    for permit in late:
        await gate.answered(permit, "p/a", OK, None)
        await gate.failed(permit, "p/a", DOWN)
    await gate.flush()
    assert facts(database, "p/a").breaker == before


async def open_and_elect(clock, database, gate, key="p/a"):
    await outage(gate, key)
    clock.advance(30)
    probes, found, now = elect(database, key)
    gate.learn(found, now)
    return probes


async def test_only_the_probe_goes_through(clock, database, gate, make):
    probes = await open_and_elect(clock, database, gate)
    assert [level for level, _ in probes] == ["p/a", "p"]
    assert gate.stop("p/a", probes=probes) is None
    assert gate.stop("p/a").code == "probing"
    assert gate.stop("p/b").resource == "p"
    other = await make("w2")
    with pytest.raises(ResourceStopped):
        await other.admit("p/a", probes=probes)  # somebody else's probe


async def test_a_probe_whose_lease_ended_before_it_sent_anything_is_none(clock, database, gate):
    """Another job of this worker has been elected since; whichever it is, one request goes through."""
    first = await open_and_elect(clock, database, gate)
    clock.advance(Policy().breaker.probe_lease + 1)
    second, found, now = elect(database, "p/a")
    gate.learn(found, now)
    with pytest.raises(ResourceStopped) as stopped:
        await gate.admit("p/a", probes=first)
    assert (stopped.value.resource, stopped.value.gate) == ("p/a", "breaker")
    permit = await gate.admit("p/a", probes=second)
    assert permit.probing == ("p/a", "p")
    permit.fresh_until = 0.0  # it waits for its connection
    assert gate.is_late(permit)
    await gate.again(permit)
    assert permit.probing == ("p/a", "p")


async def test_the_first_answer_decides(clock, database, gate):
    probes = await open_and_elect(clock, database, gate)
    first, second = await gate.admit("p/a", probes=probes), await gate.admit("p/a", probes=probes)
    await gate.answered(first, "p/a", AnswerFacts(404), Failure(FailureKind.PERMANENT, status=404))
    await gate.flush()
    assert [facts(database, k).breaker.state for k in ("p/a", "p")] == ["closed", "closed"]
    await gate.failed(second, "p/a", DOWN)  # sent under the probe's generation
    await gate.flush()
    assert facts(database, "p/a").breaker.streak == 0
    gate.ended("p/a", probes, SUCCEEDED, answered=True)
    await gate.flush()
    assert facts(database, "p/a").breaker.state == "closed"
    await gate.admit("p/b")


async def test_a_probe_that_fails_reopens_longer(clock, database, gate):
    probes = await open_and_elect(clock, database, gate)
    await gate.failed(await gate.admit("p/a", probes=probes), "p/a", DOWN)
    await gate.flush()
    b = facts(database, "p/a").breaker
    assert (b.state, b.reopens) == ("open", 1)


async def test_a_throttled_probe_is_life_of_the_provider_and_says_nothing_of_the_account(clock, database, gate):
    probes = await open_and_elect(clock, database, gate)
    await gate.answered(await gate.admit("p/a", probes=probes), "p/a", AnswerFacts(429), THROTTLED)
    await gate.flush()
    account = facts(database, "p/a")
    assert (account.breaker.state, account.breaker.reopens) == ("open", 0)
    assert account.breaker.open_until >= account.blocked_until
    assert facts(database, "p").breaker.state == "closed"


async def test_without_a_job_one_of_many_requests_elects_itself(clock, database, gate, make):
    await outage(gate)
    clock.advance(30)
    gates = [gate, await make("w2")]
    found = await asyncio.gather(*(gates[n % 2].admit("p/a", own="") for n in range(8)), return_exceptions=True)
    (permit,) = [one for one in found if not isinstance(one, ResourceStopped)]
    assert {level for level, _ in permit.elected} == {"p/a", "p"}
    assert {one.gate for one in found if one is not permit} == {"breaker"}
    assert facts(database, "p/a").breaker.state == "half_open"


async def test_a_circuit_that_a_program_holds_is_probed_later(clock, postgres_database):
    gate = Gate(postgres_database, POLICIES, owner="w1")
    await gate.start()
    await outage(gate)
    clock.advance(30)
    with postgres_database.sync_engine.begin() as c:
        c.execute(sa.text("SELECT 1 FROM resilient_resource WHERE key = 'p' FOR UPDATE"))
        async with asyncio.timeout(LIMIT / 5):
            with pytest.raises(ResourceStopped) as stopped:
                await gate.admit("p/a", own="")
    assert stopped.value.gate == "breaker"
    assert {level for level, _ in (await gate.admit("p/a", own="")).elected} == {"p/a", "p"}
    await gate.close()


async def test_without_a_job_a_paused_resource_is_not_probed(clock, database, gate):
    await fails(gate, "p/a")
    database.transaction_sync(gates.pause, "p", reason="unpaid")
    clock.advance(30)
    with pytest.raises(ResourceStopped):
        await gate.admit("p/a", own="")
    assert facts(database, "p/a").breaker.state == "open"


@pytest.mark.parametrize("outcome", [HandedBack("stop"), Deferred("x"), Failed(Failure(FailureKind.BUG))])
async def test_a_probe_that_decides_nothing_is_given_back(clock, database, gate, outcome):
    probes = await open_and_elect(clock, database, gate)
    gate.ended("p/a", probes, outcome, answered=False)
    await gate.flush()
    b = facts(database, "p/a").breaker
    assert (b.state, b.reopens, b.open_until) == ("open", 0, clock.now() + timedelta(seconds=1))


async def test_a_handler_without_requests_decides_by_its_outcome(clock, database, gate):
    for _ in range(5):
        gate.ended("p/a", (), Failed(Failure(FailureKind.TRANSIENT)), answered=False)
        await gate.check("p/a")
    await gate.flush()
    assert facts(database, "p/a").breaker.streak == 4  # the first was before the row was known
    gate.ended("p/a", (), Failed(Failure(FailureKind.TRANSIENT)), answered=False)
    await gate.flush()
    clock.advance(30)
    probes, found, now = elect(database, "p/a")
    gate.learn(found, now)
    gate.ended("p/a", probes, SUCCEEDED, answered=False)
    await gate.flush()
    assert facts(database, "p/a").breaker.state == "closed"


async def test_a_handlers_own_throttle_cools_down(clock, database, gate):
    until = clock.now() + timedelta(seconds=60)
    outcome = Failed(Failure(FailureKind.THROTTLED, retry_at=until))
    gate.ended("p/a", (), outcome, answered=True)
    await gate.close()
    assert facts(database, "p/a").blocked_until >= until
    gate.ended("p/b", (), Failed(THROTTLED), answered=True)  # an answer's: told already
    await gate.close()
    with pytest.raises(KeyError):
        facts(database, "p/b")


async def test_what_cannot_be_written_is_kept(clock, database, gate, monkeypatch):
    await gate.admit("p/a")
    real = database.transaction

    async def away(fn, *args, **kwargs):
        if fn.__name__ == "report_if_current":
            raise OSError("gone")
        return await real(fn, *args, **kwargs)

    monkeypatch.setattr(database, "transaction", away)
    with pytest.raises(OSError, match="gone"):
        await fails(gate, "p/a", 3)
    monkeypatch.setattr(database, "transaction", real)
    await fails(gate, "p/a", 2)
    assert facts(database, "p/a").breaker.state == "open"


# -- budgets -------------------------------------------------------------------------------------------------


def left(remaining, reset_at, name="core", limit=None):
    return AnswerFacts(200, budgets=(Budget(name, limit, remaining, reset_at),))


async def test_a_declared_budget_lowers_the_limit(clock, database, gate):
    permit = await gate.admit("q/a")
    await gate.answered(permit, "q/a", left(1, clock.now() + timedelta(seconds=50)), None)
    await gate.flush()
    await gate.admit("q/a")
    with pytest.raises(ResourceStopped) as stopped:
        await gate.admit("q/a")
    assert (stopped.value.resource, stopped.value.gate) == ("q/a", "limit")
    assert abs((stopped.value.until - clock.now()).total_seconds() - 49) < 0.1


async def test_plenty_left_is_not_even_written(clock, gate, statements):
    permit = await gate.admit("q/a")
    statements.clear()
    await gate.answered(permit, "q/a", left(5000, clock.now() + timedelta(seconds=10)), None)
    await gate.flush()
    assert "observe" not in statements


async def test_an_undeclared_budget_that_is_spent_is_a_cooldown(clock, database, gate):
    reset_at = clock.now() + timedelta(seconds=50)
    await gate.answered(await gate.admit("p/a"), "p/a", left(3, reset_at, "search"), None)
    await gate.answered(await gate.admit("p/a"), "p/a", left(0, reset_at, "search"), None)
    found = facts(database, "p/a")
    assert (found.blocked_until, found.blocked_code) == (reset_at, "budget:search")


# -- a database that is away ---------------------------------------------------------------------------------


async def test_known_facts_serve_while_the_database_is_away(clock, gate, database, monkeypatch):
    await gate.admit("p/a")

    async def away(fn, *args, **kwargs):
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        clock.advance(20)
        await gate.admit("p/a")
        with pytest.raises(ResourceStopped) as stopped:
            await gate.admit("p/new")
        assert stopped.value.gate == "database"
        clock.advance(11)
        with pytest.raises(ResourceStopped):
            await gate.admit("p/a")
    await gate.admit("p/a")


async def test_breakers_can_be_off(clock, database, make):
    off = BreakerPolicy(streak=None, ratio=None)
    gate = await make(policies=Policies(breakers={"p/**": off, "p": off}))
    await fails(gate, "p/a", 30)
    assert gate.stop("p/a") is None


FAR = datetime(9999, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "window", "days"),
    [
        ({"until": FAR}, None, 1),
        ({"until": FAR}, "30d", 1),
        ({"retry_after": 20 * 86_400.0}, None, 1),
        ({"retry_after": 20 * 86_400.0}, "30d", 20),
    ],
)
async def test_a_handler_that_says_throttled_is_believed_as_far_as_its_provider(
    clock, sqlite_database, words, window, days
):
    """It says what some answer has told it. So nothing rests for years: the account is tried once a day at least."""

    @handler("work")
    async def work(job: Job[None]) -> None:
        raise Throttled(**words)

    limits = {"account": [Limit(1000, per=window)]} if window else {}
    facts = Provider(name="p", base_url="https://p.example", anonymous=True, limits=limits)
    app = Resilient(sqlite_database, handlers=[work], providers=[facts], upgrade=False)
    await app.enqueue(work, None, resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    rests = (await app.resources.get("p/1")).blocked_until - clock.now()
    assert timedelta(days=days) <= rests < timedelta(days=days, minutes=5)
    await app.close()


@pytest.mark.parametrize("plain", [False, True])
async def test_what_was_claimed_before_a_gate_shut_does_not_start(clock, database, plain):
    """The first of three that were claimed together says that the account is throttled."""
    ran = []

    def said(job):
        ran.append(job.payload)
        if len(ran) == 1:
            raise Throttled(until=clock.now() + timedelta(seconds=60))

    async def coroutine(job: Job[int]) -> None:
        said(job)

    def function(job: SyncJob[int]) -> None:
        said(job)

    app = Resilient(database, handlers=[handler("work")(function if plain else coroutine)], upgrade=False)
    await app.enqueue_many("work", range(3), resource_key="p/1")
    worker = app.worker(concurrency=1)
    worker.concurrency = 3  # so many are claimed; there is one slot
    await worker.drain(timeout=LIMIT)
    assert len(ran) == 1
    jobs = await app.jobs.list()
    assert [(job.attempts, job.deferrals) for job in jobs] == [(0, 1)] * 3
    await app.close()


@pytest.mark.parametrize("sort", ["coroutine", "function", "batch"])
async def test_what_waits_for_its_slot_does_not_start_once_another_process_shut_the_gate(
    clock, database, monkeypatch, sort
):
    """The claim's facts are old by then, and a handler that asks for no client never meets the gate again."""
    monkeypatch.setattr(execution, "FACTS_LAST", 0.0)
    ran = []

    def another_pauses(ran_now):
        ran.append(ran_now)
        database.transaction_sync(gates.pause, "p", reason="maintenance")
        clock.advance(2)

    async def coroutine(job: Job[int]) -> None:
        another_pauses(1)

    def function(job: SyncJob[int]) -> None:
        another_pauses(1)

    async def batch(some: Batch[int]) -> None:
        another_pauses(len(some))

    declared = handler("work", batch=1 if sort == "batch" else None)
    app = Resilient(database, handlers=[declared(locals()[sort])], upgrade=False)
    database.transaction_sync(resources.ensure, ["p", "p/0", "p/1", "p/2"])
    await app.enqueue_many("work", [Item(n, resource_key=f"p/{n}") for n in range(3)])
    worker = app.worker(concurrency=1)
    worker.concurrency = 3  # so many are claimed; there is one slot
    worker.dispatcher._yield = 0.5  # and all at once
    await worker.drain(timeout=LIMIT)
    assert ran == [1]
    jobs = await app.jobs.list()
    assert sorted((job.state, job.attempts, job.deferrals) for job in jobs) == [("ready", 0, 1)] * 2 + [
        ("succeeded", 0, 0)
    ]
    await app.close()


# -- tasks that somebody cancels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("began", [False, True])
async def test_a_throttle_whose_task_is_cancelled_stops_nobody_beyond_its_time(
    clock, database, make, monkeypatch, began
):
    gate = await make()
    await gate.check("p/a")

    async def away(*_args, **_kwargs):
        raise DatabaseUnreachable("away")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        waiting = asyncio.create_task(gate.cool_down("p/a", clock.now() + timedelta(seconds=60)))
        await asyncio.sleep(0)
        if began:
            await waiting
        assert gate.stop("p/a") is not None
        tasks = list(gate._reporter._tasks)
        for one in tasks:
            one.cancel()
        await asyncio.wait(tasks)
        waiting.cancel()
    assert gate.stop("p/a") is None


async def test_what_is_learnt_survives_a_report_that_is_cancelled(database, make, monkeypatch):
    gate, began = await make(), asyncio.Event()
    report = gates.Report("p/a", Answers(1, 5, 1))
    gate._lessons.flows.put_back([report])

    async def hang(*_args, **_kwargs):
        began.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", hang)
        flushing = asyncio.create_task(gate._lessons.flush())
        await began.wait()
        flushing.cancel()
        await asyncio.wait([flushing])
    assert gate._lessons.flows.collect() == [report]
