"""The simulated world: a provider, a destination, workers, producers, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import httpx
import sqlalchemy as sa
from sqlalchemy.orm import Session

from resilient import (
    BreakerPolicy,
    Event,
    Idempotency,
    Limit,
    OAuth2,
    Provider,
    Resilient,
    Rotation,
)
from resilient.store.db.database import Database
from resilient.wire.publishers.base import lost, refused
from tests.simulation.accounts import LIFETIME, Accounts
from tests.simulation.loop import PROCESS
from tests.simulation.plan import LASTS, WORKERS
from tests.simulation.program import HANDLERS

MOST, ALL, PER = 4, 9, 1.0  # requests of an account, of all accounts
ROAD = 0.06  # seconds that a request may take to arrive
CAP = 3  # jobs of p/0 at once
LEASE = 2.0
END = 900.0  # seconds by which everything must be over


SECRET = "rsk1_c2ltdWxhdGVkIHNlY3JldCBvZiAzMiBieXRlcy4uLi4"
ACCOUNTS = Provider(
    name="q",
    base_url="https://q.example",
    auth=(OAuth2(token_url="https://q.example/token", client_id="c", margin=0.3, rotation=Rotation.GRACE),),
)


class Changed(Event, type="thing.changed"):
    key: str
    n: int


class World:
    """One run: what is asked of the engine, what it did, and what the provider and the destination saw."""

    def __init__(self, system, plan, path):
        self.system, self.plan, self.path = system, plan, path
        self.log, self.arrivals, self.arrived_events = [], [], []
        self.committed, self.rolled_back, self.events, self.workflows = [], [], [], []
        self.workers, self.modes, self.stored = {}, [], {}
        self.flows_committed = []
        self.stays = []  # seconds for which a job of q/0 had its slot
        self.started = 0
        self.errors = []
        self.accounts = Accounts(self.t)
        self.frozen = self.clock_steps = 0

    def t(self):
        """Seconds since the beginning."""
        return self.system.loop.now - 1_000.0

    # -- the provider ----------------------------------------------------------------------------------------

    def mode(self, what, who=None):
        """The fault of this kind that lasts now, for this account."""
        now = self.t()
        for fault in self.modes:
            if fault.what == what and fault.at <= now < fault.at + fault.lasts and who in (None, fault.who):
                return fault
        return None

    async def answer(self, request):
        if request.url.host == "q.example":
            return await self._answer_account(request)
        loop, dice = asyncio.get_running_loop(), self.system.rng
        action, account = request.url.path.split("/")[1:3]
        n, who = json.loads(await request.aread())["n"], int(account)
        if self.mode("refuses connections", who):
            raise httpx.ConnectError("simulated", request=request)
        await asyncio.sleep(dice.uniform(0.005, ROAD))
        key = request.headers.get("idempotency-key") or f"none-{loop.time()}"
        line = {"t": self.t(), "account": account, "key": key, "n": n, "status": 200, "new": False, "action": action}
        self.arrivals.append(line)
        if self.mode("hangs", who):
            line["status"] = 0
            await asyncio.sleep(1e6)
        if (throttle := self.mode("throttled", who)) is not None:
            line |= {"status": 429, "wait": throttle.lasts}
            return httpx.Response(429, headers={"retry-after": f"{throttle.lasts:.0f}"}, stream=Body(b""))
        if self.mode("down", who) or self.mode("everybody down"):
            line["status"] = 503
            return httpx.Response(503, stream=Body(b""))
        line["new"] = key not in self.stored
        self.stored.setdefault(key, n)
        if self.mode("no answer", who):
            line["status"] = 0
            raise httpx.ReadError("simulated", request=request)
        await asyncio.sleep(dice.uniform(0.2, 0.8) if action == "charge" else dice.uniform(0.005, 0.06))
        line["answered"] = self.t()
        return httpx.Response(200, stream=Body(json.dumps({"n": n}).encode()))

    async def _answer_account(self, request):
        accounts, body = self.accounts, await request.aread()
        await asyncio.sleep(self.system.rng.uniform(0.01, 0.1))
        if request.url.path != "/token":
            status = 200 if accounts.is_good(request.headers.get("authorization", "")) else 401
            return httpx.Response(status, stream=Body(b"{}"))
        accounts.open += 1
        accounts.most_open = max(accounts.most_open, accounts.open)
        status, answer = accounts.answer(body)
        await asyncio.sleep(self.system.rng.uniform(0.05, 0.5))
        accounts.open -= 1
        return httpx.Response(status, headers={"content-type": "application/json"}, stream=Body(answer))

    async def publish(self, message):
        event = json.loads(message.body)
        await asyncio.sleep(self.system.rng.uniform(0.001, 0.03))
        if self.mode("destination refuses"):
            raise refused("simulated", "refused")
        self.arrived_events.append((event["data"]["key"], event["data"]["n"]))
        if self.mode("destination answers nothing"):
            raise lost("simulated", "cut")

    # -- the program -----------------------------------------------------------------------------------------

    def note(self, job, event):
        """A handler starts or ends."""
        line = {"job": job.id.hex, "event": event, "execution": job.execution, "n": job.payload["n"], "t": self.t()}
        self.log.append(line)

    def app(self):
        breaker = BreakerPolicy(first_open=0.5, longest_open=2, probe_lease=1, ramp=1)
        provider = Provider(
            name="p", base_url="http://p.example", idempotency=Idempotency(header="Idempotency-Key", paths=("/push/*",))
        )
        return Resilient(
            Database(f"sqlite:///{self.path}", clock=self.system.now),
            handlers=HANDLERS,
            deps=self,
            providers=[provider, ACCOUNTS],
            secrets=[SECRET],
            limits={"p": [Limit(ALL, per=PER)], "p/*": [Limit(MOST, per=PER)]},
            concurrency={"p/0": CAP},
            breakers={"p": breaker, "p/*": breaker},
            destinations={"sink": self.publish},
            routes={Changed: ["sink"]},
            upgrade=False,
        )

    # -- processes -------------------------------------------------------------------------------------------

    async def work(self):
        app = self.app()
        app.ground.tables.are_ready = True
        worker = app.worker(concurrency=6, lease=LEASE, grace=2)
        worker.wire.pool._async = Remote(self)
        tokens = app.grants.client_of("p")  # one for all providers: none has settings of its own
        tokens._loop = asyncio.get_running_loop()
        tokens._client = httpx.AsyncClient(transport=Remote(self))
        PROCESS.get().worker = worker
        await worker.run(signals=False)
        await app.close()

    def hire(self, number):
        self.started += 1
        process, task = self.system.process(f"worker-{number}.{self.started}", self.work)
        self.workers[number] = process, task

    async def produce(self):
        app = self.app()
        app.ground.tables.are_ready = True
        loop, first = asyncio.get_running_loop(), self.accounts.made()
        until = self.system.now() + timedelta(seconds=LIFETIME)
        await app.connections.import_(
            "q/0", access_token=first["access_token"], refresh_token=first["refresh_token"], expires_at=until
        )
        for batch in self.plan.batches:
            await asyncio.sleep(max(0.0, batch.at - self.t()))
            await loop.run_in_executor(None, self._enqueue, app, batch)

    def _enqueue(self, app, batch):
        ids, flows = [], []
        with Session(app.database.sync_engine) as s:
            for n, kind, account, delay in batch.jobs:
                options = {"delay": delay} if delay else {}
                key = "q/0" if kind == "fetched" else f"p/{account}"
                if kind == "ordered":
                    options = {"ordering_key": "line"}
                done = app.enqueue_sync(kind, {"n": n}, resource_key=key, session=s, **options)
                ids.append(done)
            for n, account, fails in batch.workflows:
                with app.workflow_sync(f"flow {n}", session=s, resource_key=f"p/{account}") as wf:
                    first = wf.step("step", {"n": 1_000 + 10 * n}, name="a", undo=app.kinds["undo"])
                    second = wf.step("step", {"n": 1_001 + 10 * n}, name="b", undo=app.kinds["undo"], after=first)
                    wf.step("last", {"n": 1_002 + 10 * n, "fails": fails}, name="c", after=second)
                flows.append((wf.id, fails))
            for key, n in batch.events:
                app.outbox.publish(s, Changed(key=key, n=n), key=key)
            if batch.end == "rollback":
                s.rollback()
            else:
                s.commit()
        hexes = [done.id.hex for done in ids]
        if batch.end == "rollback":
            self.rolled_back += hexes
        else:
            self.committed += hexes
            self.events += batch.events
            self.flows_committed += flows

    async def nemesis(self):
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.at - self.t()))
            process, _ = self.workers[fault.who % WORKERS]
            self.system.note(f"{fault.what} {fault.who} {fault.lasts:.2f} {fault.point} {fault.count}")
            if fault.what == "crash":
                process.kill()
                await self._replace(fault.who % WORKERS, process)
            elif fault.what in ("crash in a transaction", "cut"):
                self.system.plan(process, fault.count, fault.point, fault.what.split()[0])
            elif fault.what == "freeze":
                self.frozen += 1
                process.frozen_until = self.system.loop.now + fault.lasts
            elif fault.what == "clock":
                self.clock_steps += 1
                self.system.step += fault.lasts
            else:
                self.modes.append(fault)

    async def _replace(self, number, process):
        await asyncio.sleep(self.system.rng.uniform(0.2, 2.0))
        if self.workers[number][0] is process:
            self.hire(number)

    async def guard(self):
        """Workers that crashed are started again."""
        while True:
            await asyncio.sleep(1.0)
            for number, (process, task) in list(self.workers.items()):
                if process.is_dead:
                    self.hire(number)
                elif task.done():
                    self.errors.append(f"a worker ended by itself: {task.exception()!r}")
                    self.hire(number)

    async def run(self):
        """Everything, until all work is over."""
        for number in range(WORKERS):
            self.hire(number)
        guard = asyncio.create_task(self.guard())
        nemesis = asyncio.create_task(self.nemesis())
        _, producer = self.system.process("producer", self.produce)
        await asyncio.sleep(LASTS + 0.5)
        await nemesis
        await producer
        look = self._open
        while await asyncio.get_running_loop().run_in_executor(None, look):
            if self.t() > END:
                self.errors.append("J1 work is left that nobody does")
                break
            await asyncio.sleep(0.5)
        guard.cancel()
        for process, task in self.workers.values():
            process.frozen_until = 0.0
            if hasattr(process, "worker"):
                process.worker.stop()
            await asyncio.wait([task], timeout=60)
            process.kill()

    def _open(self):
        with self.database.sync_engine.begin() as c:
            open_jobs = c.execute(sa.text("SELECT count(*) FROM resilient_job WHERE finished_at IS NULL")).scalar_one()
            flows = c.execute(sa.text("SELECT count(*) FROM resilient_workflow WHERE finished_at IS NULL")).scalar_one()
        return open_jobs + flows


class Body(httpx.AsyncByteStream):
    """An answer's body as it comes over a connection."""

    def __init__(self, content):
        self._content = content

    async def __aiter__(self):
        yield self._content


class Remote(httpx.AsyncBaseTransport):
    """The way to the provider."""

    def __init__(self, world):
        self._world = world

    async def handle_async_request(self, request):
        timeout = request.extensions.get("timeout", {}).get("read") or 30.0
        if (trace := request.extensions.get("trace")) is not None:  # what is drawn too long ago is drawn again
            await trace("http11.send_request_headers.started", {})
        try:
            async with asyncio.timeout(timeout):
                return await self._world.answer(request)
        except TimeoutError:
            raise httpx.ReadTimeout("simulated", request=request) from None
