"""Recurring jobs on real databases: declared, ticked once by many, paused, run by hand."""

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from resilient import (
    BadCron,
    BadPayload,
    BadResourceKey,
    InvalidInput,
    Kind,
    Resilient,
    Schedule,
    SetupError,
    UnknownKind,
    handler,
)
from resilient.store.schedules import earlier, programs
from resilient.store.schedules import ticks as store
from tests.helpers import LIMIT, until

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@handler("sync", model=dict[str, int])
async def sync(job):
    pass


def hourly(**over):
    return Schedule(sync, {"n": 1}, **{"every": "1h", "resource_key": "github/a", "name": "s", **over})


@pytest.fixture
def make(database_url, open_database, clock):
    def make(*schedules, **options):
        return Resilient(open_database(database_url), handlers=[sync], schedules=schedules, **options)

    return make


def jobs_of(app):
    return app.sync.jobs.list(order="oldest")


def finish(app, state="succeeded"):
    app.database.transaction_sync(
        lambda c, d: d.run(
            c,
            "UPDATE {job} SET state = :state, finished_at = :now, unique_lock = NULL WHERE state <> :state",
            {"state": state, "now": d.now(c)},
        )
    )


class TestDeclaration:
    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ({"every": None, "cron": "99 * * * *"}, BadCron, r"schedule 's': cron '99 \* \* \* \*'"),
            ({"every": None, "cron": "0 0 30 2 *"}, BadCron, "schedule 's': cron .* bad day-of-month"),
            ({"every": None}, BadCron, "schedule 's': a schedule needs either cron"),
            ({"cron": "@daily"}, BadCron, "schedule 's': a schedule needs either cron"),
            ({"every": "1 fortnight"}, BadCron, "schedule 's': every='1 fortnight' is no interval"),
            ({"every": -5}, BadCron, "schedule 's': every=-5 is no interval"),
            (
                {"every": None, "cron": "@daily", "timezone": "Mars/Olympus"},
                BadCron,
                "schedule 's': time zone",
            ),
            ({"anchor": datetime(2030, 1, 1)}, InvalidInput, "schedule 's': anchor .* has no time zone"),  # noqa: DTZ001
            (
                {"catch_up": "some"},
                InvalidInput,
                "schedule 's': catch_up='some' is not one of latest, skip, all",
            ),
            ({"overlap": "maybe"}, InvalidInput, "schedule 's': overlap='maybe'"),
            ({"catch_up": "all"}, InvalidInput, "schedule 's': catch_up='all' .* say overlap='allow'"),
            ({"jitter": -1}, InvalidInput, "schedule 's': a span of time must be positive"),
            ({"jitter": ""}, InvalidInput, "schedule 's': '' is not a span of time"),
            ({"jitter": "4000d"}, InvalidInput, "schedule 's': jitter='4000d' is longer than ten years"),
            ({"jitter": 1e300}, InvalidInput, "schedule 's': jitter=1e.300 is longer than ten years"),
            (
                {"anchor": datetime(1, 1, 1, tzinfo=timezone(HOUR))},
                BadCron,
                "schedule 's': anchor .* lies outside of the years",
            ),
            ({"tags": {"tick": "x"}}, InvalidInput, "schedule 's': the tag 'tick' is written"),
            ({"resource_key": "a b"}, BadResourceKey, "'a b' is not a resource key"),
            ({"resource_key": ""}, BadResourceKey, "schedule 's': say which account .*resource_key=.*for_each="),
            ({"name": "engine:s"}, InvalidInput, "cannot name a schedule"),
        ],
    )
    def test_mistakes_name_the_schedule(self, given, error, words):
        with pytest.raises(error, match=words):
            hourly(**given)

    @pytest.mark.parametrize("none", [0, 0.0, timedelta()])
    def test_no_jitter_may_be_written_in_each_unit(self, none):
        jitter = hourly(jitter=none).jitter
        assert isinstance(jitter, float)
        assert jitter == 0

    @pytest.mark.parametrize(
        ("schedules", "error", "words"),
        [
            ([hourly(), hourly(resource_key="b")], SetupError, "two schedules are called 's'"),
            (["sync"], SetupError, "'sync' is not a schedule"),
            (
                [Schedule("mail", every=60, resource_key="a")],
                UnknownKind,
                "schedule 'mail@a': no handler .* 'mail'",
            ),
            ([Schedule(Kind("mail"), every=60, resource_key="a")], UnknownKind, "schedule 'mail@a'"),
            (
                [Schedule(sync, {"n": "x"}, every=60, resource_key="a")],
                BadPayload,
                "schedule 'sync@a': payload",
            ),
            ([hourly(priority=1000)], InvalidInput, "schedule 's': priority"),
            ([hourly(expires_in=-1)], InvalidInput, "schedule 's': expires_in"),
        ],
    )
    def test_mistakes_only_the_app_can_see(self, make, schedules, error, words):
        with pytest.raises(error, match=words):
            make(*schedules)

    def test_a_plain_function_is_no_handler(self):
        with pytest.raises(InvalidInput, match=r"Schedule\(handler=\.\.\.\) takes Kind or text, not a function"):
            Schedule(lambda _job: None, every=60, resource_key="a")

    def test_the_name_says_what_runs_where(self):
        assert Schedule(sync, every=60, resource_key="github/acct-7").name == "sync@github/acct-7"
        assert Schedule("sync", every=60, resource_key="a").kind == "sync"


class TestTick:
    async def test_a_due_tick_enqueues_its_job_once(self, make, clock):
        app = make(hourly(priority=3, max_attempts=2, tags={"user": "7"}, expires_in=600))
        assert await app.schedules.tick() == 0
        clock.advance(minutes=59)
        assert await app.schedules.tick() == 0
        clock.advance(minutes=1, seconds=10)
        assert await app.schedules.tick() == 1
        assert await app.schedules.tick() == 0
        (job,) = jobs_of(app)
        assert (job.kind, job.resource_key, job.payload, job.state) == ("sync", "github/a", {"n": 1}, "ready")
        assert (job.priority, job.max_attempts, job.expires_at) == (3, 2, clock.now() + timedelta(minutes=10))
        assert job.tags == {"user": "7", "schedule": "s", "tick": "2030-01-01T13:00:00Z"}
        (info,) = await app.schedules.list()
        assert (info.last_at, info.last_job, info.last_state) == (NOON + HOUR, job.id, "ready")
        assert info.next_at == NOON + 2 * HOUR

    async def test_its_job_runs(self, make, clock):
        ran = []

        @handler("note")
        async def note(job):
            ran.append((job.payload, job.tags["tick"]))

        app = Resilient(
            make().database,
            handlers=[note],
            schedules=[Schedule(note, [1], cron="5 12 * * *", resource_key="a")],
        )
        await app.schedules.tick()
        clock.advance(minutes=5)
        await app.schedules.tick()
        await app.worker().drain(timeout=LIMIT)
        assert ran == [([1], "2030-01-01T12:05:00Z")]
        await app.close()

    async def test_many_workers_tick_once(self, make, clock):
        apps = [make(*(hourly(name=f"s{n}", overlap="allow") for n in range(5))) for _ in range(4)]
        for _ in range(3):
            await asyncio.gather(*(app.schedules.tick() for app in apps))
            clock.advance(hours=1)
        told = await asyncio.gather(*(app.schedules.tick() for app in apps))
        assert sum(told) == 5
        made = [(job.tags["schedule"], job.tags["tick"]) for job in jobs_of(apps[0])]
        assert len(made) == len(set(made)) == 15

    async def test_a_tick_whose_transaction_fails_is_ticked_again(self, make, clock, monkeypatch):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)

        def fail(*_, **__):
            raise RuntimeError("the process died here")

        with monkeypatch.context() as patch:
            patch.setattr("resilient.store.schedules.ticks.move_on", fail)
            assert await app.schedules.tick() == 0
        assert jobs_of(app) == []
        assert await make(hourly()).schedules.tick() == 1

    async def test_one_that_cannot_tick_does_not_stop_the_others(self, make, clock, caplog):
        app = make(hourly(), hourly(name="t"))
        await app.schedules.tick()
        app.database.transaction_sync(lambda c, d: d.run(c, "UPDATE {schedule} SET spec = '{{}}' WHERE name = 's'"))
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1
        assert await app.schedules.tick() == 0
        assert caplog.text.count("schedule s cannot tick") == 1
        assert [one.timing for one in await app.schedules.list()] == ["not readable by this version", "every 1 h"]
        await app.alerts.keep_house()
        for change in (app.schedules.pause, app.schedules.resume, app.schedules.run):
            with pytest.raises(InvalidInput, match=r"'s' was declared by another version .* change it"):
                await change("s")

    async def test_one_that_could_not_tick_is_tried_again_after_a_rest(self, make, clock, monkeypatch):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)
        with monkeypatch.context() as patch:
            patch.setattr("resilient.engine.schedules.schedules.job_of", None)  # a trouble that passes
            assert await app.schedules.tick() == 0
        assert await app.schedules.tick() == 0
        monkeypatch.setattr(app.schedules, "_broken", {"s": time.monotonic() - 1})
        assert await app.schedules.tick() == 1

    async def test_jitter_starts_it_later_and_keeps_the_tick(self, make, clock):
        app = make(hourly(jitter="10m"))
        app.schedules._rng.seed(5)
        await app.schedules.tick()
        clock.advance(hours=1)
        await app.schedules.tick()
        (job,) = jobs_of(app)
        assert job.state == "scheduled"
        assert timedelta(0) < job.run_at - (NOON + HOUR) < timedelta(minutes=10)
        assert job.tags["tick"] == "2030-01-01T13:00:00Z"

    async def test_a_program_without_schedules_asks_nothing(self, make, monkeypatch):
        app = make()
        monkeypatch.setattr(app.database, "transaction", None)
        assert await app.schedules.tick() == 0
        await app.schedules.step()

    async def test_steps_ask_about_once_a_second(self, make, monkeypatch):
        app, asked = make(hourly()), []

        async def tick():
            asked.append(1)

        monkeypatch.setattr(app.schedules, "tick", tick)
        for _ in range(50):
            await app.schedules.step()
        assert len(asked) == 1


class TestMissedTicks:
    async def ticks_after_a_night(self, make, clock, **over):
        app = make(hourly(**over))
        await app.schedules.tick()
        clock.advance(hours=8, minutes=30)
        await make(hourly(**over)).schedules.tick()
        return [job.tags["tick"][11:16] for job in jobs_of(app)]

    async def test_latest(self, make, clock):
        assert await self.ticks_after_a_night(make, clock) == ["20:00"]

    async def test_skip(self, make, clock):
        assert await self.ticks_after_a_night(make, clock, catch_up="skip") == []

    async def test_all(self, make, clock):
        told = await self.ticks_after_a_night(make, clock, catch_up="all", overlap="allow")
        assert told == [f"{hour}:00" for hour in range(13, 21)]


class TestOverlap:
    async def test_skip_brings_no_job_while_the_last_is_unfinished(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        for _ in range(3):
            clock.advance(hours=1)
            await app.schedules.tick()
        (job,) = jobs_of(app)
        finish(app, "dead")
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1
        (info,) = await app.schedules.list()
        assert (info.last_at, info.last_job != job.id) == (NOON + 4 * HOUR, True)

    async def test_skip_also_while_it_runs(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)
        await app.schedules.tick()
        started, go = asyncio.Event(), asyncio.Event()

        @handler("sync")
        async def slow(job):
            started.set()
            await go.wait()

        worker = Resilient(app.database, handlers=[slow]).worker()
        draining = asyncio.create_task(worker.drain(timeout=LIMIT))
        await started.wait()
        clock.advance(hours=1)
        assert await app.schedules.tick() == 0
        go.set()
        await draining
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1

    async def test_allow(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        for _ in range(3):
            clock.advance(hours=1)
            assert await app.schedules.tick() == 1


async def outlasting(app, clock, periods, *, lasts=2, ends="succeeded"):
    """Ticks once an hour; each job ends ``lasts`` periods after it was enqueued. Alerts are looked for meanwhile."""
    for _ in range(periods):
        clock.advance(hours=1)
        await app.schedules.tick()
        old = clock.now() - lasts * HOUR
        end(app, old, ends)
        await app.alerts.keep_house()


def end(app, before, state="succeeded"):
    """End the jobs that were enqueued up to a time."""
    app.database.transaction_sync(
        lambda c, d: d.run(
            c,
            "UPDATE {job} SET state = :state, finished_at = :now, unique_lock = NULL"
            " WHERE finished_at IS NULL AND created_at <= :before",
            {"state": state, "now": d.now(c), "before": before},
        )
    )


def noted(app):
    """How many earlier jobs are kept an eye on."""
    sql = f"SELECT count(*) FROM {{schedule}} WHERE name LIKE '{earlier.PREFIX}%'"
    return app.database.transaction_sync(lambda c, d: d.run(c, sql).scalar_one())


class TestSuccessesOfEarlierJobs:
    """Of jobs that outlast the period, the last one has never ended when somebody looks."""

    async def test_they_are_noted(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        await outlasting(app, clock, 9)
        (info,) = await app.schedules.list()
        assert (info.last_state, info.succeeded_at) == ("ready", clock.now())
        assert [a for a in await app.alerts.list() if a.name == "no_success"] == []
        assert noted(app) == 1  # the last job but one
        await outlasting(app, clock, 9, ends="dead")
        (info,) = await app.schedules.list()
        assert info.succeeded_at == clock.now() - 9 * HOUR
        assert [a.subject for a in await app.alerts.list() if a.name == "no_success"] == ["s"]

    async def test_of_a_job_that_a_person_has_run(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        await app.schedules.run("s")
        clock.advance(minutes=1)
        await app.schedules.run("s")
        end(app, NOON)
        await app.alerts.keep_house()
        (info,) = await app.schedules.list()
        assert (info.last_state, info.succeeded_at) == ("ready", clock.now())

    async def test_of_a_tick_that_was_made_up_for(self, make, clock):
        app = make(hourly(overlap="allow", catch_up="all"))
        await app.schedules.tick()
        clock.advance(hours=3)
        assert await app.schedules.tick() == 3
        first = jobs_of(app)[0].id
        app.database.transaction_sync(
            lambda c, d: d.run(
                c, "UPDATE {job} SET state = 'succeeded', finished_at = :now WHERE id = :id",
                {"now": d.now(c), "id": d.id(first)},
            )
        )  # fmt: skip
        await app.alerts.keep_house()
        assert (await app.schedules.list())[0].succeeded_at == clock.now()
        assert noted(app) == 1

    async def test_the_latest_counts_whichever_job_it_is_of(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        for _ in range(2):
            clock.advance(hours=1)
            await app.schedules.tick()
        last = jobs_of(app)[-1].id
        app.database.transaction_sync(
            lambda c, d: d.run(
                c, "UPDATE {job} SET state = 'succeeded', finished_at = :now WHERE id = :id",
                {"now": d.now(c), "id": d.id(last)},
            )
        )  # fmt: skip
        clock.advance(minutes=5)
        end(app, clock.now())  # the earlier one, later
        await app.alerts.keep_house()
        assert (await app.schedules.list())[0].succeeded_at == clock.now()
        late = clock.now()
        clock.advance(hours=1)
        await app.schedules.tick()
        assert (await app.schedules.list())[0].succeeded_at == late

    async def test_a_job_that_is_gone_is_forgotten(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        await outlasting(app, clock, 2, lasts=9)
        assert noted(app) == 1
        app.database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {job}"))
        await app.alerts.keep_house()
        assert (noted(app), (await app.schedules.list())[0].succeeded_at) == (0, None)

    async def test_of_many_the_oldest_are_kept(self, make, clock, monkeypatch):
        monkeypatch.setattr(earlier, "MOST", 3)
        app = make(hourly(overlap="allow"), hourly(overlap="allow", name="t"))
        await app.schedules.tick()
        await outlasting(app, clock, 9, lasts=99)
        assert noted(app) == 6
        end(app, NOON + HOUR)
        await app.alerts.keep_house()
        assert [one.succeeded_at for one in await app.schedules.list()] == [clock.now()] * 2
        assert noted(app) == 4

    async def test_none_where_they_do_not_overlap(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        await outlasting(app, clock, 5)
        await app.schedules.run("s")
        assert noted(app) == 0

    @pytest.mark.parametrize("backend", ["postgresql"])
    async def test_a_schedule_that_somebody_moves_on_is_left_for_the_next_look(self, make, clock):
        app = make(hourly(overlap="allow"))
        await app.schedules.tick()
        await outlasting(app, clock, 2, lasts=9)
        end(app, NOON + HOUR)
        other = make(hourly(overlap="allow"))

        def look(c, d):
            assert store.lock(c, d, "s") is not None
            other.database.transaction_sync(store.note_successes)

        app.database.transaction_sync(look)
        assert (noted(app), (await app.schedules.list())[0].succeeded_at) == (1, None)
        app.database.transaction_sync(store.note_successes)
        assert (noted(app), (await app.schedules.list())[0].succeeded_at) == (0, clock.now())


class TestPeople:
    async def test_listing_before_any_worker_started(self, make):
        app = make(hourly(), Schedule(sync, {}, cron="@daily", timezone="Europe/Berlin", resource_key="b", name="d"))
        first, second = await app.schedules.list()
        assert (first.name, first.timing, first.next_at) == (
            "d",
            "0 0 * * * (Europe/Berlin)",
            NOON + 11 * HOUR,
        )
        assert (second.name, second.timing, second.last_at) == ("s", "every 1 h", None)
        assert json.dumps(second.to_json())

    async def test_pause_and_resume(self, make, clock):
        app = make(hourly())
        assert (await app.schedules.pause("s")).paused
        clock.advance(hours=3, minutes=1)
        assert await app.schedules.tick() == 0
        assert (await app.schedules.resume("s")).next_at == NOON + 4 * HOUR
        assert (await app.schedules.resume("s")).next_at == NOON + 4 * HOUR
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1

    async def test_resuming_what_was_not_paused_loses_no_tick(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)
        await app.schedules.resume("s")
        assert await app.schedules.tick() == 1

    async def test_run_now(self, make):
        app = make(hourly())
        done = await app.schedules.run("s")
        (job,) = jobs_of(app)
        assert (done.id, done.created, job.tags) == (job.id, True, {"schedule": "s"})
        again = await app.schedules.run("s")
        assert (again.id, again.created) == (job.id, False)
        (info,) = await app.schedules.list()
        assert (info.next_at, info.last_job, info.last_at) == (NOON + HOUR, job.id, None)

    async def test_run_now_beside_another_where_they_may_overlap(self, make):
        app = make(hourly(overlap="allow"))
        assert (await app.schedules.run("s")).created
        assert (await app.schedules.run("s")).created

    async def test_unknown_and_removed_ones(self, make, clock):
        await make(hourly(), hourly(name="t")).schedules.tick()
        clock.advance(programs.GONE.total_seconds())
        app = make(hourly(name="t"))
        await app.schedules.tick()
        with pytest.raises(InvalidInput, match="there is no schedule 'x'; known are: s, t"):
            await app.schedules.pause("x")
        with pytest.raises(InvalidInput, match="schedule 's' is no longer declared"):
            await app.schedules.run("s")
        assert [s.removed for s in await app.schedules.list()] == [True, False]

    async def test_one_that_no_program_declares_any_more_is_removed_by_hand(self, make, clock):
        """A program without any schedule touches none: another one may declare it."""
        await make(hourly(), hourly(name="t")).schedules.tick()
        clock.advance(programs.GONE.total_seconds())
        app = make()
        await app.schedules.tick()
        await app.schedules.remove("s")
        assert [(s.name, s.removed) for s in await app.schedules.list()] == [("s", True), ("t", False)]
        with pytest.raises(InvalidInput, match="schedule 's' is no longer declared"):
            await app.schedules.remove("s")
        with pytest.raises(InvalidInput, match="there is no schedule 'x'"):
            await app.schedules.remove("x")

    async def test_one_that_is_declared_is_not_removed_and_one_that_is_declared_again_ticks_again(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        with pytest.raises(InvalidInput, match=r"take it out of Resilient\(schedules=\[...\]\)"):
            await app.schedules.remove("s")
        clock.advance(programs.GONE.total_seconds())
        await make().schedules.remove("s")
        clock.advance(hours=5)
        assert await app.schedules.tick() == 0
        again = make(hourly())
        assert await again.schedules.tick() == 0  # from now on
        clock.advance(hours=1)
        assert await again.schedules.tick() == 1
        assert [s.removed for s in await again.schedules.list()] == [False]

    def test_for_synchronous_programs(self, make):
        app = make(hourly())
        assert app.sync.schedules.pause("s").paused
        assert not app.sync.schedules.resume("s").paused
        assert app.sync.schedules.run("s").created
        assert [s.last_state for s in app.sync.schedules.list()] == ["ready"]

    async def test_the_last_success_is_kept_when_its_job_is_gone(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)
        await app.schedules.tick()
        finish(app)
        done = clock.now()
        assert (await app.schedules.list())[0].succeeded_at == done
        clock.advance(hours=1)
        await app.schedules.tick()
        finish(app, "dead")
        assert (await app.schedules.list())[0].succeeded_at == done


async def test_running_workers_tick_and_run_it_once(make, clock):
    ran = []

    @handler("note")
    async def note(job):
        ran.append(job.tags["tick"])

    declared = Schedule(note, every="1h", resource_key="a")
    apps = [Resilient(make().database, handlers=[note], schedules=[declared]) for _ in range(2)]
    workers = [app.worker() for app in apps]
    running = [asyncio.create_task(worker.run(signals=False)) for worker in workers]
    await apps[0].schedules.declare()
    for ticks in (1, 2):
        clock.advance(hours=1)
        await until_succeeded(apps[0], NOON + ticks * HOUR)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*running)
    assert ran == ["2030-01-01T13:00:00Z", "2030-01-01T14:00:00Z"]


async def until_succeeded(app, tick):
    """Wait for the job of a tick; workers look about once a second."""

    async def has_succeeded():
        (info,) = await app.schedules.list()
        return (info.last_at, info.last_state) == (tick, "succeeded")

    await until(has_succeeded)


class TestWrongClock:
    """The database's clock ran ahead, by a year say, and was set right."""

    @pytest.mark.parametrize("is_new", [True, False], ids=["a process that starts", "one that runs"])
    async def test_no_tick_is_waited_for_that_it_named(self, make, clock, is_new, caplog):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(days=400)
        assert await app.schedules.tick() == 1
        finish(app)
        clock.advance(days=-400)
        app = make(hourly()) if is_new else app
        app.schedules._declared_at -= programs.LOOK.total_seconds()
        assert await app.schedules.tick() == 0  # from now on
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1
        assert "schedule s: a clock that ran ahead named its next tick" in caplog.text

    async def test_nor_by_the_accounts_of_one_for_each(self, make, clock):
        app = make(hourly(resource_key="", for_each=lambda: ["github/a", "github/b"], spread="1m"))
        await app.schedules.tick()
        clock.advance(days=400)
        await app.schedules.tick()
        finish(app)
        clock.advance(days=-400)
        app = make(hourly(resource_key="", for_each=lambda: ["github/a", "github/b"], spread="1m"))
        await app.schedules.tick()
        finish(app)
        clock.advance(hours=1, minutes=1)
        assert await app.schedules.tick() == 2

    async def test_what_ticked_does_not_tick_again_where_it_was_set_back_a_little(self, make, clock):
        app = make(hourly())
        await app.schedules.tick()
        clock.advance(hours=1)
        assert await app.schedules.tick() == 1
        finish(app)
        clock.advance(minutes=-5)
        again = make(hourly())
        assert await again.schedules.tick() == 0
        clock.advance(minutes=10)
        assert await again.schedules.tick() == 0
        clock.advance(hours=1)
        assert await again.schedules.tick() == 1


@pytest.mark.parametrize("call", ["pause", "resume", "run", "remove", "accounts"])
async def test_a_name_that_no_database_stores_is_refused(make, call):
    with pytest.raises(InvalidInput, match="the name of a schedule has a character that no database stores"):
        await getattr(make(hourly()).schedules, call)("a\0")
