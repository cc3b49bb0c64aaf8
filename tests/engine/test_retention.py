"""Pruning through the app: by policy, by hand, dry, and as housekeeping does it."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
import sqlalchemy as sa

from resilient import InvalidInput, Pruned, Resilient, Retention, handler
from resilient.core.jobs.outcomes import Transition
from resilient.engine.inspect import retention
from resilient.engine.run import sweeper
from resilient.store import events
from resilient.store.gates import resources
from resilient.store.jobs import finishing
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.finishing import Finish

DAY = timedelta(days=1)


@handler("k")
async def nothing(job):
    pass


@pytest.fixture
def app(database):
    return Resilient(database, handlers=[nothing], retention=Retention(batch=2))


@pytest.fixture
def finished(database, clock):
    """Put jobs that finished some days ago, each with a history row."""

    def put(state, *days, key="a/1"):
        def write(c, d):
            for ago in days:
                id_, at = uuid4(), clock.now() - ago * DAY
                jobs.insert(c, d, [jobs.NewJob(id=id_, kind="k", resource_key=key, payload="1")])
                params = {"state": state, "at_at": at, "id": d.id(id_)}
                d.run(c, "UPDATE {job} SET state = :state, finished_at = :at_at WHERE id = :id", params)
                finishing.record_attempts(c, d, [Finish(id_, 1, Transition(state, "dead"), execution=1)], at)
            d.run(c, "DELETE FROM {turn}")

        database.transaction_sync(write)

    return put


@pytest.fixture
def left(read_all):
    def left():
        kept = {r["state"]: r["n"] for r in read_all("SELECT state, count(*) AS n FROM {job} GROUP BY state")}
        orphans = "SELECT 1 FROM {attempt} WHERE job_id NOT IN (SELECT id FROM {job})"
        assert read_all(orphans) == []
        return kept

    return left


async def test_by_policy(app, finished, left):
    finished("succeeded", 9, 8, 8, 8, 8, 1)
    finished("cancelled", 9, 1)
    finished("dead", 100, 99, 9)
    told = await app.prune(dry_run=True)
    assert told == Pruned(succeeded=5, dead=2, cancelled=1)
    assert left() == {"succeeded": 6, "cancelled": 2, "dead": 3}
    assert await app.prune() == told
    assert left() == {"succeeded": 1, "cancelled": 1, "dead": 1}
    assert (await app.prune()).total == 0


async def test_by_hand(app, finished, left):
    finished("succeeded", 5, 4, 3, 1)
    finished("dead", 5, 1)
    assert await app.prune(older_than="2d", state="succeeded", limit=2) == Pruned(succeeded=2)
    assert await app.prune(older_than="2d") == Pruned(succeeded=1, dead=1)
    assert left() == {"succeeded": 1, "dead": 1}
    assert app.sync.prune(older_than=3600, state=["dead"]) == Pruned(dead=1)
    assert app.sync.prune(older_than=3600, dry_run=True, limit=5) == Pruned(succeeded=1)


@pytest.mark.parametrize("part", ["prune_finished", "prune_inbox", "forget_idle"])
async def test_a_step_that_fails_can_be_called_again(app, database, clock, finished, left, monkeypatch, part):
    finished("succeeded", 9, 9, 9)
    finished("dead", 200)
    database.transaction_sync(lambda c, d: events.first_seen(c, d, "c", "m", clock.now() - 31 * DAY))
    database.transaction_sync(resources.ensure, ["a"])
    clock.advance(days=31)
    of = events if part == "prune_inbox" else retention.store
    real, failures = getattr(of, part), []

    def fails_once(*args, **options):
        if not failures:
            failures.append(1)
            raise OSError("the line broke")
        return real(*args, **options)

    monkeypatch.setattr(of, part, fails_once)
    walk, is_done = retention.Walk.by_age(app.retention), False
    while not is_done:
        with contextlib.suppress(OSError):
            is_done = database.transaction_sync(walk.step)
    assert (failures, walk.pruned) == ([1], Pruned(succeeded=3, dead=1, resources=1, inbox=1))
    assert left() == {}


async def test_a_dry_run_counts_no_further_than_the_limit(app, finished):
    finished("succeeded", 5, 4, 3)
    finished("dead", 5)
    assert (await app.prune(older_than="1d", dry_run=True, limit=2)).total == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"state": "ready"}, "'ready' is no state in which jobs are pruned"),
        ({"older_than": "soon"}, "older_than='soon' is not a span"),
        ({"limit": 0}, "limit=0: prune at least 1 job"),
        ({"state": "cancelled"}, "cancelled jobs are kept for ever: say older_than="),
    ],
)
async def test_mistakes(database, given, words):
    app = Resilient(database, retention=Retention(cancelled=None))
    with pytest.raises(InvalidInput, match=words):
        await app.prune(**given)


def test_a_retention_that_is_none(database):
    with pytest.raises(InvalidInput, match="retention='7d': write Retention"):
        Resilient(database, retention="7d")


async def test_kept_for_ever(database, finished, left):
    finished("succeeded", 9999)
    finished("dead", 9999)
    app = Resilient(database, handlers=[nothing], retention=Retention(succeeded=None, dead=None, attempts=None))
    assert (await app.prune()).total == 0
    assert left() == {"succeeded": 1, "dead": 1}


class TestEvents:
    """Published events are succeeded jobs that may be kept for a time of their own."""

    @pytest.fixture
    def kept(self, read_all):
        at = "SELECT resource_key, count(*) AS n FROM {job} GROUP BY resource_key"
        return lambda: {r["resource_key"].partition("/")[0]: r["n"] for r in read_all(at)}

    @pytest.fixture
    def both(self, finished):
        def put(*days):
            finished("succeeded", *days, key="outbox/orders")
            finished("succeeded", *days)
            finished("succeeded", *days, key="outbox0/x")  # a neighbour in the order of keys

        return put

    def app(self, database, **spans):
        return Resilient(database, handlers=[nothing], retention=Retention(batch=2, **spans))

    async def test_by_default_they_go_with_the_other_jobs(self, app, both, kept):
        both(9, 8, 1)
        assert app.retention.events == timedelta(days=7)
        assert await app.prune() == Pruned(succeeded=6)
        assert kept() == {"outbox": 1, "a": 1, "outbox0": 1}

    @pytest.mark.parametrize(
        ("spans", "pruned", "left_over"),
        [
            ({"events": "30d"}, Pruned(succeeded=6, events=1), {"outbox": 3, "a": 1, "outbox0": 1}),
            ({"events": "2d"}, Pruned(succeeded=6, events=3), {"outbox": 1, "a": 1, "outbox0": 1}),
            ({"events": None}, Pruned(succeeded=6), {"outbox": 4, "a": 1, "outbox0": 1}),
            ({"succeeded": None, "events": "30d"}, Pruned(events=1), {"outbox": 3, "a": 4, "outbox0": 4}),
            ({"succeeded": "30d"}, Pruned(succeeded=3), {"outbox": 3, "a": 3, "outbox0": 3}),
        ],
    )
    async def test_for_a_time_of_their_own(self, database, both, kept, spans, pruned, left_over):
        both(40, 9, 8, 1)
        app = self.app(database, **spans)
        assert await app.prune(dry_run=True) == pruned
        assert await app.prune() == pruned
        assert kept() == left_over
        assert (await app.prune(state="succeeded", dry_run=True)).total == 0 if spans.get("succeeded", 1) else True

    async def test_by_hand_an_age_means_them_too(self, database, both, kept):
        both(9, 3, 1)
        app = self.app(database, events=None)
        assert await app.prune(state="succeeded", limit=1) == Pruned(succeeded=1)
        assert await app.prune(older_than="2d", state="succeeded") == Pruned(succeeded=5)
        assert kept() == {"outbox": 1, "a": 1, "outbox0": 1}

    async def test_housekeeping_looks_once_at_those_that_stay(self, database, both, kept, clock, monkeypatch):
        both(*[9] * 7, 8, 1)  # more of one moment than a batch
        app, asked = self.app(database, events="30d"), []
        real = retention.store.prune_succeeded

        def counting(c, d, before, **options):
            asked.append(options["behind"])
            return real(c, d, before, **options)

        monkeypatch.setattr(retention.store, "prune_succeeded", counting)
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).total == 16
        assert kept() == {"outbox": 9, "a": 1, "outbox0": 1}
        first = len(asked)
        clock.advance(days=6, hours=1)
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).total == 2
        assert len(asked) - first < first
        clock.advance(days=16)
        assert await retention.keep(app.database, app.retention, app.pruned_to) == Pruned(events=8)
        assert kept() == {"outbox": 1}

    async def test_what_was_not_committed_is_deleted_by_the_next_round(self, database, both, kept, monkeypatch):
        both(9, 8)
        app = self.app(database, events="30d")
        step = retention.Walk.step

        def broken_off(walk, c, d):
            step(walk, c, d)
            if walk.tally["succeeded"]:
                raise OSError("the line broke before the commit")

        with monkeypatch.context() as patch:
            patch.setattr(retention.Walk, "step", broken_off)
            with pytest.raises(OSError, match="the line broke"):
                await retention.keep(app.database, app.retention, app.pruned_to)
        assert kept()["a"] == 2
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).total == 4
        assert kept() == {"outbox": 2}

    @pytest.mark.parametrize("backend", ["postgresql"])
    async def test_what_is_locked_when_the_walk_passes_goes_later(self, database, both, kept, clock):
        both(9, 8)
        app = self.app(database, events="30d")
        with database.sync_engine.begin() as c:
            c.execute(sa.text("SELECT 1 FROM resilient_job WHERE resource_key = 'a/1' FOR UPDATE"))
            assert (await retention.keep(database, app.retention, app.pruned_to)).total == 2
        assert kept() == {"outbox": 2, "a": 2}
        clock.advance(days=7)
        assert (await retention.keep(database, app.retention, app.pruned_to)).total == 2
        assert kept() == {"outbox": 2}


class TestHousekeeping:
    async def test_a_round_prunes(self, app, finished, left):
        finished("succeeded", *range(1, 20))
        await app.keep_house()
        assert left() == {"succeeded": 7}

    async def test_a_round_ends_in_time_and_the_next_goes_on(self, app, finished, left):
        finished("succeeded", *[30] * 9)
        finished("dead", 99, 99, 99)
        ticking = iter(range(1000))
        gone = await retention.keep(
            app.database, app.retention, app.pruned_to, monotonic=lambda: next(ticking) / 100, seconds=0.1
        )
        assert 0 < gone.total < 12
        assert gone.dead  # every sort gets its share
        while (await retention.keep(app.database, app.retention, app.pruned_to)).total:
            pass
        assert left() == {}

    async def test_where_much_is_left_a_third_of_all_time_goes_into_it(self, app, finished, left, monkeypatch):
        """With a sixth, a table in which jobs end quickly grew without an end."""
        finished("succeeded", *[30] * 40)
        time, real = [0.0], retention.store.prune_finished

        def slow(*args, **options):
            time[0] += 1.0
            return real(*args, **options)

        async def rest(seconds):
            time[0] += seconds

        monkeypatch.setattr(retention.store, "prune_finished", slow)
        monkeypatch.setattr(retention, "asyncio", SimpleNamespace(sleep=rest))
        parts = Retention(batch=1, dead=None, cancelled=None, attempts=None, inbox=None, resources=None)
        gone = await retention.keep(app.database, parts, {}, monotonic=lambda: time[0])
        assert time[0] < sweeper.HOUSEKEEPING.total_seconds()
        assert gone.succeeded >= sweeper.HOUSEKEEPING.total_seconds() / 3
        assert left() == {"succeeded": 40 - gone.succeeded}

    async def test_it_rests_for_as_long_as_it_worked_not_as_it_waited(self, app, finished, monkeypatch):
        """Resting as long as it had waited for a busy writer, it deleted less than was added, without an end."""
        finished("succeeded", *[30] * 3)
        time, rests, step, real = [0.0], [], retention.Walk.step, retention.store.prune_finished

        def waiting(walk, c, d):
            time[0] += 5.0
            return step(walk, c, d)

        def working(*args, **options):
            time[0] += 1.0
            return real(*args, **options)

        async def rest(seconds):
            rests.append(seconds)

        monkeypatch.setattr(retention.Walk, "step", waiting)
        monkeypatch.setattr(retention.store, "prune_finished", working)
        monkeypatch.setattr(retention, "asyncio", SimpleNamespace(sleep=rest))
        parts = Retention(batch=1, dead=None, cancelled=None, attempts=None, inbox=None, resources=None)
        assert (await retention.keep(app.database, parts, {}, monotonic=lambda: time[0])).succeeded == 3
        assert rests == [1.0] * 3

    @pytest.mark.parametrize("backend", ["sqlite"])
    @pytest.mark.parametrize(
        ("cost", "sizes"),  # seconds a row
        [(1e-6, [250, 500, 1000, 1000]), (50e-6, [250, 400, 400, 400]), (1e-3, [250, 250, 250, 250])],
    )
    async def test_a_transaction_deletes_as_many_rows_as_take_its_time(self, app, monkeypatch, cost, sizes):
        time, asked = [0.0], []

        def prune(c, d, state, before, *, since, limit):
            asked.append(limit)
            time[0] += limit * cost
            return limit, (before if len(asked) < 4 else None)

        monkeypatch.setattr(retention.store, "prune_finished", prune)
        walk = retention.Walk(Retention(), {"succeeded": DAY}, monotonic=lambda: time[0])
        while not app.database.transaction_sync(walk.step):
            pass
        assert asked == sizes

    async def test_resources_once_an_hour(self, app, database, clock):
        database.transaction_sync(resources.ensure, ["a"])
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).resources == 0
        clock.advance(days=31)
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).resources == 1
        database.transaction_sync(resources.ensure, ["b"])
        clock.advance(minutes=59)
        database.transaction_sync(
            lambda c, d: d.run(c, "UPDATE {resource} SET updated_at = :since", {"since": clock.now() - 40 * DAY})
        )
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).resources == 0
        clock.advance(minutes=1)
        assert (await retention.keep(app.database, app.retention, app.pruned_to)).resources == 1
