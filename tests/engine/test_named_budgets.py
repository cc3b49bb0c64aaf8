"""Budgets that a provider names: one of them is throttled, and the rest of the account goes on."""

import asyncio
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import (
    AnswerFacts,
    BudgetFields,
    Failure,
    FailureKind,
    Item,
    Job,
    Provider,
    Resilient,
    ResourceStopped,
    Retry,
    WaitDialect,
    handler,
)
from resilient.core.base.resource_key import BUDGET, account, is_budget, of_budget
from resilient.core.gates.learnt import CLOSE
from resilient.core.gates.policy import Policies, Tenancy
from resilient.engine.gates.budgets import MOST, BudgetNames, shape
from resilient.engine.gates.gate import Gate
from resilient.store.gates import controls, resources
from resilient.testing import FakeProvider
from resilient.testing.fake.meter import Wait

FIELDS = (BudgetFields("core", remaining="x-left", named_by="x-budget"),)
WAITS = WaitDialect(budgets=FIELDS)
SEARCH = "p/a/budget:search"


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/search/issues", "/search/issues"),
        ("/users/17/posts", "/users/*/posts"),
        ("/v3/objects", "/*/objects"),
        ("/files/" + "a" * 40, "/files/*"),
    ],
)
def test_what_paths_have_in_common(path, form):
    assert shape(path) == form


def taught():
    names = BudgetNames()
    for n in range(5):
        names.take_in("p/a", "find", "GET", f"/search/{n}", "search")
        names.take_in("p/a", "read", "GET", f"/things/{n}", "core")
    return names


def test_what_a_request_will_count_for_is_what_those_like_it_did():
    names = taught()
    assert names.key_for("p/b", "find", "GET", "/search/99") == "p/b/budget:search"
    assert names.key_for("p/b", "find", "GET", "/search/other/form") == "p/b/budget:search", "as all that begin so"
    assert names.key_for("p/b", "find", "POST", "/search/99") == "p/b", "nobody knows"
    assert names.key_for("p/b/deeper", "find", "GET", "/search/99") == "p/b/deeper", "the facts say that it has its own"
    assert names.key_for("q/b", "find", "GET", "/search/99") == "q/b"
    names.take_in("p/a", "find", "GET", "/search/code", "code")
    assert names.key_for("p/b", "find", "GET", "/search/unheard") == "p/b", "they differ"


def test_the_kinds_of_a_budget_are_those_that_lately_counted_for_it_alone():
    names = taught()
    assert (names.by_kind(SEARCH), names.first_of("p/b", "find")) == (["find"], "p/b/budget:search")
    assert names.by_account(["p/a", SEARCH, "p/b/budget:core"]) == {
        "p/a": {"find": SEARCH},
        "p/b": {"read": "p/b/budget:core"},
    }
    names.take_in("p/a", "find", "GET", "/things/1", "core")
    assert (names.by_kind(SEARCH), names.first_of("p/b", "find")) == ([], "p/b")
    for _ in range(5):
        names.key_for("p/b", "find", "GET", "/search/1")
    assert names.by_kind(SEARCH) == ["find"], "those that are stopped count, too"


def test_one_name_alone_is_the_accounts_own():
    names = BudgetNames()
    names.take_in("p/a", "find", "GET", "/search/1", "search")
    assert (names.key_of("p/a", "search"), names.key_for("p/a", "find", "GET", "/search/1")) == (None, "p/a")
    names.split("p/a")
    assert names.key_of("p/a", "search") == SEARCH
    names = BudgetNames()
    names.take_in("p/a", "find", "GET", "/search/1", "search", apart=True)
    assert names.key_of("p/a", "search") == SEARCH, "the facts know another one"


def test_a_budget_with_an_unusual_name_becomes_its_accounts_again():
    names = BudgetNames()
    names.take_in("p/a", "find", "GET", "/search/1", "code search", apart=True)
    key = names.key_of("p/a", "code search")
    assert key == "p/a/budget:code-search"
    names.fold(key)
    assert names.key_of("p/a", "code search") is None


def test_what_one_accounts_host_names_binds_no_other_account():
    names = BudgetNames(lambda key: Tenancy.APART if key.startswith("own/") else Tenancy.SHARED)
    for n in range(4 * MOST):
        names.take_in("own/evil", "find", "GET", "/search/1", f"b{n}", apart=True)
    names.take_in("own/good", "find", "GET", "/search/1", "search", apart=True)
    assert names.key_of("own/good", "search") == "own/good/budget:search"
    assert names.key_for("own/good", "find", "GET", "/search/1") == "own/good/budget:search"
    assert names.key_for("own/new", "find", "GET", "/search/1") == "own/new", "nobody has said anything of it"


def test_of_ever_new_names_eight_are_budgets():
    names = BudgetNames()
    for n in range(1_000):
        names.take_in("p/a", "find", "GET", "/search/1", f"b{n}")
    assert [n for n in range(1_000) if names.key_of("p/a", f"b{n}")] == list(range(MOST))


NAMES = [f"b{n}" for n in range(2 * MOST)]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["counts", "counts apart", "split", "fold", "asks"]),
        st.sampled_from(["p/a", "p/b", "q/a"]),
        st.sampled_from(NAMES),
        st.sampled_from(["find", "read"]),
        st.sampled_from(["/search/1", "/search/code", "/things/7", "/", ""]),
    ),
    max_size=60,
)


@given(ACTS)
def test_whatever_is_named_eight_budgets_of_an_account_are_learnt_apart_at_most(acts):
    names, folded = BudgetNames(), set()
    for act, key, name, kind, path in acts:
        root = key.partition("/")[0]
        if act == "split":
            names.split(key)
        elif act == "fold":
            names.fold(f"{key}/{BUDGET}{name}")
            folded.add((root, name))
        elif act == "asks":
            budget = names.key_for(key, kind, "GET", path)
            assert budget == key or (is_budget(budget) and account(budget) == key), "never another account's"
        else:
            is_new = root not in names.groups or name not in names.groups[root].names
            names.take_in(key, kind, "GET", path, name, apart=act == "counts apart")
            folded -= {(root, name)} if is_new else set()
        for one in ("p/a", "p/b", "q/a"):
            apart = {name for name in NAMES if names.key_of(one, name) is not None}
            assert len(apart) <= MOST
            assert not any((one.partition("/")[0], name) in folded for name in apart), "that is its account's own"
            for budget in (of_budget(one, name) for name in apart):
                assert all(names.first_of(one, kind) == budget for kind in names.by_kind(budget))


@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_what_paths_have_in_common_is_common_to_itself(path):
    form = shape(path)
    assert shape(form) == form
    assert form.count("/") == path.count("/")


@pytest.fixture
async def make(database):
    """A gate, as a worker of its own has one; it knows two budgets of `p`."""
    made = []

    async def make(*, knows=True, **options):
        gate = Gate(database, Policies(**options), owner=f"w{len(made)}")
        if knows:
            gate.names = taught()
        await gate.start()
        made.append(gate)
        return gate

    yield make
    for gate in made:
        await gate.close()


async def ask(gate, path="/search/1", name="search", failure=None):
    key = gate.names.key_for("p/a", "find", "GET", path)
    permit = await gate.admit(key)
    gate.names.take_in("p/a", "find", "GET", path, name)
    await gate.answered(permit, "p/a", AnswerFacts(429 if failure else 200, budget=name), failure)


def throttled(seconds=1.0):
    return Failure(FailureKind.THROTTLED, status=429, code="http_429", retry_in=seconds)


def facts_of(database, *keys):
    return database.transaction_sync(resources.read, keys)


async def test_a_named_budget_rests_and_learns_alone(database, clock, make):
    one, other = await make(), await make()
    for _ in range(3):
        await ask(one)
    assert SEARCH not in facts_of(database, SEARCH), "nothing is written before its first throttle"
    await ask(one, failure=throttled())
    facts = facts_of(database, SEARCH, "p/a")
    assert facts[SEARCH].learnt.rate == pytest.approx(3 * CLOSE)
    assert (facts["p/a"].learnt, facts["p/a"].blocked_until) == (None, None)
    for gate in (one, other):
        with pytest.raises(ResourceStopped) as stopped:
            await ask(gate)
        assert (stopped.value.resource, stopped.value.gate) == (SEARCH, "cooldown")
        await ask(gate, "/things/1", "core")
    clock.advance(5)
    other.forget([SEARCH])
    permit = await other.admit(SEARCH)
    assert [key for key, _ in permit.draw.limits] == [SEARCH], "drawn by its own row"
    other.abandoned(permit)


async def test_where_nothing_may_be_learnt_about_accounts_their_budgets_learn_nothing(database, make):
    one = await make(learn={"p/*": False})
    await ask(one)
    await ask(one, failure=throttled())
    assert facts_of(database, SEARCH)[SEARCH].learnt.kind == "free"


async def test_a_process_that_knows_nothing_hears_of_it_from_the_row(database, make):
    one, fresh = await make(), await make(knows=False)
    await ask(one)
    await ask(one, failure=throttled(60.0))
    await ask(fresh, failure=throttled(60.0))
    assert facts_of(database, "p/a")["p/a"].blocked_until is None
    with pytest.raises(ResourceStopped):
        await ask(fresh)
    alone = await make(knows=False)
    alone.names.take_in("p/b", "find", "GET", "/search/1", "search")
    await alone.answered(await alone.admit("p/b"), "p/b", AnswerFacts(429, budget="search"), throttled())
    assert facts_of(database, "p/b")["p/b"].blocked_until is not None, "it names no other budget, and nobody knows one"


async def test_the_ninth_budget_is_its_accounts(database, clock, make):
    def teach(name):
        return database.transaction_sync(
            controls.cool_down, f"p/a/budget:{name}", clock.now() + timedelta(seconds=9), "http_429", 0.0
        )[0].key

    assert [teach(f"b{n}") for n in range(controls.MOST_BUDGETS)] == [f"p/a/budget:b{n}" for n in range(8)]
    assert teach("b3") == "p/a/budget:b3", "it is one of them"
    one = await make()
    await ask(one, failure=throttled(60.0))
    facts = facts_of(database, "p/a", SEARCH)
    assert facts["p/a"].blocked_until is not None
    assert SEARCH not in facts or facts[SEARCH].learnt is None
    assert one.names.key_of("p/a", "search") is None, "from now on it is asked as a part of its account"
    clock.advance(7200)
    assert teach("late") == "p/a/budget:late", "what was quiet for an hour does not count"


class Closed:
    """So many pass, and then nothing for an hour."""

    def __init__(self, most):
        self.most = most

    def ask(self, _):
        self.most -= 1
        return None if self.most >= 0 else Wait(3600.0)

    def leave(self, _):
        pass


@handler("find", retry=Retry(max_attempts=None))
async def find(job: Job[int]) -> None:
    (await job.client.get(f"/search/{job.payload}")).raise_for_status()


@handler("read", retry=Retry(max_attempts=None))
async def read(job: Job[int]) -> None:
    (await job.client.get(f"/things/{job.payload}")).raise_for_status()


async def test_throttling_one_budget_does_not_slow_the_other(database_url):
    """Its jobs wait unclaimed; those of the other budget, of the same account and behind them in line, all run."""
    facts = Provider(name="p", base_url="https://p.example", anonymous=True, waits=WAITS)
    fake = FakeProvider(
        facts,
        allowance=lambda name: Closed(6 if name.endswith("/search") else 10_000),
        budget=lambda path: path.split("/")[1].replace("things", "core"),
    )
    with fake:
        fake.on("GET /search/*", {})
        fake.on("GET /things/*", {})
        app = Resilient(database_url, handlers=[find, read], providers=[fake.provider], upgrade=True)
        async with app:

            async def run(searches, things):
                for kind, count in ((find, searches), (read, things)):
                    items = [Item(n, resource_key="p/a") for n in range(count)]
                    await app.enqueue_many(kind, items)
                worker = app.worker(concurrency=4)
                async with asyncio.timeout(60):
                    await worker.drain()

            async def states():
                jobs = await app.jobs.list(limit=200)
                return [sum((job.kind, job.state) == (kind, "succeeded") for job in jobs) for kind in ("find", "read")]

            await run(6, 6)
            assert await states() == [6, 6]
            await run(20, 20)
            assert await states() == [6, 26]
            await run(5, 5)
            assert await states() == [6, 31], "of another process, too"
            refused = [seen for seen in fake.log if seen.status == 429]
            assert len(refused) <= 2 * 4 * 2, "what was in flight when it was first refused"
            jobs = [job for job in await app.jobs.list(kind="find", limit=200) if job.state != "succeeded"]
            assert (len(jobs), {job.state for job in jobs} <= {"ready", "scheduled"}) == (25, True)
            assert sum(job.executions == 0 for job in jobs) >= 5, "most wait unclaimed"
            account = await app.resources.get("p/a")
            assert (account.gate, list(account.budgets)) == (None, ["search"])
            assert account.budgets["search"]["until"] is not None
            why = (await app.jobs.why(jobs[0].id)).text
            assert "What counts for search waits apart: p/a/budget:search was told to slow down" in why
            await app.resources.reset("p/a")
            assert (await app.resources.get("p/a")).budgets == {}
            await run(0, 0)
            assert sum(seen.status == 429 for seen in fake.log) > len(refused), "they go on"


@pytest.mark.parametrize("which", ["p/a", SEARCH])
async def test_what_is_learnt_about_a_budget_is_forgotten_alone_or_with_its_account(
    database_url, database, make, which
):
    one = await make()
    await ask(one)
    await ask(one, failure=throttled())
    async with Resilient(database_url, handlers=[find]) as app:
        learnt = (await app.resources.get("p/a")).budgets["search"]["learnt"]
        assert learnt["kind"] == "rate"
        assert (await app.resources.get(SEARCH)).learnt == learnt
        await app.resources.limit(which, forget=True)
        assert (await app.resources.get(SEARCH)).learnt is None
