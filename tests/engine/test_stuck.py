"""Handlers that do not end: their sockets are shut, their jobs stay claimed, and nobody else stands still for them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from requests.adapters import HTTPAdapter

from resilient import Fixed, Job, Provider, Resilient, Retry, SyncBatch, SyncJob, handler
from resilient.adapters import requests as adapter
from resilient.engine.run import executor
from resilient.store.db.dialect import ID, TIME
from tests.helpers import LIMIT, brisk, until

OFTEN = Retry(max_attempts=5, delay=Fixed(0))
GO_ON = threading.Event()
INSIDE: Counter = Counter()  # handlers that run, by resource key
MOST: Counter = Counter()
STARTS: list = []
LOCK = threading.Lock()


_MORE = {
    "header": b"X-Drip: ",
    "body": b"Content-Length: 99999\r\n\r\n",
    "last body": b"Connection: close\r\n\r\n",
}


class Dripping:
    """A server that says a byte every twentieth of a second, for ever: of its header, or of its body."""

    def __init__(self, place):
        self.place = place
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = set()  # connections somebody reads from
        self.asked = 0
        self.over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one, _ = self.listener.accept()
                threading.Thread(target=self._drip, args=(one,), daemon=True).start()

    def _drip(self, one):
        self.open.add(one)
        try:
            with one:
                one.recv(65536)
                with LOCK:
                    self.asked += 1
                one.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n")
                if self.place != "header":
                    one.sendall(
                        b"Connection: close\r\n\r\n" if self.place == "last body" else b"Content-Length: 99999\r\n\r\n"
                    )
                while not self.over.wait(0.05):
                    one.sendall(b"X")
        except OSError:
            pass
        finally:
            self.open.discard(one)

    def close(self):
        self.over.set()
        self.listener.close()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    GO_ON.clear()
    for one in (INSIDE, MOST, STARTS):
        one.clear()
    monkeypatch.setattr(executor, "CANCEL_PATIENCE", 0.3)
    yield
    GO_ON.set()


@contextlib.contextmanager
def counted(key, job):
    with LOCK:
        STARTS.append(job)
        INSIDE[key] += 1
        MOST[key] = max(MOST[key], INSIDE[key])
    try:
        yield
    finally:
        with LOCK:
            INSIDE[key] -= 1


@handler("hangs", timeout=0.2, retry=OFTEN)
def hangs(job: SyncJob[None]) -> None:
    with counted(job.resource_key, job.id):
        assert GO_ON.wait(LIMIT)


@handler("hangs.batch", timeout=0.2, retry=OFTEN, batch=10)
def hangs_batch(jobs: SyncBatch[None]) -> None:
    with counted(jobs.resource_key, jobs[0].id):
        assert GO_ON.wait(LIMIT)


@handler("stubborn", timeout=0.2, retry=OFTEN)
async def stubborn(job: Job[None]) -> None:
    with counted(job.resource_key, job.id):
        while not GO_ON.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


@handler("fails.late", timeout=0.2, retry=Retry(max_attempts=1))
def fails_late(job: SyncJob[None]) -> None:
    assert GO_ON.wait(LIMIT)
    raise ValueError("after its time")


@handler("ok")
def ok(job: SyncJob[None]) -> None:
    with counted(job.resource_key, job.id):
        pass


@handler("reads", timeout=60, retry=Retry(max_attempts=1))
def reads(job: SyncJob[str]) -> None:
    client, _, where = job.payload.partition(" in ")
    if where == "a thread":
        with ThreadPoolExecutor(1) as threads:
            threads.submit(read, job, client).result()
    else:
        read(job, client)


def read(job, client):
    if client == "client":
        job.client.get("/slow")
    elif client == "client stream":
        with job.client.stream("GET", "/slow") as answer:
            for _ in answer.iter_raw():
                pass
    elif client == "requests":
        adapter.session(job).get(f"{job.deps}/slow")
    elif client == "requests by a proxy":
        adapter.session(job).get("http://127.0.0.1:1/slow", proxies={"http": job.deps})
    elif client == "requests mounted":
        with adapter.session(job) as session:
            session.mount("http://", HTTPAdapter())
            session.get(f"{job.deps}/slow")
    else:
        with adapter.session(job).get(f"{job.deps}/slow", stream=True) as answer:
            for _ in answer.iter_content(1):
                pass


@handler("writes", timeout=60, retry=OFTEN)
def writes(job: SyncJob[str]) -> None:
    if job.payload == "client":
        job.client.post("/slow", json={})
    else:
        adapter.session(job).post(f"{job.deps}/slow", json={})


HANDLERS = [fails_late, hangs, hangs_batch, stubborn, ok, reads, writes]


@pytest.fixture
async def make(database_url):
    apps = []

    def make(url="http://127.0.0.1:1", **options):
        provider = Provider(name="slow", base_url=url, hosts=("127.0.0.1",))
        app = Resilient(database_url, handlers=HANDLERS, providers=[provider], deps=url, upgrade=False, **options)
        apps.append(app)
        return app

    yield make
    for app in apps:
        await app.close()


@contextlib.asynccontextmanager
async def working(app, **options):
    # A lease that no stall of a loaded machine outlives: a rescue is a repeat.
    worker = brisk(app.worker(**{"concurrency": 4, "lease": 300.0, "grace": 0.1, **options}))
    task = asyncio.create_task(worker.run(signals=False))
    try:
        yield worker
    finally:
        worker.stop()
        GO_ON.set()
        await asyncio.wait_for(task, LIMIT)


@pytest.fixture
def time_is_over():
    """Call it with a handler: what runs of it is past its timeout now, however long it took to come so far."""
    before = []

    def over(which):
        before.append((which, which.timeout))
        object.__setattr__(which, "timeout", 0.01)

    yield over
    for which, timeout in before:
        object.__setattr__(which, "timeout", timeout)


async def states(app, ids):
    return Counter([(await app.jobs.get(one)).state.value for one in ids])


# -- sockets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["header", "body", "last body"])
@pytest.mark.parametrize("where", ["", " in a thread"])
@pytest.mark.parametrize(
    "client",
    ["client", "client stream", "requests", "requests stream", "requests by a proxy", "requests mounted"],
)
async def test_a_server_that_drips_keeps_no_thread_beyond_the_timeout(make, time_is_over, client, where, place):
    server = Dripping(place)
    try:
        app = make(f"http://127.0.0.1:{server.port}")
        ids = [(await app.enqueue(reads, client + where, resource_key="slow/1")).id for _ in range(4)]
        async with working(app) as worker:
            await until(lambda: server.asked == 4)
            time_is_over(reads)
            other = await app.enqueue(ok, resource_key="other/1")
            await until(lambda: done(app, [other.id]))
            await until(lambda: done(app, ids))
            assert not worker.executor.stuck
            await until(lambda: not server.open)
        found = [await app.jobs.get(one) for one in ids]
        assert {(job.state.value, job.last_error_kind, job.attempts) for job in found} == {("dead", "timeout", 1)}
        assert server.asked == 4  # nothing was sent again
    finally:
        server.close()


async def done(app, ids):
    return (await states(app, ids)).keys() <= {"succeeded", "dead"}


@pytest.mark.parametrize("client", ["client", "requests"])
async def test_what_may_have_taken_effect_is_in_doubt_and_not_sent_again(make, time_is_over, client):
    server = Dripping("header")
    try:
        app = make(f"http://127.0.0.1:{server.port}")
        ids = [(await app.enqueue(writes, client, resource_key="slow/1")).id]
        async with working(app):
            await until(lambda: server.asked)
            time_is_over(writes)
            await until(lambda: done(app, ids))
        job = await app.jobs.get(ids[0])
        assert (job.state.value, job.last_error_kind, server.asked) == ("dead", "ambiguous", 1)
    finally:
        server.close()


# -- what does not end -------------------------------------------------------------------------------------------------

stuck_kinds = pytest.mark.parametrize("kind", [hangs, stubborn], ids=lambda kind: kind.kind)


@stuck_kinds
async def test_nobody_stands_still_for_an_account_whose_handlers_do_not_end(make, kind):
    """Twelve jobs of one account in a worker of four slots: the others' go on, and it has at most its share of them."""
    app = make()
    bad = [(await app.enqueue(kind, resource_key="bad/1")).id for _ in range(12)]
    async with working(app) as worker:
        await until(lambda: worker.executor.stuck)
        good = [(await app.enqueue(ok, resource_key=f"good/{n % 5}")).id for n in range(30)]
        await until(lambda: done(app, good))
        assert MOST["bad/1"] <= worker.executor.most_stuck // 4 + 3  # its share, and what had begun by then
        assert (await states(app, bad))["running"] == INSIDE["bad/1"]
        assert max(Counter(STARTS).values()) == 1  # none ran a second time beside itself
        await until(lambda: len(worker.executor.stuck) == INSIDE["bad/1"])  # what began last is past its timeout, too
        waits = [one.id for one in await app.jobs.list(resource="bad/1", state="ready", payloads=False)]
        reasons = {one.code: one.text for one in (await app.jobs.why(waits[0])).reasons}
        stuck = (await states(app, bad))["running"]
        assert reasons["stuck_handlers"] == (
            f"{stuck} jobs of bad/1 should have ended and do not, on worker {worker.id}: with 4 such handlers of one"
            " key there, it runs nothing more of it until they end or it is restarted."
        )
        assert "soon" not in reasons
        assert reasons["stuck_handlers"] in (await app.resources.why("bad/1")).text
        GO_ON.set()
        await until(lambda: not worker.executor.stuck)
        after = await app.enqueue(ok, resource_key="good/1")
        await until(lambda: done(app, [after.id]))
        assert len([slot for slot in worker.executor._slots if not slot.done()]) == 4


@stuck_kinds
async def test_a_cap_counts_what_does_not_end_over_all_workers(make, kind):
    apps = [make(concurrency={"bad": 3, "bad/*": 2}) for _ in range(2)]
    for n in range(12):
        await apps[0].enqueue(kind, resource_key=f"bad/{n % 2}")
    async with working(apps[0]) as one, working(apps[1]) as two:
        await until(lambda: len(one.executor.stuck) + len(two.executor.stuck) == 3)
        before = await leases(apps[0])
        for n in range(3):  # whoever claims passes over the others
            after = await apps[n % 2].enqueue(ok, resource_key=f"good/{n}")
            await until(lambda: done(apps[0], [after.id]))  # noqa: B023 - awaited within this round
        await until(lambda: renewed(apps[0], before))
        assert sum(INSIDE[key] for key in ("bad/0", "bad/1")) == 3
        assert max(MOST.values()) <= 2
        assert [job.rescues for job in await apps[0].jobs.list(state="running")] == [0, 0, 0]


async def leases(app):
    statement = "SELECT id, lease_until FROM {job} WHERE state = 'running'"
    rows = await app.database.transaction(lambda c, d: d.run(c, statement, id=ID, lease_until=TIME).all())
    return {row.id: row.lease_until for row in rows}


async def renewed(app, before):
    """Whether the lease of each of these jobs was renewed."""
    now = await leases(app)
    return all(now[one] > until for one, until in before.items())


@pytest.mark.parametrize("kind", [hangs, stubborn, hangs_batch], ids=lambda kind: kind.kind)
async def test_it_is_told_and_why_says_so(make, kind):
    app = make()
    job = await app.enqueue(kind, resource_key="bad/1")
    async with working(app) as worker:
        await until(lambda: worker.executor.stuck)
        await until(lambda: noted(app, job.id))
        reasons = {reason.code: reason.text for reason in (await app.jobs.why(job.id)).reasons}
        assert "does not end: it is not run again until it does, or until 300 s later" in reasons["stuck"]
        assert worker.id in reasons["stuck"]
        await app.alerts.flush()
        (alert,) = await app.alerts.list()
        assert (alert.name, alert.subject, alert.detail["job"]) == ("stuck_handler", kind.kind, str(job.id))
        await app.alerts.keep_house()
        assert [one.name for one in await app.alerts.list()] == ["stuck_handler"]
        assert [one.name for one in (await overview(app)).alerts] == ["stuck_handler"]  # what `status` shows
        GO_ON.set()
        await until(lambda: ended(app, job.id))


async def overview(app):
    from resilient.store.inspect.why import overview

    return await app.database.transaction(overview)


async def noted(app, id_):
    return (await app.jobs.get(id_)).last_error_code == "stuck"


async def ended(app, id_):
    return (await app.jobs.get(id_)).last_error_code != "stuck" or (await app.jobs.get(id_)).state != "running"


async def test_a_thread_that_ends_late_ends_as_what_it_did(make):
    """Nobody ran it meanwhile, so what it returns is true."""
    app = make()
    job = await app.enqueue(hangs, resource_key="bad/1")
    async with working(app) as worker:
        await until(lambda: worker.executor.stuck)
        GO_ON.set()
        await until(lambda: done(app, [job.id]))
    found = await app.jobs.get(job.id)
    assert (found.state.value, found.executions) == ("succeeded", 1)


async def test_one_that_ends_late_is_not_told_as_one_that_was_given_up(make):
    app = make()
    job = await app.enqueue(fails_late, resource_key="bad/1")
    async with working(app) as worker:
        await until(lambda: worker.executor.stuck)
        GO_ON.set()
        await until(lambda: done(app, [job.id]))
    found = await app.jobs.get(job.id)
    assert (found.state.value, found.last_error_kind) == ("dead", "timeout")
    assert re.fullmatch(
        r"took longer than its timeout of 0.2 s, and ended \d+\.\d s after that \(attempt 1 of 1\)", found.last_error
    )


@pytest.mark.parametrize("kind", [hangs, stubborn, hangs_batch], ids=lambda kind: kind.kind)
async def test_after_the_workers_patience_the_job_goes_on_without_it(make, kind):
    app = make()
    job = await app.enqueue(kind, resource_key="bad/1", max_attempts=1)
    async with working(app, patience=0.5) as worker:
        await until(lambda: done(app, [job.id]))
        assert len(worker.executor.stuck) == 1
        assert worker.executor.slots_in_use == 0
    found = await app.jobs.get(job.id)
    assert (found.state.value, found.last_error_kind, found.attempts) == ("dead", "timeout", 1)
    assert "did not end within 0.5 s after that" in found.last_error


async def test_a_lost_lease_ends_what_it_holds_aside(make, caplog):
    app = make()
    job = await app.enqueue(hangs, resource_key="bad/1")
    async with working(app) as worker:
        await until(lambda: worker.executor.aside)
        await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET version = version + 5"))
        await until(lambda: not worker.executor.aside)
        assert len(worker.executor.stuck) == 1
    assert (await app.jobs.get(job.id)).state == "running"  # as the other one left it
    assert "did not end within" not in caplog.text  # that would be the end of its patience


async def test_beyond_the_bound_slots_are_taken_and_what_waits_goes_elsewhere(make, monkeypatch):
    monkeypatch.setattr(executor, "LEAST_STUCK", 1)
    app = make()
    for n in range(8):
        await app.enqueue(hangs, resource_key=f"bad/{n}")
    async with working(app, concurrency=2) as worker:
        assert worker.executor.most_stuck == 2
        await until(lambda: len(worker.executor.stuck) == 4)
        assert worker.executor.wants_quiet
        await until(lambda: not worker.executor.running)
        assert sum(INSIDE.values()) == 4
        assert (
            len({thread.name for thread in threading.enumerate() if thread.name.startswith("resilient-handler")}) <= 6
        )


@stuck_kinds
async def test_what_waits_behind_a_suspect_that_does_not_end_is_run_by_the_slots_there_are(make, monkeypatch, kind):
    """It ran alone, and no slot is opened in its place: those that sleep beside it are woken."""
    monkeypatch.setattr(executor, "SOLO_PATIENCE", 0.0)  # it starts before what came with it
    app = make()
    await app.enqueue(kind, resource_key="bad/1")
    good = [(await app.enqueue(ok, resource_key="good/1")).id for _ in range(3)]
    async with working(app) as worker:
        worker.executor.most_stuck = 0
        submit = worker.executor.submit

        def as_suspect(execution, since):
            if execution.row.kind == kind.kind:
                execution.row = execution.row._replace(rescues=1)
            submit(execution, since)

        monkeypatch.setattr(worker.executor, "submit", as_suspect)
        await until(lambda: worker.executor.stuck)
        assert not worker.executor.wants_quiet
        await until(lambda: done(app, good))
        assert STARTS[0] not in good


@pytest.mark.parametrize(("callback", "what"), [("_on_stuck", "the timeout"), ("_on_done", "the end")])
async def test_timeouts_go_on_after_the_engine_failed_over_one(make, monkeypatch, caplog, callback, what):
    app = make()
    for n in range(2):
        await app.enqueue(hangs, resource_key=f"bad/{n}")
    async with working(app, patience=0.1) as worker:
        real, failed = getattr(worker.executor, callback), []

        def fail_once(execution, *outcome):
            if not failed:
                failed.append(execution.id)
                raise LookupError("a mistake")
            real(execution, *outcome)

        monkeypatch.setattr(worker.executor, callback, fail_once)
        await until(lambda: len(worker.executor.stuck) == 2 and not worker.executor.aside)
    assert f"the engine failed over {what} of job {failed[0]} (hangs)" in caplog.text


async def test_a_slot_goes_on_after_the_engine_failed_over_the_end_of_a_job(make, monkeypatch, caplog):
    """The job whose end nobody writes is held by nobody: its lease runs out."""
    app = make()
    for n in range(2):
        await app.enqueue(ok, resource_key=f"good/{n}")
    async with working(app, concurrency=1) as worker:
        real, failed = worker.finisher._count, []

        def fail_once(*counted):
            if not failed:
                failed.append(counted)
                raise LookupError("a mistake")
            real(*counted)

        monkeypatch.setattr(worker.finisher, "_count", fail_once)
        await until(lambda: app.jobs.count(kind="ok", state="succeeded"))
        await until(lambda: not worker.finisher.unwritten)
    assert "the engine failed over the end of job" in caplog.text
