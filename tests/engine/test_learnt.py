"""Learnt limits in worker processes: what each counts, who is told, where nothing is known, and a real provider."""

import asyncio
import logging
import random
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from resilient import (
    AnswerFacts,
    Errors,
    Failure,
    FailureKind,
    InvalidInput,
    Item,
    Job,
    Kind,
    Limit,
    Provider,
    Resilient,
    ResourceStopped,
    Retry,
    Rule,
    handler,
)
from resilient.core.base.budgets import Budget
from resilient.core.gates.admission import Level, ResourceFacts, admit
from resilient.core.gates.learnt import CLOSE, Learnt
from resilient.core.gates.policy import Policies, Policy, Tenancy
from resilient.core.gates.rate_limit import LEARNT, LimitState
from resilient.core.gates.retry_after import LEAST
from resilient.engine.gates import lessons
from resilient.engine.gates.budgets import MOST_STATED, UndeclaredBudgets
from resilient.engine.gates.gate import Gate
from resilient.engine.gates.lessons import FIRST_OF_ROOT, PAUSE, Flows, Latency
from resilient.engine.run import backend
from resilient.engine.run.dispatcher import Dispatcher
from resilient.store.gates import limits, resources
from resilient.store.jobs import insert as jobs
from resilient.surface.bench.metered import METERS, Line
from resilient.surface.bench.throttle import figures
from resilient.testing import FakeProvider, Reply
from resilient.testing.fake.meter import Sliding
from tests.helpers import LIMIT

OK = AnswerFacts(200)
CALL = Kind("call", dict)


def throttled(wait=1.0, **words):
    return Failure(FailureKind.THROTTLED, status=429, code="http_429", retry_in=wait, **words)


@pytest.fixture
async def make(database):
    """A gate, as a worker of its own has one."""
    made = []

    async def make(**options):
        gate = Gate(database, options.pop("policies", Policies()), owner=f"w{len(made)}", **options)
        await gate.start()
        made.append(gate)
        return gate

    yield make
    for gate in made:
        await gate.close()


def learnt(database, key):
    return database.transaction_sync(resources.read, [key])[key].learnt


async def well(gate, key, count):
    for _ in range(count):
        await gate.answered(await gate.admit(key), key, OK, None)


async def refused(gate, key, failure=None):
    await gate.answered(await gate.admit(key), key, AnswerFacts(429), failure or throttled())


async def test_two_processes_learn_one_rate_from_what_both_counted(database, make):
    one, two = await make(), await make()
    await well(one, "p/a", 2)
    await well(two, "p/a", 3)
    await refused(one, "p/a")
    assert learnt(database, "p/a").rate == pytest.approx(2 * CLOSE)
    two.forget(["p/a"])
    with pytest.raises(ResourceStopped):
        await two.admit("p/a")  # it looks at the row
    two._lessons.flows.changed("p/a")
    await two.flush()
    assert learnt(database, "p/a").rate == pytest.approx(5 * CLOSE)
    assert learnt(database, "p/a").throttles == 1


async def test_what_was_in_flight_is_one_event(database, make):
    one = await make(policies=Policies(limits={"p/*": [Limit(1000, 1, burst=1000)]}))
    permits = [await one.admit("p/a") for _ in range(6)]
    for permit in permits:
        await one.answered(permit, "p/a", AnswerFacts(429), throttled())
    assert learnt(database, "p/a").throttles == 1


async def test_the_learnt_limit_is_drawn_beside_the_declared_one_and_no_budget_means_it(database, clock, make):
    declared = Limit(1000, 1, burst=1000, name="core")
    one = await make(policies=Policies(limits={"p/*": [declared]}))
    await well(one, "p/a", 3)
    await refused(one, "p/a")
    clock.advance(5)
    permit = await one.admit("p/a")
    names = [limit.name for _, limit in permit.draw.limits]
    assert names == ["core", LEARNT]
    budget = Budget(LEARNT, remaining=0, reset_at=clock.now() + timedelta(seconds=60))
    await one.answered(permit, "p/a", AnswerFacts(200, budgets=(budget,)), None)
    await one.flush()
    rows = database.transaction_sync(lambda c, d: list(d.run(c, "SELECT name, remaining FROM {rate_limit}")))
    assert (LEARNT, 0.0) not in [tuple(row) for row in rows]


@pytest.mark.parametrize(("word", "kind"), [(False, None), ((0.5, 2.0), "rate"), ("concurrency", "slots")])
async def test_the_policy_says_what_is_learnt(database, make, word, kind):
    one = await make(policies=Policies(learn={"p/*": word}))
    await well(one, "p/a", 5)
    await refused(one, "p/a")
    s = learnt(database, "p/a")
    assert s.kind == (kind or "free")
    if kind == "rate":
        assert s.rate == 2.0


@pytest.mark.parametrize("kind", [FailureKind.QUOTA])
async def test_a_spent_budget_is_obeyed_and_teaches_no_rate(database, make, kind):
    one = await make()
    await refused(one, "p/a", Failure(kind, status=429, retry_in=5.0))
    assert learnt(database, "p/a").kind == "free"
    with pytest.raises(ResourceStopped):
        await one.admit("p/a")


async def test_many_accounts_refused_at_once_are_their_providers_limit(database, make):
    one = await make()
    keys = [f"p/{n}" for n in range(LEAST)]
    for key in keys:
        await well(one, key, 1)
    permits = [await one.admit(key) for key in keys]
    for key, permit in zip(keys, permits, strict=True):
        await one.answered(permit, key, AnswerFacts(429), throttled())
    assert learnt(database, "p").kind == "rate"
    assert learnt(database, "p").burst == LEAST, "what was refused is not counted as let through"
    assert [learnt(database, key) for key in keys[:-1]] == [None] * (LEAST - 1), "it was not theirs"


@pytest.mark.parametrize("why", ["few", "others work", "told for long", "hosts of their own"])
async def test_a_few_accounts_are_not_their_provider(database, make, why):
    tenancies = {"p": Tenancy.APART} if why == "hosts of their own" else None
    one = await make(policies=Policies(tenancies=tenancies))
    if why == "others work":
        for n in range(LEAST + 1):
            await well(one, f"p/good{n}", 1)
    for n in range(LEAST - (why == "few")):
        await refused(one, f"p/{n}", throttled(11.0 if why == "told for long" else 1.0))
    facts = database.transaction_sync(resources.read, ["p"])
    assert "p" not in facts or facts["p"].learnt is None


async def begun(tasks):
    for _ in range(20):
        await asyncio.sleep(0)
    return [task for task in tasks if task.done()]


async def test_what_nobody_knows_begins_with_one_request(clock):
    now = [0.0]
    flows = Flows(lambda: now[0], {}, clock.now)
    tasks = [asyncio.create_task(flows.enter("p/a")) for _ in range(12)]
    sizes = []
    while any(not task.cancelled() and not task.done() for task in tasks) or not sizes:
        done = [task for task in await begun(tasks) if not task.cancelled()]
        sizes.append(len(done))
        for task in done:
            flows.leave(task.result(), ("p", "p/a"))
            tasks.remove(task)
        if not tasks:
            break
    assert sizes[0] == 1
    assert max(sizes) <= 6
    assert sum(sizes) == 12


async def test_slow_answers_hold_nobody_up_for_ever(clock):
    now = [0.0]
    flows = Flows(lambda: now[0], {}, clock.now)
    first = await flows.enter("p/a")
    now[0] += PAUSE
    second = await flows.enter("p/a")
    assert (first[0].at_once, second[0].at_once) == (1, 2)


async def test_a_provider_begins_with_a_few_of_all_its_accounts(clock):
    flows = Flows(lambda: 0.0, {}, clock.now)
    tasks = [asyncio.create_task(flows.enter(f"p/{n}")) for n in range(30)]
    assert len(await begun(tasks)) == FIRST_OF_ROOT
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def learnt_facts(key, generation):
    learnt = Learnt(generation=generation, previous=generation - 1)
    return {key: ResourceFacts(key, learnt=learnt)}


async def test_a_refusal_counts_from_the_first_request_after_idle_time(clock):
    now, facts = [0.0], learnt_facts("p/a", 1)
    flows = Flows(lambda: now[0], facts, clock.now)
    flows.leave(await flows.enter("p/a"), ("p/a",))
    flows.collect()
    now[0] += 300
    first = await flows.enter("p/a")
    now[0] += 0.5
    flows.leave(first, ("p/a",))
    refused = await flows.enter("p/a")
    refusal = flows.refusal("p/a", refused, 2.0)
    assert (refusal.accepted, refusal.seconds) == (1, 0.5)


async def test_a_resource_whose_facts_are_forgotten_begins_again(clock):
    """A herd's accounts are forgotten while requests of theirs fly."""
    now, facts = [0.0], learnt_facts("p/a", 1)
    flows = Flows(lambda: now[0], facts, clock.now)
    flows.leave(await flows.enter("p/a"), ("p/a",))
    facts.clear()
    first = await flows.enter("p/a")
    assert flows.changed("p/a") is None
    now[0] += PAUSE
    second = await flows.enter("p/a")
    assert [(one.flow.key, one.generation, one.at_once) for one in first] == [("p/a", 0, 1), ("p", 0, 1)]
    assert [(one.flow.key, one.generation, one.at_once) for one in second] == [("p/a", 0, 2), ("p", 0, 2)]
    assert flows.collect() == []


async def test_flows_are_forgotten_those_with_a_lesson_too_and_what_they_counted_is_reported(clock, monkeypatch):
    monkeypatch.setattr(lessons, "MOST_RESOURCES", 10)
    now, facts = [0.0], {}
    for n in range(40):
        facts |= learnt_facts(f"p{n}", 1)
    flows = Flows(lambda: now[0], facts, clock.now)
    busy = await flows.enter("p0")
    for n in range(1, 40):
        now[0] += 1
        flows.leave(await flows.enter(f"p{n}"), (f"p{n}",))
    assert len(flows._flows) <= 10
    assert "p0" in flows._flows, "it is in use"
    flows.leave(busy, ("p0",))
    assert sorted(report.key for report in flows.collect()) == sorted(facts)


async def test_a_report_that_fails_for_long_is_a_warning_once(database, make, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    one = await make()
    lessons_, good = one._lessons, False

    async def flush():
        if not good:
            raise RuntimeError("somebody holds the row")

    monkeypatch.setattr(lessons_, "flush", flush)
    levels = []
    for n in range(20):
        good = n in (2, 19)
        caplog.clear()
        await lessons_._report()
        levels.append([record.levelname for record in caplog.records if "what was let through" in record.message])
    assert levels[:2] == [["DEBUG"]] * 2, "a row is held for a moment now and then"
    assert levels[3:19] == [["DEBUG"]] * 4 + [["WARNING"]] + [["DEBUG"]] * 11
    assert levels[19] == ["WARNING"], "that it can be saved again"


async def test_an_answer_of_a_generation_that_is_over_widens_nothing(clock):
    facts = learnt_facts("p/a", 1)
    flows = Flows(lambda: 0.0, facts, clock.now)
    flight = await flows.enter("p/a")
    facts.update(learnt_facts("p/a", 2))
    flows.changed("p/a")
    flows.leave(flight, ("p/a",))
    assert (flight[0].flow.key, flight[0].flow.cap) == ("p/a", 1.0)
    assert [(report.key, report.answers.generation) for report in flows.collect()] == [("p/a", 1)]


async def test_where_a_limit_is_declared_nothing_has_to_be_found_out(clock):
    flows = Flows(lambda: 0.0, {}, clock.now)
    for _ in range(30):
        await flows.enter("p/a", limited=True)


async def test_a_long_rest_after_few_requests_limits_nothing(database, clock, make):
    """A spent window of three says little about the next one."""
    one = await make()
    await well(one, "p/a", 3)
    await refused(one, "p/a", throttled(40.0))
    clock.advance(60)
    for _ in range(30):
        permit = await one.admit("p/a")
        assert permit.draw is None
        await one.answered(permit, "p/a", OK, None)


@handler("ask", retry=Retry(max_attempts=None))
async def ask(job: Job[int]) -> None:
    (await job.client.get("/x")).raise_for_status()


async def test_a_worker_keeps_near_a_limit_that_nobody_told(database_url):
    """A real provider that lets two through in a second: a slow machine meets that limit, too."""
    fake = FakeProvider(
        Provider(name="quiet", base_url="https://quiet.example", anonymous=True), allowance=lambda _: Sliding(2)
    )
    with fake:
        fake.on("GET /x", {})
        app = Resilient(database_url, handlers=[ask], providers=[fake.provider], upgrade=True)
        async with app:
            items = [Item(n, resource_key="quiet/a") for n in range(16)]
            app.enqueue_many_sync(ask, items)
            worker = app.worker(concurrency=8)
            running = asyncio.create_task(worker.run())
            async with asyncio.timeout(LIMIT):
                while sum(seen.status == 200 for seen in fake.log) < 16:  # noqa: ASYNC110 - another process's log
                    await asyncio.sleep(0.1)
            worker.stop()
            await running
            info = await app.resources.get("quiet/a")
            assert info.learnt["kind"] == "rate"
            assert "quiet/a is asked no faster than" in (await app.resources.why("quiet/a")).text
            assert len([line for line in fake.log if line.status == 429]) < 16, "each job its own"
            changed = await app.resources.limit("quiet/a", forget=True)
            assert changed.keys == ("quiet/a",)
            assert (await app.resources.get("quiet/a")).learnt is None


async def reserved(gate, clock):
    """A gate that was taught a rate of one in two seconds, and the place of the second request from now on."""
    await well(gate, "p/a", 1)
    await refused(gate, "p/a", throttled(2.0))
    clock.advance(10)
    await well(gate, "p/a", 1)
    return await gate.reserve("p/a", 1.0)


async def test_a_place_is_waited_for_before_the_request_and_used_by_it(database, clock, make):
    one = await make(policies=Policies(learn={"p/*": (1.0, 1.0)}))
    reservation = await reserved(one, clock)
    draws = database.transaction_sync(limits.read, ["p/a"])
    permit = await one.admit("p/a", reservation=reservation)
    assert permit.draw is reservation.draw
    assert database.transaction_sync(limits.read, ["p/a"]) == draws, "nothing is drawn a second time"
    await one.answered(permit, "p/a", OK, None)
    assert one._lessons.flows._flows["p/a"].in_flight == 0
    assert (await one.admit("p/a", reservation=reservation)).draw is not reservation.draw, "it is used once"


@pytest.mark.parametrize("how", ["nobody comes", "another cost", "a rest"])
async def test_a_place_that_is_not_used_is_given_back(database, clock, make, how):
    one = await make(policies=Policies(learn={"p/*": (1.0, 1.0)}))
    reservation = await reserved(one, clock)
    flow, given = one._lessons.flows._flows["p/a"], []
    one._drawing.give_back = given.append
    assert flow.in_flight == 1
    if how == "a rest":
        await one.cool_down("p/a", clock.now() + timedelta(seconds=60))
        with pytest.raises(ResourceStopped):
            await one.admit("p/a", reservation=reservation)
    elif how == "another cost":
        one.abandoned(await one.admit("p/a", 0.5, reservation=reservation))
    one.release(reservation)
    one.release(reservation)
    assert flow.in_flight == 0
    assert given == [reservation.draw]


@handler("late", retry=Retry(max_attempts=None))
async def late(job: Job[int]) -> None:
    await asyncio.sleep(0.1)
    await job.client.get("/x")


@handler("silent")
async def silent(job: Job[int]) -> None:
    """It sends nothing."""


@pytest.mark.parametrize("kind", [ask, late, silent], ids=lambda kind: kind.kind)
async def test_a_job_that_begins_with_a_request_waits_for_its_place_first(database_url, monkeypatch, kind):
    """If a rest begins meanwhile, its handler was not called, and that was no execution."""
    if kind is ask:  # a busy machine may be slow to its first line
        monkeypatch.setattr(backend, "AT_FIRST", LIMIT)
    fake = FakeProvider(Provider(name="quiet", base_url="https://quiet.example", anonymous=True))
    with fake:
        fake.on("GET /x", {})
        app = Resilient(database_url, handlers=[ask, late, silent], providers=[fake.provider], upgrade=True)
        async with app:
            asked, habits, jobs = [], {}, []
            for n in range(2):
                worker = app.worker()

                async def stopped(key, cost, gate=worker.gate):
                    asked.append((key, cost))
                    until = gate.now() + timedelta(hours=1)
                    await gate.cool_down(key, until)
                    raise ResourceStopped(key, "cooldown", until)

                worker.gate.reserve, worker.gate.is_taught = stopped, lambda key: key == "quiet/a"
                worker.wire._habits = habits
                done = await app.enqueue(kind, n, resource_key="quiet/a")
                await worker.drain(timeout=LIMIT)
                jobs.append(await app.jobs.get(done.id))
            waits = kind is ask
            assert (jobs[0].state, jobs[0].executions) == ("succeeded", 1), "nobody knew how it begins"
            assert (jobs[1].state, jobs[1].executions) == (("ready", 0) if waits else ("succeeded", 1))
            assert (jobs[1].deferrals, asked) == ((1, [("quiet/a", 1.0)]) if waits else (0, []))


async def test_of_what_a_provider_says_is_left_a_quarter_is_on_its_way_at_most(database, clock, make):
    one = await make()
    await well(one, "p/a", 20)  # so that nothing else holds requests back
    permit = await one.admit("p/a")
    budget = Budget("hourly", limit=100, remaining=8, reset_at=clock.now() + timedelta(seconds=60))
    await one.answered(permit, "p/a", AnswerFacts(200, budgets=(budget,)), None)
    tasks = [asyncio.create_task(one.admit("p/a")) for _ in range(6)]
    await asyncio.wait(tasks, timeout=2 * PAUSE)
    assert sum(task.done() for task in tasks) == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def stating(clock, remaining, *names, limit=100):
    """An answer that says so much is left of each of these budgets for a minute."""
    reset_at = clock.now() + timedelta(seconds=60)
    return AnswerFacts(200, budgets=tuple(Budget(name, limit, remaining, reset_at, 60.0) for name in names))


async def stated(gate, key, answer):
    await gate.answered(await gate.admit(key), key, answer, None)


async def test_what_answers_state_is_known_to_the_claims_of_every_process(database, clock, make):
    one = await make()
    await stated(one, "p/a", stating(clock, 9, "core"))
    assert one.stated.limits == {}, "one answer is not steady"
    await stated(one, "p/a", stating(clock, 8, "core"))
    (limit,) = one.stated.limits["p/a"]
    await one.flush()
    states = database.transaction_sync(limits.read, ["p/a"])["p/a"]
    facts = database.transaction_sync(resources.read, ["p/a"])["p/a"]
    assert states[limit.name].remaining == 8
    level = Level(facts, Policy(), states, 3, (limit,))
    verdict = admit([level], 50, clock.now(), "w")
    assert (verdict.count, verdict.stop.gate) == (5, "limit"), "three run, and each is taken for one more"
    assert admit([replace(level, running=8)], 50, clock.now(), "w").count == 0
    clock.advance(61)
    assert admit([level], 50, clock.now(), "w").count == 50, "the window is over"


async def test_a_budget_that_only_some_requests_count_for_limits_none(clock, make):
    one = await make()
    for _ in range(5):
        await stated(one, "p/a", stating(clock, 9, "core"))
        await stated(one, "p/a", stating(clock, 1, "search"))
    assert one.stated.limits == {}


async def test_at_most_eight_budgets_of_a_resource_are_kept(clock, make):
    one = await make()
    for _ in range(3):
        await stated(one, "p/a", stating(clock, 9, *[f"b{n}" for n in range(30)]))
    assert len(one.stated.limits["p/a"]) == MOST_STATED


def test_a_budget_whose_size_changes_with_every_answer_is_no_limit(clock):
    kept, names = UndeclaredBudgets(), set()
    for n in range(1, 1_000):
        budget = Budget("core", limit=n, remaining=1, reset_at=clock.now() + timedelta(seconds=60))
        names |= {limit.name for limit, _ in kept.take_in("p/a", [(budget, 60.0)], clock.now().timestamp())}
    assert (names, kept.limits) == (set(), {})


async def test_what_is_left_of_a_window_can_be_spread_over_it(clock, make):
    even = Policies(pace={"p/*": "even"})
    one, other = await make(policies=even), await make(policies=even)
    for gate in (one, other):
        await stated(gate, "p/a", stating(clock, 12, "core"))
        await stated(gate, "p/a", stating(clock, 10, "core"))
        await gate.flush()
    clock.advance(1)
    await stated(one, "p/a", OK)
    with pytest.raises(ResourceStopped) as stopped:  # the next place is 6 s away, whichever process asks
        await other.admit("p/a")
    assert stopped.value.gate == "limit"


def ending(clock, seconds, remaining=50):
    """An answer that says so much of 100 is left for so long, and not how long the window is."""
    return AnswerFacts(200, budgets=(Budget("core", 100, remaining, clock.now() + timedelta(seconds=seconds)),))


async def test_what_answers_say_is_left_is_believed_for_a_day(database, clock, make):
    one = await make()
    for _ in range(2):
        await stated(one, "p/a", ending(clock, 50 * 365 * 86_400))
    await one.flush()
    (state,) = database.transaction_sync(limits.read, ["p/a"])["p/a"].values()
    assert state.reset_at == pytest.approx(clock.now().timestamp() + 86_400)


async def test_what_is_left_is_spread_over_its_own_window(clock, make):
    """Not over the next longer usual one, an hour; and an end that is taken back does not slow what follows."""
    one = await make(policies=Policies(pace={"p/*": "even"}))
    for passed, seconds, per in ((0, 900, 900), (20, 880, 900), (20, 86_400, 86_400), (20, 60, 60)):
        clock.advance(passed)
        for _ in range(2):
            await one.answered(one._new_permit("p/a", ()), "p/a", ending(clock, seconds), None)
        assert one.stated.limits["p/a"][0].per == pytest.approx(per)
    clock.advance(61)
    await one.answered(one._new_permit("p/a", ()), "p/a", ending(clock, 30), None)
    assert one.stated.limits["p/a"][0].per == pytest.approx(30), "another window"


async def test_a_part_of_a_window_is_kept_for_urgent_jobs(clock):
    policy = Policies(reserve={"p/*": {5: 0.2, 9: 0.1}}).for_key("p/a")
    limit = Limit.stated("core", 100, 60)
    state = LimitState(0.0, 40.0, clock.now().timestamp() + 60)
    level = Level(resources.ResourceFacts("p/a"), policy, {limit.name: state}, 0, (limit,))
    counts = {n: admit([level], 50, clock.now(), "w", n).count for n in (0, 5, 9)}
    assert counts == {0: 10, 5: 30, 9: 40}
    spent = replace(level, limits={limit.name: state._replace(remaining=25.0)})
    verdict = admit([spent], 50, clock.now(), "w", 0)
    assert (verdict.count, verdict.stop.code, verdict.stop.until) == (0, "reserve", clock.now() + timedelta(seconds=60))


async def test_why_says_what_is_left_and_for_whom(database, clock, make):
    shares = {"p/*": {5: 0.2}}
    app, gate = Resilient(database, reserve=shares), await make(policies=Policies(reserve=shares))
    jobs = {n: await app.enqueue(CALL, {}, resource_key="p/a", priority=n) for n in (0, 5)}
    for remaining in (16, 15):
        await stated(gate, "p/a", stating(clock, remaining, "core"))
    await gate.flush()
    whys = {n: await app.jobs.why(job.id) for n, job in jobs.items()}
    (reason,) = [one for one in whys[0].reasons if one.code == "limit"]
    assert reason.text.startswith("p/a has 15 of 100 requests left until ")
    assert reason.text.endswith(", as its answers say (core): they are kept for jobs of priority 5 and above.")
    assert "kept for jobs of priority 5" in str(whys[0].to_json()["reasons"])
    assert "limit" not in [one.code for one in whys[5].reasons]
    clock.advance(61)
    assert "limit" not in [one.code for one in (await app.jobs.why(jobs[0].id)).reasons], "the window is over"


async def test_why_says_that_nothing_is_left_of_a_budget_that_nobody_declared(database, clock, make):
    app, gate = Resilient(database), await make()
    job = await app.enqueue(CALL, {}, resource_key="p/a")
    for remaining in (2, 1):
        await stated(gate, "p/a", stating(clock, remaining, "core"))
    await gate.admit("p/a")
    await gate.flush()
    database.transaction_sync(lambda c, d: d.run(c, "UPDATE {rate_limit} SET remaining = 0"))
    assert "p/a has 0 of 100 requests left until " in (await app.jobs.why(job.id)).text
    assert "p/a has 0 of 100 requests left until " in (await app.resources.why("p/a")).text


@pytest.mark.parametrize("words", [{"pace": {"p": "odd"}}, {"reserve": {"p": {5: 1.5}}}, {"reserve": {"p": 0.2}}])
def test_a_pace_or_a_reserve_that_cannot_be_meant(words):
    with pytest.raises(InvalidInput):
        Policies(**words)


def test_fairness_of_shares():
    """Jain's index, as the bench prints it: 1 if all accounts got as much, 1/n if one got everything."""
    meter = replace(METERS["application"], accounts=4)
    even = [Line(n / 10, str(n % 4), passed=True) for n in range(400)]
    assert figures(even, meter, 120.0, 1.0)["fairness"] == 1.0
    assert figures([replace(line, account="0") for line in even], meter, 120.0, 1.0)["fairness"] == 0.25


async def answers(gate, clock, seconds, count=20, at_once=4):
    """So many good answers, each after so long, a few at a time."""
    for _ in range(0, count, at_once):
        permits = [await gate.admit("p/a") for _ in range(at_once)]
        clock.advance(seconds)
        for permit in permits:
            await gate.answered(permit, "p/a", OK, None)
        await gate.flush()


async def test_overload_without_429_teaches_a_limit_where_the_facts_say_so(database_url):
    """A 503 that the facts call a throttle, of a provider that tells nothing else; without the rule it teaches none."""
    rule = Rule(FailureKind.THROTTLED, status=503, header={"x-overload": "."})
    for name, errors in (("ruled", Errors(rules=(rule,))), ("plain", Errors())):
        fake = FakeProvider(Provider(name=name, base_url=f"https://{name}.example", anonymous=True, errors=errors))
        answers = iter([Reply(200), Reply(200), Reply(503, headers={"x-overload": "1", "retry-after": "1"})])
        with fake:
            fake.on("GET /x", lambda _, answers=answers: next(answers, Reply(200)))
            app = Resilient(database_url, handlers=[ask], providers=[fake.provider], upgrade=True)
            async with app:
                await app.enqueue_many(ask, [Item(n, resource_key=f"{name}/a") for n in range(3)])
                await app.worker(concurrency=1).drain(timeout=LIMIT)
                info = await app.resources.get(f"{name}/a")
        assert [seen.status for seen in fake.log] == [200, 200, 503]
        assert (info.learnt is not None) == (name == "ruled")


async def test_who_waits_for_a_learnt_limit_costs_no_row_and_no_line(database, clock, make, caplog):
    """Thirty jobs behind a taught rate, looked at a hundred times: their key is parked, and none of them is touched."""
    policies = Policies(learn={"p/*": (0.01, 0.01)})  # one request in a hundred seconds
    one = await make(policies=policies)
    await well(one, "p/a", 1)
    await refused(one, "p/a", throttled(2.0))
    clock.advance(10)  # past the rest
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "p/a", "{}") for _ in range(30)])
    worker = Dispatcher(
        database, worker_id="w", kinds=["k"], concurrency=50, lease=timedelta(seconds=60), policies=policies,
        monotonic=lambda: clock.now().timestamp(), rng=random.Random(1),
    )  # fmt: skip

    def rows():
        look = "SELECT id, version, state, executions, deferrals, updated_at FROM {job} ORDER BY id"
        return database.transaction_sync(lambda c, d: [tuple(row) for row in d.run(c, look)])

    first, _ = await worker.poll(50)
    assert (len(first.jobs), first.stops["p/a"].gate) == (1, "limit"), "a rate, no rest"
    await one.admit("p/a")  # its request
    before, jobs_started = rows(), 0
    caplog.set_level(logging.INFO, "resilient")
    caplog.clear()
    for _ in range(100):
        claimed, _ = await worker.poll(50)
        jobs_started += len(claimed.jobs) if claimed else 0
        clock.advance(0.1)
    assert jobs_started == 0
    assert rows() == before
    assert len(caplog.records) <= 1


async def test_answers_that_take_twice_as_long_are_a_limit_where_the_program_says_so(database, clock, make):
    policies = Policies(learn={"p/*": "latency"}, limits={"p/*": [Limit(1000, 1, burst=1000)]})
    one = await make(policies=policies)
    await answers(one, clock, 0.1)
    await answers(one, clock, 0.15)
    facts = database.transaction_sync(resources.read, ["p/a"])["p/a"]
    assert facts.learnt is None
    await answers(one, clock, 0.3)
    s = learnt(database, "p/a")
    assert (s.kind, s.slots, s.throttles) == ("slots", 1, 1), "four at once were twice too many, and more"
    assert one.stop("p/a") is None, "nobody rests"
    await answers(one, clock, 0.1)
    assert learnt(database, "p/a").throttles == 1


async def test_an_answer_does_not_wait_for_a_row_that_a_program_holds(postgres_database, clock):
    policies = Policies(learn={"p/*": "latency"}, limits={"p/*": [Limit(1000, 1, burst=1000)]})
    one = Gate(postgres_database, policies, owner="w")
    await one.start()
    await answers(one, clock, 0.1)
    await answers(one, clock, 0.15)
    with postgres_database.sync_engine.begin() as c:
        c.execute(sa.text("SELECT 1 FROM resilient_resource WHERE key = 'p/a' FOR UPDATE"))
        async with asyncio.timeout(LIMIT / 5):
            for _ in range(20):
                permit = await one.admit("p/a")
                clock.advance(0.4)
                await one.answered(permit, "p/a", OK, None)
    assert learnt(postgres_database, "p/a") is None
    await answers(one, clock, 0.4)
    assert learnt(postgres_database, "p/a").kind == "slots"
    await one.close()


async def test_latency_teaches_nothing_unless_the_program_says_so(database, clock, make):
    one = await make(policies=Policies(limits={"p/*": [Limit(1000, 1, burst=1000)]}))
    for seconds in (0.1, 0.1, 1.0):
        await answers(one, clock, seconds)
    assert database.transaction_sync(resources.read, ["p/a"])["p/a"].learnt is None


def test_what_stays_slow_is_usual_in_the_end():
    latency = Latency()
    times = [latency.take_in(seconds) for seconds in [0.1] * 20 + [1.0] * 20 * 12]
    assert [round(x) for x in times if x is not None] == [10] * 10


def test_one_slow_block_does_not_make_the_next_one_usual():
    """1.9 times as long as usual stays within it; the usual time moves towards it by a tenth."""
    latency = Latency()
    for seconds in [0.1] * 20 + [1.0] * 20 + [0.19] * 20:
        latency.take_in(seconds)
    times = [latency.take_in(0.3) for _ in range(20)]
    assert times[-1] == pytest.approx(0.3 / 0.109)


async def test_what_is_learnt_outlives_the_process_that_learnt_it(database_url, open_database, clock):
    """A database and a gate of their own, as after a restart: the same rate, and no refusal to learn it from."""
    before = Gate(open_database(database_url), Policies(), owner="w")
    await well(before, "p/a", 5)
    await refused(before, "p/a")
    await before.close()
    clock.advance(60)
    database = open_database(database_url)
    after = Gate(database, Policies(), owner="x")
    permit = await after.admit("p/a")
    assert [limit.name for _, limit in permit.draw.limits] == [LEARNT]
    assert learnt(database, "p/a").rate == pytest.approx(5 * CLOSE)
    after.abandoned(permit)
    await after.close()
