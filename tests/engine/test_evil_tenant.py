"""One tenant never harms another: an evil one against everything that accounts of one provider share.

Twenty good accounts do their work twice in the same run, first alone, then beside an evil tenant with accounts of his
own. What they finish is counted, by a clock that the test moves, so that no figure depends on the machine: beside him
they keep at least nine tenths of their pace.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import sys
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from uuid_utils.compat import uuid7

from resilient import (
    AnswerFacts,
    Bearer,
    Errors,
    Failure,
    FailureKind,
    Job,
    Limit,
    OAuth2,
    Provider,
    Pruned,
    Resilient,
    ResourceStopped,
    Retention,
    Retry,
    Rule,
    Wait,
    handler,
)
from resilient.core.gates.policy import Policies
from resilient.core.gates.retry_after import FEW, LEAST
from resilient.engine.gates.gate import Gate
from resilient.engine.inspect.retention import Walk
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import resources
from resilient.store.jobs import insert
from resilient.wire.requests.pool import Pool, PoolSettings
from tests.helpers import LIMIT, until
from tests.serving import Latch

GOOD, EVIL, STEPS, STEP = 20, 8, 5, 30.0
PACE = 0.9
ABSURD = "9" * 300


@handler("ask", retry=Retry(max_attempts=None), timeout=600)
async def ask(job: Job[None]) -> None:
    (await job.client.get("/x")).raise_for_status()


class Host:
    """Answers the good at once and well, the evil as `evil` says: (status, headers, body)."""

    def __init__(self):
        self.evil = (200, {}, b"{}")
        self.served = {"good": 0, "evil": 0}
        self.hangs: Latch | None = None  # what the evil wait for

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        said = dict(scope["headers"]).get(b"authorization", b"").decode()
        who = "good" if said.startswith("Bearer good") else "evil"
        self.served[who] += 1
        status, headers, body = (200, {}, b"{}") if who == "good" else self.evil
        if who == "evil" and self.hangs is not None:
            await self.hangs.wait()
        pairs = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        raw = [(k.encode(), v.encode()) for k, v in pairs.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def nobody():
    """An address where nobody listens: it is taken, so that no other process gets it meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture
def hosts(serve):
    """The provider's, and one of the evil tenant's own."""
    found = Host(), Host()
    for host in found:
        host.url = serve(host)
    return found


class World:
    """An app whose provider has good and evil accounts."""

    def __init__(self, database, clock, facts, options):
        self.clock, self.facts = clock, facts
        options = {"handlers": [ask], "secrets": [new_key()], **options}
        self.app = Resilient(database, providers=[facts], **options)
        self.good = [f"{facts.name}/good-{n}" for n in range(GOOD)]
        self.evil = [f"{facts.name}/evil-{n}" for n in range(EVIL)]

    async def connect(self, home, evil_home, **evil):
        needs = self.facts.placeholders
        for key in self.good:
            details = dict.fromkeys(needs, home)
            await self.app.connections.add(key, token=key.partition("/")[2], details=details)
        for key in self.evil:
            details = dict.fromkeys(needs, evil_home)
            if evil:
                await self.app.connections.import_(key, details=details, **evil)
            else:
                await self.app.connections.add(key, token=key.partition("/")[2], details=details)

    async def work(self, *, evil):
        """So much virtual time of work; how many jobs the good accounts finished."""
        before = await self.done()
        for _ in range(STEPS):
            for key in self.good:
                await self.app.enqueue(ask, None, resource_key=key)
            if evil:
                for key in self.evil:
                    await self.app.enqueue_many(ask, [None] * 4, resource_key=key)
            await self.app.worker(concurrency=8).drain(timeout=LIMIT)
            self.clock.advance(STEP)
        return await self.done() - before

    async def done(self):
        return await self.app.jobs.count(state="succeeded", resource=f"{self.facts.name}/good-*")


@pytest.fixture
async def worlds(clock):
    """``worlds(database, facts, **options)``."""
    made = []

    def make(database, facts, **options):
        world = World(database, clock, facts, options)
        made.append(world)
        return world

    yield make
    for world in made:
        await world.app.close()


@pytest.fixture
def make(worlds, database):
    """On both databases: what their locks and queues are about."""
    return partial(worlds, database)


@pytest.fixture
def make_one(worlds, sqlite_database):
    """On one: what is decided before any database."""
    return partial(worlds, sqlite_database)


def shared(url, **more):
    """All accounts at one host."""
    return Provider(name="api", base_url=url, auth=(Bearer(),), **more)


def apart(**more):
    """Each account at the host it names."""
    return Provider(name="api", base_url="{home}", auth=(Bearer(),), private_hosts=("127.0.0.1",), **more)


async def compare(world, thing):
    """With and without him in one run."""
    alone = await world.work(evil=False)
    beside = await world.work(evil=True)
    sys.stdout.write(f"{thing}: good accounts finish {beside} jobs beside the evil tenant, {alone} without him\n")
    assert alone == GOOD * STEPS
    assert beside >= PACE * alone


LIMITED = {"provider": [Limit(100_000, per="1m", name="app")], "account": [Limit(600, per="1m", name="core")]}
MONTHLY = Errors(code=("code",), rules=(Rule(FailureKind.QUOTA, status=429, code="month", wait=Wait(period="month")),))
STATED = {"retry-after": ABSURD, "x-ratelimit-limit": "7", "x-ratelimit-remaining": "0", "x-ratelimit-reset": ABSURD}
BOMB = gzip.compress(gzip.compress(b"0" * 50_000_000))


def cost(answer):
    """What the body says, as it says it."""
    return answer.body["cost"] if isinstance(answer.body, dict) and "cost" in answer.body else None


@pytest.mark.parametrize(
    ("thing", "answer"),
    [
        ("the provider's circuit, shared host", (503, {}, b"{}")),
        ("told times, on 503", (503, {"retry-after": ABSURD}, b"{}")),
        ("told times, on 429", (429, {"retry-after": ABSURD}, b"{}")),
        ("stated budgets", (200, STATED, b"{}")),
        ("budgets of the provider's standard fields", (200, {"ratelimit": '"x";r=0;t=999999999999'}, b"{}")),
        ("a budget that lasts for months", (429, STATED, b'{"code": "month"}')),
        ("costs", (200, {}, json.dumps({"cost": 1e300}).encode())),
        ("costs that are no numbers", (200, {}, b'{"cost": NaN}')),
        ("the fuse: keys that were never any good", (401, {}, b"{}")),
        ("memory: a body that is larger inside", (200, {"content-encoding": "gzip, gzip"}, BOMB)),
        ("memory: the body of an error", (500, {"content-encoding": "gzip"}, gzip.compress(b"\x1b[31m" * 2_000_000))),
    ],
    ids=lambda value: value.partition(":")[0].replace(" ", "_") if isinstance(value, str) else "",
)
async def test_at_the_host_of_all(hosts, make_one, thing, answer):
    world = make_one(shared(hosts[0].url, limits=LIMITED, errors=MONTHLY, cost=cost))
    await world.connect("", "")
    hosts[0].evil = answer
    await compare(world, thing)
    assert hosts[0].served["evil"] > 0


@pytest.mark.parametrize(
    ("thing", "answer"),
    [
        ("the provider's circuit, his own host", (503, {"retry-after": ABSURD}, b"{}")),
        ("told times, his own host", (429, {"retry-after": ABSURD}, b"{}")),
        ("limits that all share, his own host", (200, {"ratelimit": '"app";r=0;t=999999999999'}, b'{"cost": 1e300}')),
        ("the provider's circuit, a host where nobody is", None),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
async def test_at_a_host_of_his_own(hosts, make_one, nobody, thing, answer):
    world = make_one(apart(limits=LIMITED, cost=cost))
    await world.connect(hosts[0].url, hosts[1].url if answer else nobody)
    hosts[1].evil = answer
    await compare(world, thing)
    assert (await world.app.resources.get("api")).gate is None


@pytest.mark.parametrize(
    "answer",
    [
        (503, {"retry-after": ABSURD}, b"{}"),
        (429, {"retry-after": ABSURD}, b"{}"),
        (401, {}, b'{"error": "invalid_client"}'),
        (400, {}, b'{"error": "invalid_grant"}'),
    ],
    ids=["503", "429", "invalid_client", "invalid_grant"],
)
async def test_the_token_endpoint(hosts, make_one, clock, answer):
    oauth = OAuth2(token_url="{home}/token", authorize_url="{home}/authorize", client_id="app", client_secret="s")
    facts = Provider(name="api", base_url="{home}", auth=(oauth, Bearer()), private_hosts=("127.0.0.1",))
    world = make_one(facts)
    hosts[1].evil = answer
    ended = clock.now() - timedelta(seconds=5)
    await world.connect(hosts[0].url, hosts[1].url, access_token="evil", refresh_token="evil", expires_at=ended)
    await compare(world, f"the token endpoint, {answer[0]}")
    assert hosts[1].served["evil"] > 0


async def test_the_log(hosts, make_one, caplog):
    """What stops is told, once an account; what fails is at most a line a request, and no line is his to write."""
    caplog.set_level(logging.INFO)
    world = make_one(shared(hosts[0].url))
    await world.connect("", "")
    hosts[0].evil = (503, {}, b'{"message": "a\\nforged line"}')
    await compare(world, "the log")
    lines = [record for record in caplog.records if "evil" in record.getMessage()]
    loud = [record for record in lines if record.levelno >= logging.WARNING]
    assert len(loud) <= STEPS * EVIL
    assert len(lines) - len(loud) <= hosts[0].served["evil"]
    assert not any("\n" in record.getMessage() for record in lines)


SLOTS = 50


def patient(worker):
    """No request is given up and repeated while the test looks."""
    worker.wire.pool = Pool(PoolSettings(read=600))
    return worker


class Slow(Host):
    """Answers nobody before `open` is set, and counts whose requests it holds at once."""

    def __init__(self):
        super().__init__()
        self.open, self.hangs = Latch(), Latch()
        self.holds = {"good": 0, "evil": 0}
        self.most = {"good": 0, "evil": 0}

    async def __call__(self, scope, receive, send):
        who = "good" if b"good" in dict(scope["headers"])[b"authorization"] else "evil"
        self.holds[who] += 1
        self.most[who] = max(self.most[who], self.holds[who])
        if who == "good":
            await self.open.wait()
        await super().__call__(scope, receive, send)
        self.holds[who] -= 1


@pytest.fixture
async def slow(serve, make):
    """A host that holds requests, an app, and what connects its accounts and starts a worker of `SLOTS` slots."""
    host = Slow()
    world = make(shared(serve(host)))
    worker = patient(world.app.worker(concurrency=SLOTS))
    running = []

    async def start():
        await world.connect("", "")
        running.append(asyncio.create_task(worker.run(signals=False)))

    yield host, world, start
    worker.stop()
    host.open.set()
    host.hangs.set()
    await asyncio.gather(*running)


async def finished(world, count):
    async with asyncio.timeout(LIMIT):
        while await world.done() < count:  # noqa: ASYNC110 - written in batches
            await asyncio.sleep(0.05)


async def test_requests_that_hang_among_others(slow):
    """All have more work than there are slots: what hangs holds a tenth of them at most, without any cap."""
    host, world, start = slow
    await world.app.enqueue_many(ask, [None] * 4 * SLOTS, resource_key=world.evil[0])
    for key in world.good:
        await world.app.enqueue_many(ask, [None] * 2 * STEPS, resource_key=key)
    await start()
    await until(lambda: host.holds["good"] >= PACE * SLOTS and host.holds["evil"])
    most = dict(host.most)  # what is answered at once may have more
    host.open.set()
    await finished(world, 2 * GOOD * STEPS)
    sys.stdout.write(f"slots: the good hold {most['good']} of {SLOTS} at once, what hangs {most['evil']}\n")
    assert PACE * SLOTS <= most["good"] <= SLOTS
    assert 0 < most["evil"] <= SLOTS - PACE * SLOTS


async def test_requests_that_hang_before_the_others_come(slow):
    """Alone at work, it fills half of the slots and no more; the others have the rest."""
    host, world, start = slow
    await world.app.enqueue_many(ask, [None] * 4 * SLOTS, resource_key=world.evil[0])
    await start()
    await until(lambda: host.holds["evil"] == SLOTS // 2)
    for key in world.good:
        await world.app.enqueue_many(ask, [None] * STEPS, resource_key=key)
    await until(lambda: host.holds["good"] == SLOTS // 2)
    host.open.set()
    await finished(world, GOOD * STEPS)
    assert host.most["evil"] == SLOTS // 2


async def test_an_account_that_a_database_has_alone_uses_all_slots(slow):
    host, world, start = slow
    world.good, world.evil = world.good[:1], []
    await world.app.enqueue_many(ask, [None] * 2 * SLOTS, resource_key=world.good[0])
    await start()
    await until(lambda: host.holds["good"] == SLOTS)
    host.open.set()
    await finished(world, 2 * SLOTS)


async def test_slots_and_connections(hosts, make):
    """All his accounts hang, and each has a cap: the others' jobs find slots and connections."""
    world = make(shared(hosts[0].url), concurrency={"api/*": 1})
    await world.connect("", "")
    hosts[0].hangs = Latch()
    for key in world.evil:
        await world.app.enqueue_many(ask, [None] * 50, resource_key=key)
    worker = patient(world.app.worker(concurrency=EVIL + 4))
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: hosts[0].served["evil"] >= EVIL)
    for key in world.good:
        await world.app.enqueue_many(ask, [None] * STEPS, resource_key=key)
    await finished(world, GOOD * STEPS)
    sys.stdout.write(f"slots: {await world.done()} jobs of good accounts beside {hosts[0].served['evil']} that hang\n")
    assert hosts[0].served["evil"] == EVIL
    hosts[0].hangs.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_backlog_and_history(hosts, make, clock):
    """Thousands of his jobs wait or are over: claims, locks and pruning go by what is due, not by what is his."""
    world = make(shared(hosts[0].url), retention=Retention(succeeded=timedelta(hours=1)))
    await world.connect("", "")
    hosts[0].evil = (429, {"retry-after": ABSURD}, b"{}")
    for key in world.evil:
        await world.app.enqueue_many(ask, [None] * 400, resource_key=key)
    await compare(world, "locks and the backlog")
    assert hosts[0].served["evil"] <= 4 * EVIL


HISTORY, BATCH, KEPT = 3_000, 100, timedelta(hours=1)


def finish(c, d, keys, number, state, at):
    """So many jobs of these accounts that were over at that time."""
    made = [
        insert.NewJob(id=uuid7(), kind="ask", resource_key=keys[n % len(keys)], payload="null") for n in range(number)
    ]
    for first in range(0, number, 500):
        insert.insert(c, d, made[first : first + 500])
    d.run(c, "DELETE FROM {turn}")
    d.run(
        c, "UPDATE {job} SET state = :state, finished_at = :at_at WHERE state = 'ready'", {"state": state, "at_at": at}
    )


async def test_a_long_history_delays_nobodys_pruning_or_claims(hosts, make, clock):
    """He has most of what is over, and the oldest of it: each transaction of pruning is as short as without him, what
    others have of another sort goes meanwhile, and between any two of them their jobs run.
    """
    world = make(shared(hosts[0].url), retention=Retention(succeeded=KEPT, cancelled=KEPT, dead=KEPT, batch=BATCH))
    await world.connect("", "")
    run, now = world.app.database.transaction, clock.now()
    await run(finish, world.evil, HISTORY, "succeeded", now - 3 * KEPT)
    await run(finish, world.good, GOOD, "cancelled", now - 2 * KEPT)
    await run(finish, world.good, GOOD, "dead", now - 2 * KEPT)
    walk, statements = Walk.by_age(world.app.retention), []
    for served in range(2 * len(Pruned.__slots__)):
        before = await world.app.jobs.count()
        await run(walk.step)
        statements.append(before - await world.app.jobs.count())
        await world.app.enqueue(ask, None, resource_key=world.good[served % GOOD])
        await world.app.worker(concurrency=8).drain(timeout=LIMIT)
        assert await world.done() == served + 1
    assert max(statements) <= BATCH
    assert walk.tally["cancelled"] == walk.tally["dead"] == GOOD
    assert 0 < walk.tally["succeeded"] < HISTORY / 2


async def test_rows_of_his_that_are_held_delay_nobody(hosts, worlds, postgres_database, clock):
    """Somebody's transaction holds all of his jobs, old and new: others' are pruned and claimed past them."""
    world = worlds(postgres_database, shared(hosts[0].url), retention=Retention(succeeded=KEPT, batch=BATCH))
    await world.connect("", "")
    run, now = world.app.database.transaction, clock.now()
    await run(finish, world.evil, 5 * BATCH, "succeeded", now - 3 * KEPT)
    await run(finish, world.good, GOOD, "succeeded", now - 2 * KEPT)
    for key in world.evil:
        await world.app.enqueue_many(ask, [None] * 10, resource_key=key)
    with psycopg.connect(postgres_database.url.render_as_string(hide_password=False)) as held:
        held.execute("SET lock_timeout = '5s'")
        held.execute("SELECT 1 FROM resilient_job WHERE resource_key LIKE 'api/evil-%' FOR UPDATE").fetchall()
        async with asyncio.timeout(LIMIT):
            pruned = await world.app.prune()
        for key in world.good:
            await world.app.enqueue(ask, None, resource_key=key)
        worker = world.app.worker(concurrency=8)
        running = asyncio.create_task(worker.run(signals=False))
        async with asyncio.timeout(LIMIT):
            while await world.done() < GOOD:  # noqa: ASYNC110 - written in batches
                await asyncio.sleep(0.05)
        assert hosts[0].served["evil"] == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert pruned.succeeded == GOOD


ROUNDS = 3


async def test_throttles_of_his_accounts_do_not_slow_down_a_provider_whose_limit_is_known(sqlite_database, clock):
    """Three of his, throttled together as often as he likes: the root, which has learnt a limit, rests once at most."""
    policies = Policies(learn={"api": (1000, 1000)}, limits={"api/*": [Limit(1000, 1, burst=1000)]})
    gate = Gate(sqlite_database, policies, owner="w", monotonic=lambda: clock.now().timestamp())
    await gate.start()
    good, stopped, throttle = [f"api/good-{n}" for n in range(GOOD)], 0, Failure(FailureKind.THROTTLED, retry_in=1.0)

    async def throttled(keys):
        permits = [await gate.admit(key) for key in keys]
        for key, permit in zip(keys, permits, strict=True):
            await gate.answered(permit, key, AnswerFacts(429), throttle)

    async def well(keys):
        for key in keys:
            await gate.answered(await gate.admit(key), key, AnswerFacts(200), None)

    async def root():
        return (await sqlite_database.transaction(resources.read, ["api"]))["api"].learnt

    await well(good[:LEAST])
    await throttled(good[:LEAST])
    assert ((await root()).kind, (await root()).throttles) == ("rate", 1)
    for _ in range(ROUNDS):
        clock.advance(31)
        await well(good)
        await throttled([f"api/evil-{n}" for n in range(FEW)])
        for key in good:
            try:
                gate.abandoned(await gate.admit(key))
            except ResourceStopped:
                stopped += 1
    assert (await root()).throttles <= 2
    assert stopped <= len(good)
    await gate.close()
