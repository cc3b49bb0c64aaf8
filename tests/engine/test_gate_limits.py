"""Request limits as the gate draws them: waits, leases, reservations, over several gates."""

import asyncio
import contextlib
import time
from datetime import timedelta

import pytest

from resilient import AnswerFacts, DatabaseUnreachable, Job, Limit, Resilient, ResourceStopped, handler
from resilient.core.base.budgets import Budget
from resilient.core.gates.policy import Policies, Tenancy
from resilient.core.jobs.backoff import retry_pause
from resilient.engine.gates import drawing
from resilient.engine.gates.gate import Gate
from resilient.store.gates import circuits, limits
from resilient.store.gates import controls as gates
from tests.helpers import LIMIT, until


@pytest.fixture
async def make(database):
    made = []

    async def make(*declared, monotonic=None, **more):
        gate = Gate(database, Policies(limits={"p/*": declared, **more}), owner="w", monotonic=monotonic)
        await gate.start()
        made.append(gate)
        return gate

    yield make
    for gate in made:
        await gate.close()


@pytest.fixture
def draws(database, monkeypatch):
    """How many asks each draw transaction had."""
    seen, real = [], database.transaction

    async def transaction(fn, *args, **kwargs):
        if fn is limits.draw:
            seen.append(len(args[0]))
        return await real(fn, *args, **kwargs)

    monkeypatch.setattr(database, "transaction", transaction)
    return seen


@pytest.fixture
def away(database, monkeypatch):
    """``with away():`` no draw reaches the database."""
    real = database.transaction

    async def transaction(fn, *args, **kwargs):
        if fn is limits.draw:
            raise OSError("gone")
        return await real(fn, *args, **kwargs)

    @contextlib.contextmanager
    def away():
        with monkeypatch.context() as patch:
            patch.setattr(database, "transaction", transaction)
            yield

    return away


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    pass


async def test_a_limit_that_never_has_room_again_stops_no_other_account(database_url):
    limits = {"p/far": [Limit.parse("1/99999999999d", counts="jobs")]}
    async with Resilient(database_url, handlers=[nothing], limits=limits) as app:
        jobs = [await app.enqueue(nothing, resource_key=key) for key in ("p/far", "p/far", "p/well", "p/well")]
        assert await app.worker().drain() == 3
        assert [(await app.jobs.get(job.id)).state for job in jobs] == ["succeeded", "ready", *["succeeded"] * 2]


def tat(database, key="p/a", name="r"):
    return database.transaction_sync(limits.read, [key])[key][name].tat


async def test_beyond_two_seconds_the_job_waits(clock, database, make):
    gate = await make(Limit(1, 10, burst=2, name="r"))
    await gate.admit("p/a")
    await gate.admit("p/a")
    with pytest.raises(ResourceStopped) as stopped:
        await gate.admit("p/a")
    assert (stopped.value.resource, stopped.value.gate) == ("p/a", "limit")
    assert (stopped.value.until - clock.now()).total_seconds() == pytest.approx(9)
    clock.advance(9)
    begin = time.monotonic()
    permit = await gate.admit("p/a")  # the rest in place
    assert begin + 0.9 <= permit.draw.send_at <= time.monotonic()


async def test_who_is_behind_is_refused_without_asking(clock, make, draws):
    gate = await make(Limit(1, 10, burst=2, name="r"))
    await gate.admit("p/a", 2)
    for _ in range(5):
        with pytest.raises(ResourceStopped):
            await gate.admit("p/a")
    assert len(draws) == 2
    clock.advance(9)
    with pytest.raises(ResourceStopped):
        await gate.admit("p/a", 2)  # would fit later than one unit
    assert len(draws) == 3


async def test_a_short_wait_is_waited_in_place(clock, make):
    gate = await make(Limit(20, 1, burst=1, name="r"))
    loop = asyncio.get_running_loop()
    begin, ends = loop.time(), []

    async def one():
        await gate.admit("p/a")
        ends.append(loop.time() - begin)

    await asyncio.gather(*(one() for _ in range(5)))
    for n, end in enumerate(sorted(ends)):
        assert n * 0.05 - 0.005 <= end


async def test_a_thousand_requests_are_few_transactions(clock, make, draws):
    gate = await make(Limit(10_000, 1, burst=1000, name="r"))
    await asyncio.gather(*(gate.admit("p/a") for _ in range(1000)))
    assert sum(draws) == 1000
    assert len(draws) <= 10


async def test_a_busy_path_leases_and_gives_back(clock, database, make, draws):
    gate = await make(Limit(1000, 60, burst=1000, name="r"))  # 1.67 in its 100 ms: too slow to lease
    for _ in range(20):
        await gate.admit("p/a")
    assert len(draws) == 20
    fast = Limit(1000, 10, burst=1000, name="fast")  # 10 in 100 ms
    gate = await make(fast, monotonic=lambda: clock.now().timestamp())
    draws.clear()
    for _ in range(40):
        await gate.admit("p/b")
    assert len(draws) < 15
    clock.advance(0.2)
    await gate.admit("p/b")  # gives back what was left over
    clock.advance(0.2)
    await gate.admit("p/b")
    clock.advance(0.2)
    await gate.admit("p/b")
    used = (tat(database, "p/b", "fast") - clock.now().timestamp()) / 0.01
    assert used <= 5  # 43 were drawn, 60 came back


async def test_what_two_leases_left_over_comes_back_once(clock, database, make):
    at, limit = clock.now().timestamp(), Limit(1000, 10, burst=1000, name="fast")
    database.transaction_sync(limits.observe, [limits.Observation("p/b", limit, 900, at + 8, at)])
    gate = await make(limit, monotonic=lambda: clock.now().timestamp())
    for _ in range(40):
        await gate.admit("p/b")
    for _ in range(3):
        clock.advance(0.2)
        await gate.admit("p/b")
    assert database.transaction_sync(limits.read, ["p/b"])["p/b"]["fast"].remaining == 900 - 43


async def test_leases_never_pass_the_limit(database, make):
    """Three workers on one limit by the real clock: what went through in any second."""
    rate = 60
    workers = [await make(Limit(rate, 1, name="r")) for _ in range(3)]
    loop = asyncio.get_running_loop()
    end, times = loop.time() + 2.2, []

    async def sends(gate):
        while loop.time() < end:
            try:
                permit = await gate.admit("p/a")
                while gate.is_late(permit) or (at := loop.time()) > permit.draw.deadline:  # it stood still on the way
                    await gate.again(permit)
                times.append(at)
            except ResourceStopped:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(sends(gate) for gate in workers for _ in range(6)))
    times.sort()
    most = max(sum(start <= t < start + 1 for t in times) for start in times)
    assert most <= rate
    assert len(times) > rate


async def test_cancelled_waits_give_back(clock, database, make):
    gate = await make(Limit(1, 1, burst=1, name="r"))
    await gate.admit("p/a")
    waiting = asyncio.ensure_future(gate.admit("p/a"))
    await asyncio.sleep(0)  # it asks
    await gate._drawing._task
    assert tat(database) == pytest.approx(clock.now().timestamp() + 2, abs=1e-3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await gate.flush()
    assert tat(database) == pytest.approx(clock.now().timestamp() + 1, abs=1e-3)


async def test_a_gate_that_shuts_meanwhile_stops_the_wait(clock, database, make):
    gate = await make(Limit(10, 1, burst=1, name="r"))
    await gate.admit("p/a")
    waiting = asyncio.ensure_future(gate.admit("p/a"))
    await asyncio.sleep(0.02)
    await gate.cool_down("p/a", None, "http_429")
    with pytest.raises(ResourceStopped) as stopped:
        await waiting
    assert stopped.value.gate == "cooldown"
    await gate.flush()
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.1, abs=1e-3)


async def test_the_answer_settles_the_cost(clock, database, make):
    gate = await make(Limit(100, 1, burst=100, name="r"))
    permit = await gate.admit("p/a", 10)
    await gate.answered(permit, "p/a", AnswerFacts(200, cost=2.5), None)
    await gate.flush()
    assert tat(database) == pytest.approx(clock.now().timestamp() + 0.025, abs=1e-3)
    permit = await gate.admit("p/a", 10)
    drawn = tat(database)  # 10, or a few more in advance
    await gate.answered(permit, "p/a", AnswerFacts(200, cost=40), None)
    await gate.flush()
    assert tat(database) == pytest.approx(drawn + 0.3, abs=1e-3)


@pytest.mark.parametrize("cost", [1e300, 1e9])
async def test_no_answer_costs_more_than_a_whole_window(clock, database, make, cost):
    gate = await make(Limit(100, 1, burst=100, name="r"))
    permit = await gate.admit("p/a")
    await gate.answered(permit, "p/a", AnswerFacts(200, cost=cost), None)
    await gate.flush()
    assert tat(database) <= clock.now().timestamp() + 1.1


async def test_an_account_on_its_own_host_cannot_spend_what_all_share(clock, database):
    shared, own = Limit(100, 1, burst=100, name="app"), Limit(100, 1, burst=100, name="r")
    policies = Policies(limits={"p": [shared], "p/*": [own]}, tenancies={"p": Tenancy.APART})
    gate = Gate(database, policies, owner="w")
    await gate.start()
    told = Budget("app", 77, 0, clock.now() + timedelta(days=900))
    permit = await gate.admit("p/a")
    await gate.answered(permit, "p/a", AnswerFacts(200, cost=80.0, budgets=(told,)), None)
    await gate.close()
    states = database.transaction_sync(limits.read, ["p", "p/a"])
    assert states["p"]["app"].remaining is None
    assert states["p"]["app"].tat <= clock.now().timestamp() + 0.1
    assert states["p/a"]["r"].tat >= clock.now().timestamp() + 0.7
    rests = database.transaction_sync(circuits.lock, ["p", "p/a"])
    assert rests["p"].blocked_until is None
    assert rests["p/a"].blocked_until == clock.now() + timedelta(days=1)  # a budget nobody declared, believed for a day


async def test_a_request_draws_from_its_whole_path(clock, database, make):
    gate = await make(
        Limit(100, 1, burst=100, name="r"),
        **{"p": [Limit(100, 1, burst=3, name="r")], "p/*/search": [Limit(100, 1, burst=9, name="r")]},
    )
    for _ in range(3):
        await gate.admit("p/a/search")
    drawn = database.transaction_sync(limits.read, ["p", "p/a", "p/a/search"])
    assert {k: round((v["r"].tat - clock.now().timestamp()) * 100) for k, v in drawn.items()} == {
        "p": 3, "p/a": 3, "p/a/search": 3,
    }  # fmt: skip


async def test_a_request_that_was_kept_too_long_draws_again(clock, database, make, draws):
    """Its connection took long to open, or the process stood still: its place has passed, and others have one there."""
    now = [1000.0]
    gate = await make(Limit(10, 1, name="r"), monotonic=lambda: now[0])
    permit = await gate.admit("p/a")
    assert not gate.is_late(permit)
    first = tat(database)
    now[0] += 0.5
    clock.advance(0.5)
    assert gate.is_late(permit)
    await gate.again(permit)
    assert len(draws) == 2
    assert tat(database) >= first + 0.5
    assert permit.sent_at == clock.now()


async def test_who_was_kept_too_long_looks_at_the_gates_again(clock, database, make):
    now = [1000.0]
    gate = await make(Limit(100, 1, burst=100, name="r"), monotonic=lambda: now[0])
    permits = [await gate.admit("p/a"), await gate.admit("p/a", 0)]
    database.transaction_sync(gates.pause, "p", reason="unpaid")
    now[0] += 5
    clock.advance(5)
    for permit in permits:  # with a limit and without
        assert gate.is_late(permit)
        with pytest.raises(ResourceStopped) as stopped:
            await gate.again(permit)
        assert (stopped.value.resource, stopped.value.gate) == ("p", "pause")
        assert permit.draw is None


async def test_free_requests_draw_nothing(clock, make, draws):
    gate = await make(Limit(1, 100, burst=1, name="r"))
    for _ in range(3):
        await gate.admit("p/a", 0)
    assert draws == []


async def test_an_override_changes_the_limit_without_a_restart(clock, database, make):
    gate = await make(Limit(1, 100, burst=1, name="r"))
    await gate.admit("p/a")
    with pytest.raises(ResourceStopped):
        await gate.admit("p/a")
    wider = {"limits": [{"rate": 1000, "per": 1, "burst": 1000, "name": "r"}]}
    database.transaction_sync(gates.set_policy, "p/a", wider)
    clock.advance(0.3)
    for _ in range(9):  # what was drawn from the old one counts as one unit of this one
        await gate.admit("p/a")


async def test_a_database_that_is_away_makes_jobs_wait(clock, database, make, away):
    gate = await make(Limit(1, 1, name="r"))
    await gate.check("p/a")
    with away(), pytest.raises(ResourceStopped) as stopped:
        await gate.admit("p/a")
    assert stopped.value.gate == "database"
    await gate.admit("p/a")


async def test_a_settlement_waits_longer_and_longer_for_a_database_that_is_away(
    clock, database, make, away, monkeypatch, caplog
):
    gate, pauses = await make(Limit(100, 1, burst=100, name="r")), []
    permit = await gate.admit("p/a", 10)
    drawn = tat(database)

    def at_once(tries, roll):
        pauses.append(retry_pause(tries, roll))
        return 0.0

    monkeypatch.setattr(drawing, "retry_pause", at_once, raising=False)
    with away():
        await gate.answered(permit, "p/a", AnswerFacts(200, cost=40), None)
        await until(lambda: len(pauses) == 5)
    await until(lambda: tat(database) != drawn)
    assert tat(database) == pytest.approx(drawn + 0.3, abs=1e-3)
    for n, pause in enumerate(pauses):
        assert 0.1 * 2**n <= pause <= 0.15 * 2**n
    assert caplog.text.count("cannot draw request limits") == 1


async def test_what_a_server_says_is_left_is_written_once_the_database_is_there_again(
    clock, database, make, monkeypatch
):
    gate, tries, real = await make(Limit(100, 1, burst=100, name="r")), [], database.transaction
    permit = await gate.admit("p/a")

    async def away(fn, *args, **kwargs):
        if fn is limits.observe:
            tries.append(fn)
            raise DatabaseUnreachable("gone")
        return await real(fn, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        left = Budget("r", 100, 3, clock.now() + timedelta(minutes=1))
        await gate.answered(permit, "p/a", AnswerFacts(200, budgets=(left,)), None)
        await until(lambda: tries)
    await gate.flush()
    assert database.transaction_sync(limits.read, ["p/a"])["p/a"]["r"].remaining == 3


async def test_saving_and_closing_end_while_the_database_is_away(clock, database, make, away):
    gate = await make(Limit(100, 1, burst=100, name="r"))
    permit = await gate.admit("p/a", 10)
    drawn = tat(database)
    async with asyncio.timeout(LIMIT):
        with away():
            await gate.answered(permit, "p/a", AnswerFacts(200, cost=40), None)
            await gate.flush()
        permit = await gate.admit("p/a", 10)  # does not wait for the pause, and takes the settlement along
        assert tat(database) > drawn + 0.39  # 0.3, 0.1, and perhaps a few in advance
        assert gate._drawing._retry_timer is None
        with away():
            await gate.answered(permit, "p/a", AnswerFacts(200, cost=40), None)
            await gate.close()
            assert gate._drawing._retry_timer is None
            assert gate._drawing._task.done()


async def test_who_is_cancelled_as_the_database_goes_away_ends_as_cancelled(clock, database, make, monkeypatch):
    gate = await make(Limit(1, 1, name="r"))
    await gate.check("p/a")
    loop = asyncio.get_running_loop()

    async def away(*_):
        loop.call_soon(waiting.cancel)  # runs after the refusal is set, before the waiting one goes on
        raise OSError("gone")

    monkeypatch.setattr(gate._drawing, "_transaction", away)
    waiting = asyncio.ensure_future(gate.admit("p/a"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
