"""The claim on both databases: what it takes, leaves, parks and counts; and its races, step by step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from resilient import JobFilter, Limit
from resilient.core.base.resource_key import path, serves
from resilient.core.gates.breaker import Report
from resilient.core.gates.policy import Policies
from resilient.engine.run import completer
from resilient.engine.run.completer import write
from resilient.engine.run.heartbeat import beat
from resilient.engine.run.sweeper import recheck
from resilient.store.gates import circuits, resources, turns
from resilient.store.gates import controls as gates
from resilient.store.gates.circuits import Evidence
from resilient.store.inspect import workers
from resilient.store.jobs import claim, claim_snapshot
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.changes import Edit, Sweep
from tests.helpers import LIMIT
from tests.interleaving import until_it_waits

NONE = Policies()


def new(key="a/1", **over):
    return jobs.NewJob(**{"id": uuid4(), "kind": "k", "resource_key": key, "payload": "null", **over})


def put(database, *items):
    database.transaction_sync(jobs.insert, items)
    return [j.id for j in items]


def ask(policies=NONE, **over):
    options = {
        "worker_id": "w",
        "slots": 100,
        "kinds": ["k"],
        "lease": timedelta(seconds=60),
        "policy": policies.for_key,
        "roll": lambda: 0.5,
        "take": 50,
        "per_key": 50,
    }
    return claim.Ask(**{**options, **over})


def take(database, policies=NONE, **over):
    """Claim; make missing resource rows and claim again, as a worker does."""
    claimed = database.transaction_sync(claim.claim, ask(policies, **over))
    if claimed.missing:
        database.transaction_sync(resources.ensure, claimed.missing)
        claimed = database.transaction_sync(claim.claim, ask(policies, **over))
    return claimed


def keys(claimed):
    return [row.resource_key for row in claimed.jobs]


def probed(claimed):
    return [key for ((key, _),) in claimed.probes.values()]


def ordinary(database):
    return sorted(
        r[0]
        for r in database.transaction_sync(
            lambda c, d: d.run(c, "SELECT resource_key FROM {turn} WHERE parked_on IS NULL").all()
        )
    )


def parked(database):
    return dict(
        tuple(r)
        for r in database.transaction_sync(
            lambda c, d: d.run(c, "SELECT resource_key, parked_on FROM {turn} WHERE parked_on IS NOT NULL").all()
        )
    )


def finish(database, claimed, capped=()):
    """Finish as the completer does."""
    done = [(row.id, row.version + 1, None) for row in claimed.jobs]
    freed = {}
    for row in claimed.jobs:
        for key in capped:
            if row.resource_key == key or row.resource_key.startswith(key + "/"):
                freed[key] = freed.get(key, 0) + 1
    return database.transaction_sync(write, done, [], freed, again=False)


def lost(database):
    return database.transaction_sync(turns.stranded)


class TestTaking:
    def test_a_drained_key_keeps_no_turn(self, database):
        put(database, new(), new())
        claimed = take(database)
        assert (len(claimed.jobs), ordinary(database), parked(database)) == (2, [], {})
        assert finish(database, claimed) == {row.id for row in claimed.jobs}

    def test_more_than_its_share_gets_a_turn_at_the_back(self, database):
        put(database, *(new("a/1") for _ in range(5)), *(new("a/2") for _ in range(2)))
        assert sorted(keys(take(database, per_key=2))) == ["a/1", "a/1", "a/2", "a/2"]
        assert ordinary(database) == ["a/1"]
        put(database, new("a/3"))
        database.transaction_sync(resources.ensure, ["a/3"])
        assert keys(take(database, per_key=2, take=1)) == ["a/1", "a/1"]  # its turn came before a/3's
        assert lost(database) == []

    def test_no_more_than_there_are_slots(self, database):
        put(database, *(new(f"a/{n}") for n in range(5)))
        assert len(take(database, slots=3).jobs) == 3
        assert len(ordinary(database)) == 2
        assert lost(database) == []

    def test_best_priority_then_oldest(self, database, clock):
        first = new("a/1")
        put(database, first)
        clock.advance(1)
        urgent, late = new("a/1", priority=9), new("a/1")
        put(database, urgent, late)
        assert [row.id for row in take(database).jobs] == [urgent.id, first.id, late.id]

    def test_resources_with_urgent_work_come_first(self, database):
        put(database, new("a/1"), new("a/2", priority=5))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2"])
        assert keys(take(database, slots=1, take=1)) == ["a/2"]

    def test_unknown_kinds_are_left_and_reported(self, database):
        put(database, *(new(kind="other", priority=9) for _ in range(60)), new())
        claimed = take(database)
        assert keys(claimed) == ["a/1"]
        assert ordinary(database) == ["a/1"]
        assert take(database).unknown == ["a/1"]
        assert ordinary(database) == ["a/1"]
        assert len(take(database, kinds=["other"]).jobs) == 50

    def test_a_claim_needs_the_version_it_read(self, database):
        (id_,) = put(database, new())
        seen = take(database)
        now = database.dialect.now(None) if database.dialect.clock else seen.now

        def again(c, d):
            return claim.start_if_ready(c, d, seen.jobs, "w2", now, seen.now + timedelta(seconds=60)).all()

        assert [tuple(one) for one in database.transaction_sync(again)] == [(id_, False)]
        assert [row.id for row in seen.jobs] == [id_]


def test_of_a_write_whose_answer_was_lost_only_what_it_wrote_is_taken_for_written(database):
    """A job that was rescued meanwhile stands one version further too, but not in the state that was meant."""
    written, given_away = put(database, new(), new())
    claimed = take(database)
    done = [(row.id, row.version + 1, None) for row in claimed.jobs]
    assert database.transaction_sync(write, [one for one in done if one[0] == written], [], {}) == {written}
    rescue = "UPDATE {job} SET state = 'ready', version = version + 1, rescues = 1 WHERE id = :id"
    database.transaction_sync(lambda c, d: d.run(c, rescue, {"id": d.id(given_away)}))
    assert database.transaction_sync(lambda c, d: write(c, d, done, [], {}, again=True)) == {written}


class TestGates:
    @pytest.mark.parametrize("stopped", ["a", "a/1"])
    def test_a_paused_key_parks_its_turn_on_what_stops_it(self, database, stopped):
        put(database, new("a/1"), new("b/1"))
        database.transaction_sync(resources.ensure, ["a", "a/1", "b", "b/1"])
        database.transaction_sync(gates.pause, stopped, reason="maintenance")
        assert keys(take(database)) == ["b/1"]
        assert parked(database) == {"a/1": stopped}
        assert database.transaction_sync(gates.resume, stopped) == 1
        assert keys(take(database)) == ["a/1"]

    def test_a_cooldown_is_looked_at_again_when_it_ends(self, database, clock):
        put(database, new("a/1"))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        database.transaction_sync(gates.cool_down, "a/1", clock.now() + timedelta(seconds=30), "429", 0.0)
        assert keys(take(database)) == []
        assert database.transaction_sync(recheck, NONE.for_key, 0.5) == 0
        clock.advance(45)
        assert database.transaction_sync(recheck, NONE.for_key, 0.5) == 1
        assert keys(take(database)) == ["a/1"]

    def test_an_outage_costs_one_parked_turn_for_each_account(self, database):
        put(database, *(new(f"a/{n}") for n in range(40) for _ in range(5)))
        database.transaction_sync(resources.ensure, ["a", *(f"a/{n}" for n in range(40))])
        database.transaction_sync(gates.pause, "a", reason="down")
        before = database.transaction_sync(
            lambda c, d: d.run(c, "SELECT max(updated_at), max(version) FROM {job}").one()
        )
        for _ in range(4):
            assert take(database).jobs == []
        assert (len(parked(database)), ordinary(database)) == (40, [])
        after = database.transaction_sync(
            lambda c, d: d.run(c, "SELECT max(updated_at), max(version) FROM {job}").one()
        )
        assert before == after  # no job row was touched
        assert lost(database) == []

    def test_one_job_probes_a_circuit_that_is_due(self, database, clock):
        put(database, *(new("a/1") for _ in range(5)))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        database.transaction_sync(gates.open_, "a/1", until=clock.now() + timedelta(seconds=30))
        assert take(database).jobs == []
        assert parked(database) == {"a/1": "a/1"}
        clock.advance(31)
        assert database.transaction_sync(recheck, NONE.for_key, 0.5) == 1
        claimed = take(database)
        assert len(claimed.jobs) == 1
        breaker = database.transaction_sync(resources.read, ["a/1"])["a/1"].breaker
        assert claimed.probes == {claimed.jobs[0].id: (("a/1", breaker.generation),)}
        assert breaker.probe_owner == "w"
        assert parked(database) == {"a/1": "a/1"}  # the others wait for the verdict
        assert lost(database) == []

    def test_after_a_probe_that_proved_nothing_another_key_tries(self, database, clock):
        """A key whose jobs fail by themselves must not keep the circuit of all from being tried out."""
        put(database, *(new(f"a/{n}") for n in (1, 2, 3) for _ in range(3)))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2", "a/3"])
        database.transaction_sync(gates.open_, "a", until=clock.now() + timedelta(seconds=30))
        assert take(database).jobs == []
        clock.advance(31)
        tried = []
        for _ in range(4):
            assert database.transaction_sync(recheck, NONE.for_key, 0.5) == 1
            claimed = take(database)
            assert probed(claimed) == ["a"]
            tried += keys(claimed)
            generation = database.transaction_sync(resources.read, ["a"])["a"].breaker.generation
            silence = [Evidence("a", Report(generation, probe=True))]
            (change,) = database.transaction_sync(circuits.report_if_current, silence, NONE, lambda: 0.5)
            assert (change.after.breaker.state, change.after.breaker.reopens) == ("open", 0)  # no longer than before
            clock.advance(1)
        assert tried == ["a/1", "a/2", "a/3", "a/1"]
        assert lost(database) == []


class TestCaps:
    POLICIES = Policies(concurrency={"a": 3, "a/1": 2})

    def test_caps_hold_over_leaves_and_calls(self, database):
        put(database, *(new(f"a/{n}") for n in (1, 2) for _ in range(5)))
        first = take(database, self.POLICIES)
        assert sorted(keys(first)) in (["a/1", "a/1", "a/2"], ["a/2", "a/2", "a/2"])
        assert take(database, self.POLICIES).jobs == []
        assert set(parked(database)) == {"a/1", "a/2"}
        finish(database, first, capped=["a", "a/1"])
        assert len(take(database, self.POLICIES).jobs) == 3
        assert lost(database) == []

    def test_everything_runs_in_the_end(self, database):
        ids = put(database, *(new(f"a/{n}") for n in range(4) for _ in range(6)))
        done = set()
        for _ in range(40):
            claimed = take(database, self.POLICIES)
            assert len(claimed.jobs) <= 3
            done |= finish(database, claimed, capped=["a", "a/1"])
        assert done == set(ids)


class TestJobLimits:
    def test_a_limit_lets_its_burst_through_and_then_its_rate(self, database, clock):
        policies = Policies(limits={"a/*": [Limit(60, per=60, burst=3, counts="jobs", name="m")]})
        put(database, *(new("a/1") for _ in range(6)))
        assert len(take(database, policies).jobs) == 3
        assert parked(database) == {"a/1": "a/1"}
        clock.advance(1.1)
        database.transaction_sync(recheck, policies.for_key, 0.5)
        assert len(take(database, policies).jobs) == 1

    def test_one_that_is_declared_anew_counts_what_was_started(self, database, clock):
        old, wider = (
            Policies(limits={"a/*": [Limit(rate, per="1d", burst=burst, counts="jobs", name="m")]})
            for rate, burst in ((3, 3), (3000, 5))
        )
        put(database, *(new("a/1") for _ in range(6)))
        assert len(take(database, old).jobs) == 3
        clock.advance(90)
        database.transaction_sync(recheck, wider.for_key, 0.5)
        assert len(take(database, wider).jobs) == 3

    def test_an_ancestors_limit_is_shared(self, database):
        policies = Policies(limits={"a": [Limit(60, per=60, burst=3, counts="jobs", name="m")]})
        put(database, *(new(f"a/{n}") for n in range(6)))
        assert len(take(database, policies).jobs) == 3
        assert lost(database) == []


class TestRaces:
    """Two connections, step by step (PostgreSQL: SQLite has one writer at a time)."""

    @pytest.fixture
    def database(self, open_database, postgres_url):
        return open_database(postgres_url)

    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch):
        """Who waits for a lock waits longer than a machine stands still: it would give up, and come again later."""
        for module in (claim_snapshot, completer):
            monkeypatch.setattr(module, "LOCK_WAIT", f"{LIMIT:.0f}s")
        claim_snapshot._statement.cache_clear()
        yield
        claim_snapshot._statement.cache_clear()

    @pytest.fixture
    def watch(self, database):
        with psycopg.connect(**database.driver_arguments(), autocommit=True) as c:
            yield c

    def test_a_locked_leaf_keeps_its_turn(self, database):
        put(database, new("a/1"))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        d = database.dialect
        with database.sync_engine.connect() as one, one.begin():
            resources.lock_leaves(one, d, ["a/1"], ["a"])
            assert take(database).jobs == []
            assert ordinary(database) == ["a/1"]
        assert keys(take(database)) == ["a/1"]

    def test_two_claims_at_once_never_share_a_job(self, database):
        put(database, *(new("a/1") for _ in range(4)))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        database.transaction_sync(turns.insert, [("a/1", 0)])
        d = database.dialect
        with database.sync_engine.connect() as one, database.sync_engine.connect() as two:
            with one.begin(), two.begin():
                first = claim.claim(one, d, ask(take=1, per_key=2))
                second = claim.claim(two, d, ask(take=1, per_key=2))
            assert len(first.jobs) == 2
            assert second.jobs == []
        assert lost(database) == []
        third = take(database)
        assert {row.id for row in first.jobs} & {row.id for row in third.jobs} == set()
        assert len(third.jobs) == 2

    def test_an_enqueue_that_is_not_committed_blocks_nobody_and_is_found_later(self, database):
        put(database, new("a/1"))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        d = database.dialect
        with database.sync_engine.connect() as business, business.begin():
            jobs.insert(business, d, [new("a/1")])
            claimed = take(database)
            assert len(claimed.jobs) == 1
            finish(database, claimed)
        assert len(take(database).jobs) == 1
        assert lost(database) == []

    def test_two_claims_at_once_keep_the_cap_of_what_is_above_both(self, database, watch):
        """The second waits for the first one's commit, and then counts its job."""
        policies = Policies(concurrency={"a": 1})
        put(database, new("a/1"), new("a/2"))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2"])
        with database.sync_engine.connect() as one, ThreadPoolExecutor(1) as other:
            with one.begin():
                first = claim.claim(one, database.dialect, ask(policies, take=1))
                second = other.submit(take, database, policies)
                assert until_it_waits(watch, second), "it did not wait"
            assert (len(first.jobs), second.result(LIMIT).jobs) == (1, [])
        assert lost(database) == []

    def test_two_claims_at_once_elect_one_probe_of_what_is_above_both(self, database, clock, watch):
        """The second has read that the circuit is due; it waits for the first one's commit, and then reads it again."""
        put(database, new("a/1"), new("a/2"))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2"])
        database.transaction_sync(gates.open_, "a", until=clock.now() - timedelta(seconds=1))
        before = database.transaction_sync(resources.read, ["a"])["a"].breaker.generation
        with database.sync_engine.connect() as one, ThreadPoolExecutor(1) as other:
            with one.begin():
                first = claim.claim(one, database.dialect, ask(take=1, worker_id="w1"))
                second = other.submit(take, database, worker_id="w2")
                assert until_it_waits(watch, second), "it did not wait"
            assert probed(first) == ["a"]
            assert (second.result(LIMIT).jobs, second.result(LIMIT).probes) == ([], {})
        breaker = database.transaction_sync(resources.read, ["a"])["a"].breaker
        assert (breaker.state, breaker.probe_owner, breaker.generation) == ("half_open", "w1", before + 1)
        assert list(parked(database).values()) == ["a"]

    @pytest.mark.parametrize("jobs_there", [1, 2])
    def test_a_job_that_is_changed_between_look_and_claim_keeps_its_turn(self, database, monkeypatch, jobs_there):
        """An edit bumps the version and writes no turn: the claim has taken the only one, and loses the job."""
        edited, *_ = put(database, *(new("a/1") for _ in range(jobs_there)))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        original = claim.start_if_ready

        def edited_first(*args, **kwargs):
            database.transaction_sync(Sweep(Edit(payload=1), JobFilter.of({"ids": [edited]})).step)
            return original(*args, **kwargs)

        monkeypatch.setattr(claim, "start_if_ready", edited_first)
        claimed = database.transaction_sync(claim.claim, ask())
        assert (claimed.lost_count, len(claimed.jobs)) == (1, jobs_there - 1)
        assert lost(database) == []
        monkeypatch.undo()
        assert [row.id for row in take(database).jobs] == [edited]

    @pytest.mark.parametrize("due", ["a", "a/1"])
    def test_a_probe_that_is_lost_between_look_and_claim_leaves_the_circuit_due(
        self, database, clock, monkeypatch, due
    ):
        """Elected, it would have kept everybody waiting for a verdict that nobody brings."""
        edited, *_ = put(database, new("a/1", priority=1), new("a/1"), new("a/2"))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2"])
        database.transaction_sync(gates.open_, due, until=clock.now() - timedelta(seconds=1))
        original = claim.start_if_ready

        def edited_first(c, d, rows, *args, **kwargs):
            ids = [row.id for row in rows]
            assert edited in ids
            database.transaction_sync(Sweep(Edit(payload=1), JobFilter.of({"ids": [edited]})).step)
            return original(c, d, rows, *args, **kwargs)

        monkeypatch.setattr(claim, "start_if_ready", edited_first)
        claimed = database.transaction_sync(claim.claim, ask())
        monkeypatch.undo()
        assert (claimed.lost_count, claimed.probes) == (1, {})
        assert parked(database) == {}
        breaker = database.transaction_sync(resources.read, [due])[due].breaker
        assert (breaker.state, breaker.probe_owner) == ("isolated", None)
        again = take(database)
        assert probed(again) == [due]
        assert lost(database) == []

    def test_a_gate_that_opens_between_judging_and_parking_strands_nobody(self, database):
        """Claim reads the pause; the resume commits, releasing nothing; then the claim parks."""
        put(database, new("a/1"))
        database.transaction_sync(resources.ensure, ["a", "a/1"])
        database.transaction_sync(gates.pause, "a", reason="maintenance")
        d = database.dialect
        original = turns.park

        def resumed_first(*args, **kwargs):
            database.transaction_sync(gates.resume, "a")
            return original(*args, **kwargs)

        claim.turns.park = resumed_first
        try:
            assert database.transaction_sync(claim.claim, ask()).jobs == []
        finally:
            claim.turns.park = original
        assert parked(database) == {}
        assert ordinary(database) == ["a/1"]
        assert keys(take(database)) == ["a/1"]
        assert d.is_postgresql

    def test_a_slot_that_is_freed_while_a_key_parks_is_not_lost(self, database, watch):
        """The finisher waits for the claim's lock on the capped resource, then sees the parked turn."""
        policies = Policies(concurrency={"a": 1})
        put(database, new("a/1"), new("a/2"))
        database.transaction_sync(resources.ensure, ["a", "a/1", "a/2"])
        running = take(database, policies, take=1)
        assert len(running.jobs) == 1
        d = database.dialect
        with database.sync_engine.connect() as one, ThreadPoolExecutor(1) as other:
            with one.begin():
                assert claim.claim(one, d, ask(policies)).jobs == []  # parked, not committed
                finisher = other.submit(finish, database, running, ["a"])
                assert until_it_waits(watch, finisher), "it waits for the lock on the capped resource"
            finisher.result(LIMIT)
        assert parked(database) == {}
        assert len(take(database, policies).jobs) == 1


def test_keys_that_come_when_all_slots_are_promised_keep_their_turns_and_are_counted(database):
    put(database, *[new(f"a/{n}") for n in range(4) for _ in range(3)])
    claimed = take(database, slots=6, per_key=3)
    assert (len(claimed.jobs), len({*keys(claimed)}), claimed.unserved) == (6, 2, 2)
    assert len(ordinary(database)) == 2


def test_the_number_of_a_turn_is_never_used_again(database):
    """Workers remember how far all smaller ones were gone."""
    put(database, new("a/1"), new("a/2"))
    first = [t.id for t in database.transaction_sync(turns.take, turns.Selection(10))]
    database.transaction_sync(turns.insert, [("a/1", 0), ("a/2", 0)])
    assert min(t.id for t in database.transaction_sync(turns.take, turns.Selection(10))) > max(first)


def test_a_process_that_stops_in_the_middle_keeps_no_row_locked_for_ever(open_database, postgres_url):
    """PostgreSQL ends the engine's own transactions after ten idle seconds, and nobody else's."""
    database = open_database(postgres_url)
    (id_,) = put(database, new("a/1"))
    database.transaction_sync(resources.ensure, ["a", "a/1"])

    def after(fn, *args):
        def run(c, d):
            fn(c, d, *args)
            return d.run(c, "SELECT current_setting('idle_in_transaction_session_timeout')").scalar()

        return database.transaction_sync(run)

    row = workers.Beat(id="w", host="h", pid=1, kinds=["k"], concurrency=1, running=0, code_version="0", stopping=False)
    assert after(claim.claim, ask()) == "10s"
    assert after(beat, row, [(id_, 1)], timedelta(seconds=60), lambda: 0.0) == "10s"
    assert after(write, [(id_, 1, None)], [], {}) == "10s"
    assert after(jobs.insert, [new("a/1")]) == "0"


def test_a_claim_waits_for_no_job(postgres_database):
    """It has its resources in hand: whoever holds the job may wait for one of them, or for somebody who does."""
    held, free, edited = put(postgres_database, new("a/1"), new("a/1"), new("b/1"))
    postgres_database.transaction_sync(resources.ensure, ["a", "a/1", "b", "b/1"])
    with postgres_database.sync_engine.begin() as other:
        other.exec_driver_sql(f"UPDATE resilient_job SET priority = 1 WHERE id IN ('{held}', '{edited}')")
        claimed = postgres_database.transaction_sync(claim.claim, ask())
        assert [row.id for row in claimed.jobs] == [free]
        assert (claimed.lost_count, sorted(claimed.conflicts)) == (2, ["a/1", "b/1"])
        assert ordinary(postgres_database) == ["a/1", "b/1"]
    assert {row.id for row in take(postgres_database).jobs} == {held, edited}


def test_whether_there_are_other_accounts(database):
    def are_there():
        return database.transaction_sync(resources.has_accounts)

    assert not are_there()
    for made in (["a", "a/1"], ["a/1/x", "a/1/y"], ["b"]):
        database.transaction_sync(resources.ensure, made)
        assert not are_there()
    database.transaction_sync(resources.ensure, ["a/2"])
    assert are_there()


KEYS = [
    "github",
    "github/a",
    "github/a/b",
    "github/a/b/c",
    "github.com/a",
    "git+hub/a",
    "gitXhub/a",
    "Github/a",
    "crm/a",
    "crm/b/a",
]
PATTERNS = [
    ["github"], ["github/*"], ["github/**"], ["github/*/b"], ["*/a"], ["g?thub/a"], ["git+hub"],
    ["crm/b", "github/a/*"], ["gi*b/*", "crm"], ["github.com/?"],
]  # fmt: skip


@pytest.mark.parametrize("patterns", PATTERNS, ids=" ".join)
def test_a_claim_takes_only_what_its_patterns_serve(database, patterns):
    put(database, *(new(key) for key in KEYS))
    database.transaction_sync(resources.ensure, sorted({one for key in KEYS for one in path(key)}))
    claimed = take(database, resources=patterns)
    served = {key for key in KEYS if serves(key, patterns)}
    assert {job.resource_key for job in claimed.jobs} == {turn.resource_key for turn in claimed.turns} == served
    rest = take(database)
    assert {job.resource_key for job in rest.jobs} == set(KEYS) - served
