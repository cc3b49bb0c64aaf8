"""Races between real connections: one probe, no unit too many, no lost count, no deadlock."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Limit
from resilient.core.gates.admission import Level, admit
from resilient.core.gates.breaker import Report
from resilient.core.gates.learnt import Refusal
from resilient.core.gates.policy import Policies, Policy
from resilient.engine.gates import api as resources_api
from resilient.store.gates import circuits, limits, resources
from resilient.store.gates import controls as gates
from resilient.store.gates.circuits import Evidence
from tests import nursery
from tests.helpers import LIMIT

THREADS = 8
POLICIES = Policies()


def together(fn, count=THREADS):
    """Run ``fn(n)`` in threads that start at the same moment."""
    barrier = threading.Barrier(count)

    def one(n):
        barrier.wait()
        return fn(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def elect(c, d, leaf, owner):
    """A claim of one job, as far as resources go: leaves, then ancestors, then the verdict."""
    now, locked, facts = resources.lock_leaves(c, d, [leaf], ["p"])
    if not locked:
        return ()
    facts |= resources.lock_waiting(c, d, ["p"])
    old = [Level(facts[k], Policy(), {}) for k in (leaf, "p")]
    verdict = admit(old, 1, d.now(c), owner)
    resources.write_levels(c, d, old, verdict.levels, now)
    return verdict.probes


@pytest.mark.parametrize("leaves", [1, THREADS])
def test_exactly_one_of_eight_is_elected(database, leaves):
    """On the same leaf, and on eight leaves below one provider whose circuit is due."""
    keys = [f"p/{n}" for n in range(leaves)]
    for _ in range(5):
        past = datetime.now(UTC) - timedelta(seconds=5)
        database.transaction_sync(resources.ensure, [*keys, "p"])
        database.transaction_sync(gates.open_, "p", until=past)
        won = together(lambda n: database.transaction_sync(elect, keys[n % leaves], f"w{n}"))
        assert sorted(won)[-2:] == [(), ("p",)]
        b = database.transaction_sync(resources.read, ["p"])["p"].breaker
        assert b.probe_owner == f"w{won.index(('p',))}"


def test_a_read_then_write_election_would_fail_this(postgres_database):
    """The same race without the lock: the test above can fail."""

    def careless(c, d, owner):
        facts = resources.read(c, d, ["p"])["p"]
        meet.wait()
        verdict = admit([Level(facts, Policy(), {})], 1, d.now(c), owner)
        circuits.write_breakers(c, d, [(x.facts.key, x.facts.breaker) for x in verdict.levels], d.now(c))
        return verdict.probes

    at_once = 4  # each of them holds a connection while it waits for the others, of the few that are shared
    meet = threading.Barrier(at_once)
    postgres_database.transaction_sync(resources.ensure, ["p"])
    postgres_database.transaction_sync(gates.open_, "p", until=datetime.now(UTC) - timedelta(seconds=5))
    won = together(lambda n: postgres_database.transaction_sync(careless, f"w{n}"), at_once)
    assert won.count(("p",)) > 1


@pytest.fixture
def patient(monkeypatch):
    """Reports that wait for their turn: they give up where a machine keeps a holder from its processor for long."""
    monkeypatch.setattr(circuits, "SHORT_LOCK_WAIT", "1min")


@pytest.mark.usefixtures("patient")
def test_no_report_is_lost(database):
    database.transaction_sync(resources.ensure, ["p"])

    def send(_):
        for _ in range(10):
            evidence = [Evidence("p", Report(0, ok=1, children_ok=frozenset(".")))]
            database.transaction_sync(circuits.report_if_current, evidence, POLICIES, lambda: 0.0)

    together(send, 4)
    assert database.transaction_sync(circuits.lock, ["p"])["p"].breaker.window.ok == 40


@pytest.mark.usefixtures("patient")
def test_a_circuit_opens_once(database):
    database.transaction_sync(resources.ensure, ["p"])
    evidence = [Evidence("p", Report(0, failed=5, trailing=5, children_failed=frozenset(".")))]
    changes = together(lambda _: database.transaction_sync(circuits.report_if_current, evidence, POLICIES, lambda: 0.0))
    assert sum(map(len, changes)) == 1
    assert database.transaction_sync(resources.read, ["p"])["p"].breaker.generation == 1


def test_a_cooldown_is_counted_once(database):
    until = datetime.now(UTC) + timedelta(seconds=60)
    found = together(lambda _: database.transaction_sync(gates.cool_down, "p/a", until, "x", 0.5))
    assert sum(news for _, news in found) == 1


@pytest.mark.usefixtures("patient")  # else a report gives up where it waits long, deadlock or not
def test_locks_are_taken_in_one_order(database, monkeypatch):
    """Reports, touches, draws and hands on the same rows, named in every order: no deadlock."""
    keys = ["p", "p/a", "p/b", "p/b/x"]
    database.transaction_sync(resources.ensure, keys)
    limit = Limit(1e6, 1, burst=1e6)

    def meddle(n):
        for step in range(6):
            mixed = keys[(n + step) % 4 :] + keys[: (n + step) % 4]
            evidence = [Evidence(k, Report(0, ok=1, children_ok=frozenset("."))) for k in mixed]
            database.transaction_sync(circuits.report_if_current, evidence, POLICIES, lambda: 0.0)
            database.transaction_sync(lambda c, d: resources.touch(c, d, mixed, d.now(c)))  # noqa: B023
            database.transaction_sync(limits.draw, [limits.Ask(tuple((k, limit) for k in mixed))])
            database.transaction_sync(gates.pause, mixed[0])
            database.transaction_sync(gates.resume, mixed[0])

    together(meddle, 6)


WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.mark.parametrize("change", ["forget", "reset"])
def test_what_an_account_and_its_budgets_learnt_is_forgotten_beside_draws(
    postgres_url, open_database, change, monkeypatch
):
    """A draw from the path of a budget begins with its account's limit, and so does who forgets both."""
    one, other = open_database(postgres_url), open_database(postgres_url)
    account, budget = keys = ["p/a", "p/a/budget:search"]
    for key in keys:
        one.transaction_sync(gates.cool_down, key, None, "429", 0.5, refusal=Refusal(0, 1.0, 5, 0.2, 3))
    limit = Limit.learnt(1e6, 1.0, 1e6)
    asks = [limits.Ask(tuple((key, limit) for key in keys))]
    one.transaction_sync(limits.draw, asks)
    half_way, drop, drawing = threading.Event(), gates.drop_limit, []

    def drop_and_wait(c, d, key):
        drop(c, d, key)
        if key == budget:
            drawing.append(pool.submit(other.transaction_sync, limits.draw, asks))
            half_way.set()
            while not d.run(c, WAITING).scalar():
                assert not drawing[0].done()

    monkeypatch.setattr(gates, "drop_limit", drop_and_wait)
    with ThreadPoolExecutor(1) as pool:
        if change == "forget":
            one.transaction_sync(gates.forget, account)
        else:
            one.transaction_sync(resources_api._reset, account, policies=POLICIES)
        assert half_way.is_set()
        assert drawing[0].result(LIMIT)[0].draw.granted


DRAWER = """
import sys
from resilient.core.gates.rate_limit import Limit
from resilient.store.gates import limits
from resilient.store.db.database import Database

url, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
database = Database(url)
limit = Limit(rate, per=1)
ask = limits.Ask((("p", limit),))
database.transaction_sync(lambda c, d: d.now(c))
print("ready", flush=True)
sys.stdin.readline()
begin = now = None
while begin is None or now < begin + seconds:
    drawn = database.transaction_sync(limits.draw, [ask])[0]
    now = drawn.now
    begin = begin or now
    if drawn.draw.granted:
        print(repr(now))
database.close_sync()
"""


@pytest.mark.slow
def test_eight_processes_never_pass_one_limit(database_url, database):
    """Moments in the database's own time; any window of a second counts."""
    rate, span = 40, 2.5
    workers = [
        nursery.start(DRAWER, database_url, rate, span, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)
    ]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        times = sorted(float(line) for worker in workers for line in worker.communicate(timeout=LIMIT)[0].split())
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    most = max(sum(start <= t < start + 1 for t in times) for start in times)
    assert most <= rate
    assert len(times) >= 0.75 * rate * span  # and the limit is used
