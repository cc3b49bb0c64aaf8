"""Schedules for each account, on real databases: they follow the connections, spread, tick once over all workers."""

import asyncio
import itertools
import json
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from resilient import (
    BadResourceKey,
    Bearer,
    Credentials,
    InvalidInput,
    Provider,
    Resilient,
    Schedule,
    SetupError,
    handler,
)
from resilient.engine.schedules import per_account
from resilient.store.schedules import accounts as schedule_accounts
from resilient.store.schedules import programs
from tests.helpers import until

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
GITHUB = Provider(name="github", base_url="http://127.0.0.1:1", auth=(Bearer(),))


@handler("sync", model=dict[str, int])
async def sync(job):
    pass


def hourly(**over):
    return Schedule(sync, {"n": 1}, **{"every": "1h", "for_each": "github/*", "name": "s", **over})


@pytest.fixture
def make(database_url, open_database, clock):
    from resilient.store.accounts.secrets import new_key

    key = new_key()

    def make(*schedules, handlers=(sync,), **options):
        return Resilient(
            open_database(database_url), handlers=list(handlers), schedules=schedules, providers=[GITHUB],
            secrets=[key], **options,
        )  # fmt: skip

    return make


async def test_a_version_with_another_sort_of_the_schedule_leaves_it_alone(make, clock):
    """Else one brings a job of no resource, the other moves a tick on that nobody served."""
    each, alone = hourly(), Schedule(sync, {"n": 1}, every="1h", resource_key="github/z", name="s")
    await connect(make(), "a")
    for before, after, key in ((alone, each, "github/a"), (each, alone, "github/z")):
        old, new = make(before), make(after)
        for app in (old, new):
            await app.schedules.tick()
        clock.advance(hours=2)
        assert await old.schedules.tick() == 0
        assert await new.schedules.tick() == 1
        assert [job.resource_key for job in await new.jobs.list(limit=1)] == [key]


async def connect(app, *names):
    for name in names:
        await app.connections.add(f"github/{name}", token="t")


def ticks_of(app):
    found = app.sync.jobs.list(order="oldest", limit=1000)
    return [(job.resource_key, job.tags["tick"]) for job in found]


def finish(app, state="succeeded", key=None):
    app.database.transaction_sync(
        lambda c, d: d.run(
            c,
            "UPDATE {job} SET state = :state, finished_at = :now, unique_lock = NULL"
            f" WHERE finished_at IS NULL{'' if key is None else ' AND resource_key = :key'}",
            {"state": state, "now": d.now(c), "key": key},
        )
    )


async def walk(app, clock, minutes, step=5):
    """Time goes by, minute by minute, and somebody ticks; returns how many jobs that brought."""
    done = 0
    for _ in range(0, minutes, step):
        clock.advance(minutes=step)
        done += await app.schedules.tick()
    return done


class TestDeclaration:
    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ({"resource_key": "github/a"}, InvalidInput, "give resource_key, or for_each"),
            ({"for_each": "github/a"}, InvalidInput, "is one key: say resource_key="),
            ({"for_each": "gi thub/*"}, BadResourceKey, "not a resource pattern"),
            ({"for_each": 5, "name": "n"}, InvalidInput, "a pattern, a function that tells"),
            (
                {"for_each": None, "resource_key": "a", "spread": True},
                InvalidInput,
                "spread= is for schedules for_each",
            ),
            (
                {"for_each": ["github/a", "gi thub/b"], "name": "n"},
                BadResourceKey,
                "schedule 'n': 'gi thub/b' is not a",
            ),
            ({"for_each": [5], "name": "n"}, BadResourceKey, "schedule 'n': 5 is not a resource key"),
            ({"spread": 1e300}, InvalidInput, "spread=1e.300 is longer than ten years"),
            ({"spread": -1}, InvalidInput, "a span of time must be positive"),
        ],
    )
    def test_mistakes(self, given, error, words):
        with pytest.raises(error, match=words):
            hourly(**given)

    def test_names_and_spans(self):
        assert Schedule(sync, every=60, for_each="github/*").name == "sync@github/*"
        assert Schedule(sync, every=60, for_each=list).name == "sync@list"
        assert hourly()._span() is None
        assert hourly(every=None, cron="@daily")._span() == timedelta()
        assert hourly(every=None, cron="@daily", spread=True)._span() is None
        assert hourly(spread="10m")._span() == timedelta(minutes=10)
        assert hourly(spread=False)._span() == timedelta()

    async def test_a_pattern_cannot_see_the_programs_own_table(self, make):
        with pytest.raises(SetupError, match="give for_each a function that tells their resource keys"):
            make(hourly(), credentials=Table())


class TestTicks:
    async def test_each_account_has_one_job_in_each_period_at_its_own_time(self, make, clock):
        app = make(hourly(tags={"of": "7"}, priority=3))
        await connect(app, *"abcdefgh")
        await app.schedules.tick()
        assert ticks_of(app) == []
        for _ in range(3):
            assert await walk(app, clock, 60) == 8
            finish(app)
        found = ticks_of(app)
        assert Counter(key for key, _ in found) == dict.fromkeys([f"github/{n}" for n in "abcdefgh"], 3)
        per_account = {key: {tick[14:] for k, tick in found if k == key} for key, _ in found}
        assert all(len(places) == 1 for places in per_account.values())  # the same minute and second every hour
        assert len({min(places) for places in per_account.values()}) == 8
        job = app.sync.jobs.list(limit=1)[0]
        assert (job.kind, job.payload, job.priority, job.tags["schedule"], job.tags["of"]) == (
            "sync", {"n": 1}, 3, "s", "7",
        )  # fmt: skip

    async def test_all_at_once_if_so_declared(self, make, clock):
        app = make(hourly(spread=False))
        await connect(app, *"abc")
        await app.schedules.tick()
        assert await walk(app, clock, 55) == 0
        clock.advance(minutes=5)
        assert await app.schedules.tick() == 3
        assert {tick for _, tick in ticks_of(app)} == {"2030-01-01T13:00:00Z"}

    async def test_new_accounts_are_found_and_broken_ones_left_out(self, make, clock):
        app = make(hourly())
        await connect(app, "a", "b", "c")
        await app.schedules.tick()
        assert await walk(app, clock, 60) == 3
        finish(app)
        await connect(app, "d")
        await app.connections.revoke("github/a")
        self.set_state(app, "github/b", "needs_reauth")
        clock.advance(minutes=1)
        await app.schedules.tick()
        assert [a.resource_key for a in await app.schedules.accounts("s")] == ["github/c", "github/d"]
        await walk(app, clock, 60)
        finish(app)
        assert {key for key, _ in ticks_of(app)[-2:]} == {"github/c", "github/d"}
        self.set_state(app, "github/b", "active")
        clock.advance(minutes=1)
        await app.schedules.tick()
        finish(app)
        await walk(app, clock, 60)
        assert {key for key, _ in ticks_of(app)[-3:]} == {"github/b", "github/c", "github/d"}

    def set_state(self, app, key, state):
        app.database.transaction_sync(
            lambda c, d: d.run(
                c,
                "UPDATE {grant} SET state = :state WHERE id = (SELECT grant_id FROM {connection}"
                " WHERE resource_key = :key)",
                {"state": state, "key": key},
            )
        )

    async def test_one_that_dies_between_two_looks_has_no_job(self, make, clock):
        app = make(hourly(spread=False))
        await connect(app, "a", "b")
        await app.schedules.tick()
        clock.set(NOON + timedelta(minutes=59, seconds=50))
        await app.schedules.tick()  # who they are is known for half a minute now
        self.set_state(app, "github/a", "needs_reauth")
        clock.advance(10)
        assert await app.schedules.tick() == 1
        assert ticks_of(app) == [("github/b", "2030-01-01T13:00:00Z")]

    async def test_many_workers_bring_one_job_for_each_account_and_tick(self, make, clock):
        apps = [make(hourly(overlap="allow")) for _ in range(4)]
        await connect(apps[0], *"abcdefghijkl")
        await asyncio.gather(*(app.schedules.tick() for app in apps))
        await apps[0].schedules.tick()  # each may have passed over the row, held by another: this one reads accounts
        for _ in range(24):
            clock.advance(minutes=5)
            await asyncio.gather(*(app.schedules.tick() for app in apps))
        found = ticks_of(apps[0])
        assert len(found) == len(set(found)) == 24

    async def test_a_tick_whose_transaction_fails_is_ticked_again(self, make, clock, monkeypatch):
        app = make(hourly(spread=False))
        await connect(app, "a", "b")
        await app.schedules.tick()
        clock.advance(hours=1)

        def fail(*_, **__):
            raise RuntimeError("the process died here")

        with monkeypatch.context() as patch:
            patch.setattr(schedule_accounts, "move_on", fail)
            assert await app.schedules.tick() == 0
        assert ticks_of(app) == []
        assert await make(hourly(spread=False)).schedules.tick() == 2

    async def test_ten_thousand_accounts_take_many_short_transactions(self, make, clock, monkeypatch):
        app = make(hourly(spread=False, for_each=lambda: [f"github/{n}" for n in range(10_000)]))
        await app.schedules.tick()
        transaction, counts = app.database.transaction, [0]

        async def counting(*arguments):
            result = await transaction(*arguments)
            counts.append(await transaction(lambda c, d: d.run(c, "SELECT count(*) FROM {job}").scalar()))
            return result

        monkeypatch.setattr(app.database, "transaction", counting)
        clock.advance(hours=1)
        assert await app.schedules.tick() == 10_000
        assert int(await app.jobs.count(limit=20_000)) == 10_000
        assert max(after - before for before, after in itertools.pairwise(counts)) <= 500  # some 50 ms each
        (info,) = await app.schedules.list()
        assert (info.accounts, info.next_at) == (10_000, NOON + 2 * HOUR)


class TestOverlap:
    async def test_skip_is_decided_for_each_account_alone(self, make, clock):
        app = make(hourly())
        await connect(app, "a", "b")
        await app.schedules.tick()
        await walk(app, clock, 60)
        finish(app, key="github/a")
        await walk(app, clock, 60)
        assert Counter(key for key, _ in ticks_of(app)) == {"github/a": 2, "github/b": 1}
        finish(app, "dead")
        assert await walk(app, clock, 60) == 2

    async def test_allow(self, make, clock):
        app = make(hourly(overlap="allow"))
        await connect(app, "a", "b")
        await app.schedules.tick()
        assert await walk(app, clock, 180) == 6


class TestMissed:
    @pytest.mark.parametrize(("catch_up", "count"), [("latest", 1), ("skip", 0), ("all", 9)])
    async def test_after_a_night(self, make, clock, catch_up, count):
        declared = hourly(catch_up=catch_up, overlap="allow", spread="10m")
        app = make(declared)
        await connect(app, "a", "b")
        await app.schedules.tick()
        clock.advance(hours=8, minutes=40)
        assert await make(declared).schedules.tick() == 2 * count
        assert await walk(app, clock, 40, 1) == 2

    async def test_all_for_many_accounts_goes_in_small_steps(self, make, clock):
        keys = [f"github/{n}" for n in range(12)]
        app = make(hourly(every="1m", catch_up="all", overlap="allow", for_each=keys, spread=False))
        await app.schedules.tick()
        clock.advance(minutes=30)
        assert await app.schedules.tick() == 12 * 30


class TestSources:
    async def keys(self, make, source):
        app = make(hourly(for_each=source, name="f"), credentials=Table())
        await app.schedules.tick()
        return [a.resource_key for a in await app.schedules.accounts("f")]

    async def test_functions_of_every_sort(self, make):
        async def coroutine():
            return ["github/a", "github/b"]

        async def generator():
            yield "github/a"
            yield "github/b"

        for source in (lambda: iter(["github/a", "github/b"]), coroutine, generator, {"github/a", "github/b"}):
            assert await self.keys(make, source) == ["github/a", "github/b"]

    async def test_accounts_that_come_and_go(self, make, clock):
        keys = ["github/a", "github/b"]
        app = make(hourly(for_each=lambda: keys))
        await app.schedules.tick()
        keys[:] = ["github/b", "github/c"]
        clock.advance(minutes=1)
        await app.schedules.tick()
        assert [a.resource_key for a in await app.schedules.accounts("s")] == keys

    async def test_a_grant_of_theirs_that_died_has_no_ticks(self, make, clock):
        app = make(hourly(for_each=["github/a", "github/b"], spread=False), credentials=Table())
        await app.credentials("github/a")
        await app.schedules.tick()
        app.database.transaction_sync(lambda c, d: d.run(c, "UPDATE {grant} SET state = 'needs_reauth'"))
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1
        assert [key for key, _ in ticks_of(app)] == ["github/b"]
        await app.grants.close()

    async def test_a_plain_function_runs_in_a_thread_and_a_slow_one_has_an_end(self, make, clock, monkeypatch, caplog):
        threads = []

        def plain():
            threads.append(threading.current_thread() is threading.main_thread())
            yield "github/a"

        assert await self.keys(make, plain) == ["github/a"]
        assert threads == [False]
        monkeypatch.setattr(per_account, "PATIENCE", 0.05)

        async def slow():
            await asyncio.sleep(60)
            return []

        clock.advance(minutes=1)
        assert await self.keys(make, slow) == ["github/a"]
        assert "its accounts cannot be told" in caplog.text

    async def test_housekeeping_goes_on_where_one_cannot_be_read(self, make):
        app = make(hourly(for_each=lambda: ["github/x"]))
        await app.schedules.tick()
        app.database.transaction_sync(lambda c, d: d.run(c, "UPDATE {schedule} SET spec = '{{}}'"))
        await app.alerts.keep_house()

    @pytest.mark.parametrize("source", [lambda: 1 / 0, lambda: ["github/a", "no key"], lambda: "github/a"])
    async def test_one_that_fails_leaves_the_known_ones(self, make, clock, caplog, source):
        app = make(hourly(for_each=lambda: ["github/x"]))
        await app.schedules.tick()
        clock.advance(minutes=1)
        app = make(hourly(for_each=source))
        await walk(app, clock, 65)
        assert [key for key, _ in ticks_of(app)] == ["github/x"]
        assert "its accounts cannot be told" in caplog.text


class Table:
    """An app's own table of tokens."""

    async def load(self, _key):
        return Credentials(token="t", version=1)

    async def save(self, _key, _expected_version, _credentials):
        return True


class TestPeople:
    async def test_pause_and_resume(self, make, clock):
        app = make(hourly())
        await connect(app, "a", "b")
        await app.schedules.tick()
        await app.schedules.pause("s")
        assert await walk(app, clock, 150) == 0
        await app.schedules.resume("s")
        assert await walk(app, clock, 60) == 2
        assert all(tick > "2030-01-01T14:30" for _, tick in ticks_of(app))

    async def test_another_timing_starts_anew(self, make, clock):
        app = make(hourly(every="1d"))
        await connect(app, "a", "b")
        await app.schedules.tick()
        clock.advance(minutes=30)
        app = make(hourly(every="10m"))
        await app.schedules.tick()
        assert await walk(app, clock, 10) == 2
        app = make(hourly(for_each=None, resource_key="github/a"))
        await app.schedules.tick()
        assert await app.schedules.accounts("s") == []
        clock.advance(hours=1)
        await app.schedules.tick()
        assert (await app.schedules.list())[0].accounts is None

    async def test_what_is_shown(self, make, clock):
        app = make(hourly())
        (before,) = await app.schedules.list()
        assert (before.accounts, before.for_each) == (0, "github/*")
        await connect(app, "a", "b")
        await app.schedules.tick()
        await walk(app, clock, 60)
        finish(app, key="github/a")
        await app.alerts.keep_house()
        (info,) = await app.schedules.list()
        a, b = await app.schedules.accounts("s")
        assert (info.accounts, info.next_at, info.last_at) == (2, min(a.next_at, b.next_at), max(a.last_at, b.last_at))
        assert info.succeeded_at == a.succeeded_at == clock.now()
        assert (a.last_state, b.last_state, b.succeeded_at) == ("succeeded", "ready", None)
        assert await app.schedules.accounts("s", limit=1, after="github/a") == [b]
        assert app.sync.schedules.accounts("s", limit=1) == [a]
        assert json.dumps([info.to_json(), a.to_json()])

    async def test_run_now(self, make):
        app = make(hourly(), hourly(name="one", for_each=None, resource_key="github/a"))
        await connect(app, "a", "b")
        await app.schedules.tick()
        done = await app.schedules.run("s", "github/b")
        (job,) = app.sync.jobs.list()
        assert (job.id, job.resource_key, done.created) == (done.id, "github/b", True)
        assert not (await app.schedules.run("s", "github/b")).created
        assert (await app.schedules.accounts("s"))[1].last_job == job.id
        for name, account, words in [
            ("s", None, "is for each account 'github/\\*': say which one"),
            ("one", "github/a", "leave out the account"),
            ("s", "github/z", "github/z is not among the accounts"),
        ]:
            with pytest.raises(InvalidInput, match=words):
                await app.schedules.run(name, account)

    async def test_a_removed_one_is_forgotten_with_its_accounts(self, make, clock):
        app = make(hourly(), retention=None)
        await connect(app, "a")
        await app.schedules.tick()
        clock.advance(programs.GONE.total_seconds())
        app = make(hourly(name="t"))
        await app.schedules.tick()
        clock.advance(days=40)
        await app.prune()
        rows = app.database.transaction_sync(
            lambda c, d: d.run(c, "SELECT DISTINCT schedule FROM {schedule_account}").scalars().all()
        )
        assert rows == ["t"]


class TestAlerts:
    async def test_accounts_without_success_are_one_alert(self, make, clock):
        app = make(hourly())
        await connect(app, *"abcdefghij")
        await app.schedules.tick()
        for hour in range(6):
            await walk(app, clock, 60)
            finish(app, key="github/a")
            await app.alerts.keep_house()
            found = [a for a in await app.alerts.list() if a.name == "no_success"]
            assert bool(found) == (hour >= 4)
        (alert,) = found
        assert (alert.subject, alert.detail["accounts"], alert.detail["ever"]) == ("s", 9, False)
        finish(app)
        await walk(app, clock, 60)
        finish(app)
        await app.alerts.keep_house()
        clock.advance(minutes=10)
        await app.alerts.keep_house()
        assert [a for a in await app.alerts.list() if a.name == "no_success"] == []

    @pytest.mark.parametrize("catch_up", ["latest", "all"])
    async def test_of_jobs_that_outlast_the_period_each_success_counts_for_its_account(self, make, clock, catch_up):
        app = make(hourly(overlap="allow", catch_up=catch_up))
        await connect(app, "a", "b")
        await app.schedules.tick()
        old = "UPDATE {job} SET state = 'succeeded', finished_at = :now WHERE created_at <= :before"
        for _ in range(8):
            clock.advance(hours=1)
            await app.schedules.tick()
            params = {"now": clock.now(), "before": clock.now() - 2 * HOUR, "key": "github/a"}
            app.database.transaction_sync(
                lambda c, d, p=params: d.run(c, f"{old} AND resource_key = :key AND finished_at IS NULL", p)
            )
            await app.alerts.keep_house()
        a, b = await app.schedules.accounts("s")
        assert (a.last_state, a.succeeded_at, b.succeeded_at) == ("ready", clock.now(), None)
        assert (await app.schedules.list())[0].succeeded_at == clock.now()
        (alert,) = [one for one in await app.alerts.list() if one.name == "no_success"]
        assert (alert.detail["accounts"], alert.detail["resource"]) == (1, "github/b")

    async def test_also_of_a_job_that_a_person_has_run(self, make, clock):
        app = make(hourly(overlap="allow"))
        await connect(app, "a")
        await app.schedules.tick()
        first = await app.schedules.run("s", "github/a")
        await app.schedules.run("s", "github/a")
        done = "UPDATE {job} SET state = 'succeeded', finished_at = :now WHERE id = :id"
        app.database.transaction_sync(lambda c, d: d.run(c, done, {"now": clock.now(), "id": d.id(first.id)}))
        await app.alerts.keep_house()
        (a,) = await app.schedules.accounts("s")
        assert (a.last_state, a.succeeded_at) == ("ready", clock.now())


async def test_running_workers_serve_every_account(make, clock):
    ran = []

    @handler("sync")
    async def note(job):
        ran.append(job.resource_key)

    apps = [make(hourly(), handlers=[note]) for _ in range(2)]
    await connect(apps[0], *"abcde")
    workers = [app.worker() for app in apps]
    running = [asyncio.create_task(worker.run(signals=False)) for worker in workers]

    async def all_are_known():
        return (await apps[0].schedules.list())[0].accounts == 5

    await until(all_are_known)
    clock.advance(hours=1)
    await until(lambda: len(ran) == 5)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*running)
    assert sorted(ran) == [f"github/{n}" for n in "abcde"]
    for app in apps:
        await app.grants.close()
