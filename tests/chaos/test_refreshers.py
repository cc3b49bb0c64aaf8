"""Processes that refresh tokens are killed at each step of it, and at random, while all accounts' tokens end.

What is promised: of an account whose provider takes the refresh token before the last, nothing is lost. Where each
works once, and only where a process died between the provider's answer and its commit, one more request finds the
grant dead: the account is marked with the provider's word, its jobs wait and go on when a person has connected it.
No job is charged an attempt for any of this. RESILIENT_CHAOS_SECONDS, RESILIENT_CHAOS_SEED: see `test_random.py`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import history
import pytest
import refreshing
from harness import new, put, states, unfinished, wait
from token_endpoint import LIFETIME, SINGLE_USE

from resilient import Resilient
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT

pytestmark = pytest.mark.proof("test_every_cut.py: a refresh, cut around each commit")

QUICK = 3.0
SECONDS = float(os.environ.get("RESILIENT_CHAOS_SECONDS", QUICK))
SEED = int(os.environ.get("RESILIENT_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
WORKERS = 3
ACCOUNTS = {"grace": 14, SINGLE_USE: 5}  # so many may die at once and be believed (`core/accounts/tokens.py`)
STEPS = [f"{name}:{phase}" for name in ("begin", "refresh", "renew_if_held") for phase in ("before", "inside", "after")]
NOW_AND_THEN = ["park:inside", "die_if_held:inside", "die_if_held:after", "keep_up:after"]  # where it comes to that
DEAD = """
SELECT c.resource_key FROM resilient_connection c JOIN resilient_grant g ON g.id = c.grant_id
WHERE g.state = 'needs_reauth'
"""
FATES = [*STEPS, *NOW_AND_THEN, "", "", ""]


def options(provider, key):
    return "--provider", provider.url, "--secret", key, "--lease", "1", "--concurrency", "6"


class Owners:
    """The people whose accounts these are."""

    def __init__(self, database, provider, key):
        self._provider = provider
        self.app = Resilient(database, providers=refreshing.providers(provider.url), secrets=[key], upgrade=False)
        self.keys = [f"{name}/{name}{n}" for name, count in ACCOUNTS.items() for n in range(count)]
        self.again = 0
        for account in self.keys:
            self.connect(account)

    def connect(self, key):
        pair = self._provider.connect(key.partition("/")[2])
        ends = datetime.now(UTC) + timedelta(seconds=LIFETIME)
        tokens = {name: pair[name] for name in ("access_token", "refresh_token")}
        self.app.sync.connections.import_(key, **tokens, expires_at=ends)

    def look(self):
        """Who is told that an account is dead connects it again."""
        for row in history.rows(self.app.database, DEAD):
            self.connect(row.resource_key)
            self.again += 1


# -- the scenario ------------------------------------------------------------------------------------------------------


class Nemesis:
    """Keeps so many workers at work, each until it has met its fate: to die at a step, or after so many refreshes."""

    def __init__(self, database, crew, provider, key, rng):
        self.database, self.crew, self.provider, self.rng = database, crew, provider, rng
        self.options = options(provider, key)
        self.fates, self.refreshes = {}, {}
        self.to_come = rng.sample([*STEPS, "", ""], len(STEPS) + 2)

    def hire(self):
        while len(self.crew.alive()) < WORKERS:
            self.to_come = self.to_come or self.rng.sample(FATES, len(FATES))
            step = self.to_come.pop()
            kill = ["--kill", f"{step}:{self.rng.randrange(1, 4)}"] if step else []
            child = self.crew.start(self.database, *self.options, *kill)
            self.fates[child.pid], self.refreshes[child.pid] = step, self.rng.randrange(2, 8) + 8 * bool(step)

    def disturb(self, seconds):
        """Until it has lasted so long and each of the steps was reached; sleeps and yields."""
        began = time.monotonic()
        while time.monotonic() < began + seconds or self.unreached:
            assert time.monotonic() < began + seconds + 90, f"not reached: {self.unreached}\n{self.crew.said()}"
            self.hire()
            yield
            time.sleep(0.1)
            sent = Counter(line["process"] for line in self.provider.exchanges() if line["event"] == "asked")
            for child in self.crew.alive():
                if sent[child.pid] >= self.refreshes[child.pid]:
                    child.kill()

    @property
    def unreached(self):
        return set(STEPS) - {self.fates[line["n"]] for line in self.crew.runs("kill")}

    @property
    def victims(self):
        return {child.pid for child in self.crew.started if child.poll() == -signal.SIGKILL}


class Work:
    """Jobs of all accounts."""

    def __init__(self, database, keys, rng):
        self.database, self.keys, self.rng, self.ids = database, keys, rng, []

    def more(self):
        """There is always something to do, and never much."""
        if unfinished(self.database) > len(self.keys):
            return
        keys, first = self.rng.sample(self.keys, len(self.keys) // 2), len(self.ids)
        self.ids += put(self.database, *(new("work", key, {"n": first + n}) for n, key in enumerate(keys)))


@pytest.fixture(params=["postgresql", "sqlite"] if SECONDS > QUICK else ["postgresql"])
def database(request, open_database):
    """With the history of its jobs and grants written down."""
    database = open_database(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))
    history.install(database)
    refreshing.install(database)
    return database


@pytest.mark.chaos
def test_a_refresher_killed_at_any_step_costs_no_account_and_no_attempt(database, crew, provider):
    print(f"RESILIENT_CHAOS_SEED={SEED} RESILIENT_CHAOS_SECONDS={SECONDS:g}")  # noqa: T201
    rng, key = random.Random(SEED), new_key()
    owners, nemesis = Owners(database, provider, key), Nemesis(database, crew, provider, key, rng)
    work = Work(database, owners.keys, rng)
    for _ in nemesis.disturb(SECONDS):
        work.more()
        owners.look()
    healed = time.monotonic()
    for _ in range(2):
        crew.start(database, *nemesis.options)  # of the others each may still die at its step
    wait(
        lambda: owners.look() or not unfinished(database),
        90,
        about=lambda: f"seed {SEED}: {unfinished(database)} left\n{crew.said()}",
    )
    healing = time.monotonic() - healed
    for child in crew.alive():
        child.terminate()
    for child in crew.started:
        child.wait(LIMIT)
    broken = refreshing.check(database, provider) + history.check(database, crew.log, committed=work.ids)
    broken += history.delivered(database, provider.arrivals()) + crew.stranded()
    accounts = refreshing.accounts(database, provider.exchanges()).values()
    sent, lost = (sum(len(getattr(one, name)) for one in accounts) for name in ("exchanges", "unstored"))
    slow = sum(one.process not in nemesis.victims for account in accounts for one in account.unstored)
    facts = f"seed {SEED}: {len(work.ids)} jobs, {len(nemesis.victims)} killed, {sent} refreshes, {lost} answers lost,"
    facts += f" {slow} too slow for their lease, {owners.again} accounts connected again, healed in {healing:.1f} s"
    print(facts)  # noqa: T201
    assert broken == [], facts
    assert {(row.state, row.attempts) for row in states(database, work.ids)} == {("succeeded", 0)}, facts
    assert lost, facts


@pytest.mark.parametrize(("mutant", "rule"), [("no_refresh_lease", "G3"), ("no_refresh_mark", "G2")])
def test_an_engine_without_it_is_caught(postgres, crew, provider, mutant, rule):
    refreshing.install(postgres)
    key = new_key()
    owners = Owners(postgres, provider, key)
    put(postgres, *(new("work", account, {"n": n}) for n, account in enumerate(owners.keys[:3] * 30)))
    for _ in range(2):
        crew.start(postgres, *options(provider, key), "--mutant", mutant)
    wait(lambda: any(line.startswith(rule) for line in refreshing.check(postgres, provider)), about=crew.said)


# -- the checker -------------------------------------------------------------------------------------------------------


def exchange(begins, **over):
    facts = {"process": 1, "refresh_token": "r1", "status": 200, "token": "t1", "ends": begins + 0.2}
    return refreshing.Exchange(begins, **(facts | over))


def step(at, old, new_, *, version=0, code=None, lease=3.0):
    return SimpleNamespace(at=at, old=old, new=new_, version=version, code=code, lease=lease)


BEGUN, RENEWED = step(0.9, "active", "refreshing"), step(1.3, "refreshing", "active", version=1)
LOST = [step(3.9, "refreshing", "unknown"), step(4.9, "unknown", "refreshing")]
DIED = step(5.3, "refreshing", "needs_reauth", code="invalid_grant")
FIRST, REFUSED = exchange(1.0), exchange(5.0, status=400, token=None)


@pytest.mark.parametrize(
    ("name", "exchanges", "steps", "uses", "rules"),
    [
        ("grace1", [FIRST], [BEGUN, RENEWED], {"t1": [1.4, 2.0]}, []),
        ("once1", [FIRST, REFUSED], [BEGUN, *LOST, DIED], {}, []),
        ("grace1", [FIRST, exchange(5.0, token="t2")], [BEGUN, *LOST], {}, []),
        ("grace1", [exchange(1.0, ends=9.0), exchange(5.0)], [BEGUN, *LOST], {}, []),
        ("grace1", [FIRST], [BEGUN, RENEWED, step(2.0, "needs_reauth", "refreshing")], {}, ["G1"]),
        ("grace1", [FIRST], [BEGUN, step(2.0, "refreshing", "unknown")], {}, ["G1"]),
        ("grace1", [FIRST], [], {}, ["G2"]),
        ("grace1", [FIRST], [RENEWED], {}, ["G2"]),
        ("grace1", [FIRST, exchange(1.1, refresh_token="r2")], [BEGUN], {}, ["G3"]),
        ("grace1", [FIRST, REFUSED], [BEGUN, *LOST], {}, ["G4"]),
        ("once1", [FIRST, REFUSED], [BEGUN], {}, ["G4"]),
        ("once1", [FIRST, REFUSED], [BEGUN, RENEWED, *LOST], {}, ["G4"]),
        ("once1", [exchange(5.0, status=400)], [BEGUN, *LOST], {}, ["G4"]),
        ("grace1", [FIRST], [BEGUN, RENEWED], {"t1": [1.25]}, ["G5"]),
        ("grace1", [FIRST, exchange(5.0, token="t2")], [BEGUN, *LOST], {"t1": [6.0]}, ["G5"]),
        ("grace1", [exchange(5.0)], [*LOST, DIED], {}, ["G6"]),
        ("once1", [FIRST, REFUSED], [BEGUN, *LOST, step(5.3, "refreshing", "needs_reauth", code="x")], {}, ["G6"]),
    ],
)
def test_the_checker_names_the_rule(name, exchanges, steps, uses, rules):
    account = refreshing.Account(exchanges, steps, [0.0])
    assert [rule for rule, _ in refreshing.broken(name, account, uses)] == rules
