"""Resource rows on both databases: making, locking, reading, and what the claim writes."""

import uuid
from dataclasses import fields

import pytest

from resilient import Limit
from resilient.core.gates.admission import Level, ResourceFacts, admit, stop_of
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.policy import Policies, Policy
from resilient.store.gates import controls as gates
from resilient.store.gates import limits, resources
from resilient.store.jobs import insert as jobs


def run(database, fn, *args, **kwargs):
    return database.transaction_sync(fn, *args, **kwargs)


def set_columns(database, key, **columns):
    def update(c, d):
        names = ", ".join(f"{name} = :{name}" for name in columns)
        d.run(c, f"UPDATE {{resource}} SET {names} WHERE key = :key", {"key": key, **columns})

    run(database, update)


@pytest.fixture
def keys(database):
    run(database, resources.ensure, ["p/b", "p", "p/a", "p/a"])
    return ["p/a", "p/b", "p"]


def test_ensure_makes_what_is_missing_once(database, read_all, keys):
    run(database, resources.ensure, ["p", "q"])
    run(database, resources.ensure, [])
    rows = read_all("SELECT key, breaker, generation, revision FROM {resource} ORDER BY key")
    assert [(r["key"], r["breaker"], r["generation"], r["revision"]) for r in rows] == [
        (key, "closed", 0, 0) for key in ("p", "p/a", "p/b", "q")
    ]


def test_lock_leaves_reads_leaves_and_ancestors(clock, database, keys):
    now, locked, facts = run(database, resources.lock_leaves, ["p/b", "p/a", "p/new"], ["p", "nope"])
    assert now == clock.now()
    assert sorted(locked) == ["p/a", "p/b"]
    assert set(facts) == {"p", "p/a", "p/b"}
    assert facts["p"] == ResourceFacts("p", calm=True)
    assert run(database, resources.lock_leaves, ["none"], []) == (clock.now(), [], {})


def test_a_row_that_is_locked_is_read_once(postgres_database):
    """Read beside that as the statement began, it would be older than what was committed until it was locked."""

    def read(c, d):
        params = {"keys": d.pack_keys(["p/a"]), "above": d.pack_keys(["p/a", "p"])}
        return d.run(c, resources._lock_leaves_sql(d), params).all()

    run(postgres_database, resources.ensure, ["p/a", "p"])
    rows = run(postgres_database, read)
    assert [(row[0], row[resources.WIDTH]) for row in rows] == [("p/a", True), ("p", False)]


def test_without_a_test_clock_now_is_the_databases(database, keys):
    before = run(database, lambda c, d: d.now(c))
    now, _, _ = run(database, resources.lock_leaves, ["p/a"], [])
    assert before <= now <= run(database, lambda c, d: d.now(c))


def test_null_is_a_key_like_any_other(database):
    run(database, resources.ensure, ["null", "NULL/x"])
    assert set(run(database, resources.read, ["null", "NULL/x"])) == {"null", "NULL/x"}


def test_facts_have_every_column(clock, database, keys):
    later, earlier = clock.now().replace(year=2031), clock.now().replace(year=2029)
    gate = {
        "breaker": "half_open", "generation": 7, "open_until": later, "opened_at": earlier, "closed_at": earlier,
        "reopens": 3, "probe_owner": "w", "probe_until": later, "streak": 4, "blocked_until": later,
        "blocked_since": earlier, "blocked_code": "http_429", "paused_at": earlier, "paused_until": later,
        "paused_reason": "rent", "auth": "needs_reauth", "auth_since": earlier, "revision": 9,
    }  # fmt: skip
    set_columns(database, "p/a", **gate)
    run(database, gates.set_policy, "p/a", {"concurrency": 2})
    expected = ResourceFacts(
        "p/a", BreakerFacts("half_open", 7, later, earlier, earlier, 3, "w", later, 4), later, earlier, "http_429",
        earlier, later, "rent", "needs_reauth", earlier, {"concurrency": 2}, 10,
    )  # fmt: skip
    assert {f.name for f in fields(ResourceFacts)} == set(ResourceFacts.__slots__)
    assert run(database, resources.read, ["p/a"]) == {"p/a": expected}
    assert run(database, resources.lock_waiting, ["p/a"]) == {"p/a": expected}
    _, _, facts = run(database, resources.lock_leaves, ["p/a"], [])
    assert facts == {"p/a": expected}


@pytest.mark.parametrize(
    ("columns", "calm"),
    [
        ({}, True),
        ({"blocked_until": -1}, True),
        ({"blocked_until": 60}, False),
        ({"paused_at": 0}, False),
        ({"auth": "needs_reauth"}, False),
        ({"breaker": "open"}, False),
        ({"closed_at": -5}, False),
        ({"streak": 1}, False),
        ({"generation": 12, "revision": 3}, True),
    ],
)
def test_calm_says_what_stop_of_would(clock, database, keys, columns, calm):
    stamped = {
        k: clock.now() + clock.now().resolution * v * 10**6 if k.endswith(("_at", "_until")) else v
        for k, v in columns.items()
    }
    if stamped:
        set_columns(database, "p/a", **stamped)
    facts = run(database, resources.read, ["p/a"])["p/a"]
    assert facts.calm is calm
    if facts.calm:
        assert stop_of(ResourceFacts("p/a", facts.breaker), clock.now()) is None
        assert (facts.breaker.generation, facts.revision) == (
            stamped.get("generation", 0),
            stamped.get("revision", 0),
        )


def test_calm_rows_share_their_facts(database, keys):
    assert run(database, resources.read, ["p/a"])["p/a"] is run(database, resources.read, ["p/a"])["p/a"]


def test_touch_bumps_the_revision(clock, database, keys):
    run(database, resources.touch, ["p/a", "p"], clock.now())
    facts = run(database, resources.read, keys)
    assert {k: f.revision for k, f in facts.items()} == {"p/a": 1, "p/b": 0, "p": 1}


def test_count_running_is_at_or_below(clock, database):
    def insert(c, d):
        for key, state in [
            ("p/a", "running"),
            ("p/a/x", "running"),
            ("p/a/x", "ready"),
            ("p/a-b", "running"),
            ("p0", "running"),
        ]:
            id_ = uuid.uuid4()
            jobs.insert(c, d, [jobs.NewJob(id_, "k", key, "null")])
            d.run(c, "UPDATE {job} SET state = :state WHERE id = :id", {"state": state, "id": d.id(id_)})

    run(database, insert)
    counts = run(database, resources.count_running, ["p", "p/a", "p/a/x", "p/b"])
    assert counts == {"p": 3, "p/a": 2, "p/a/x": 1, "p/b": 0}


# -- what the claim writes -----------------------------------------------------------------------------------

POLICIES = Policies(limits={"p/*": [Limit(2, 1, burst=3, counts="jobs", name="j"), Limit(9, 1, burst=9, name="r")]})


def claim(c, d, keys, wanted, owner="w"):
    """The part of a claim that concerns resources: lock, judge, write; {key: admission}."""
    now, locked, facts = resources.lock_leaves(c, d, keys, ["p"])
    states = limits.read(c, d, keys)
    old = {k: Level(facts[k], POLICIES.for_key(k), states.get(k, {})) for k in [*locked, "p"] if k in facts}
    new, found = dict(old), {}
    for key in locked:
        found[key] = admit([new[key], new["p"]], wanted, now, owner)
        new |= {x.facts.key: x for x in found[key].levels}
    resources.write_levels(c, d, [old[k] for k in new], list(new.values()), now)
    return found


def test_drawn_job_limits_are_there_for_the_next_claim(clock, database, keys, read_all):
    assert run(database, claim, ["p/a", "p/b"], 2)["p/a"].count == 2
    assert run(database, claim, ["p/a"], 2)["p/a"].count == 1
    assert run(database, claim, ["p/a"], 2)["p/a"].count == 0
    assert run(database, claim, ["p/b"], 2)["p/b"].count == 1
    clock.advance(0.5)
    assert run(database, claim, ["p/a"], 2)["p/a"].count == 1
    rows = read_all("SELECT resource_key, name FROM {rate_limit} ORDER BY resource_key, name")
    assert [(r["resource_key"], r["name"]) for r in rows] == [
        ("p/a", "j"),
        ("p/b", "j"),
    ]  # "r" is only looked at


def test_an_elected_probe_is_written(clock, database, keys):
    run(database, gates.open_, "p", until=clock.now())
    run(database, gates.open_, "p/a", until=clock.now())
    found = run(database, claim, ["p/a"], 5)["p/a"]
    assert (found.count, found.probes) == (1, ("p/a", "p"))
    facts = run(database, resources.read, ["p", "p/a", "p/b"])
    for level in found.levels:
        written, b = facts[level.facts.key], level.facts.breaker
        assert written.breaker == b
        assert written.revision == level.facts.revision
    assert facts["p/b"].calm
    assert [x.count for x in run(database, claim, ["p/a", "p/b"], 5).values()] == [0, 0]
    clock.advance(60)
    again = run(database, claim, ["p/b"], 5, "w2")["p/b"]  # the lease of a dead probe is over
    assert (again.count, again.probes) == (1, ("p",))


def test_nothing_changed_writes_nothing(database, keys, read_all):
    before = read_all("SELECT * FROM {resource}")
    level = Level(ResourceFacts("p/a", calm=True), Policy(), {})
    run(database, lambda c, d: resources.write_levels(c, d, [level], [level], d.now(c)))
    assert read_all("SELECT * FROM {resource}") == before
