"""What the guides promise something about, as small as it can be: jobs, their ends, what is committed with them."""

from __future__ import annotations

from typing import ClassVar

import sqlalchemy as sa
from cut_world import Shape

from resilient import (
    Batch,
    Cancel,
    Event,
    Fixed,
    Idempotency,
    Job,
    Permanent,
    Provider,
    Retry,
    Snooze,
    StandardWebhook,
    SyncJob,
    Transient,
    handler,
)
from resilient.store.accounts.secrets import new_key

INSERT = sa.text("INSERT INTO mine (name) VALUES (:name)")
A = "api/1"
SOON = Retry(max_attempts=3, delay=Fixed(1))
SECRET = "whsec_" + "YWJj" * 8
KEY = new_key()


class Told(Event, type="thing.told"):
    name: str


async def row(session, name="row"):
    await session.execute(INSERT, {"name": name})


async def push(job):
    (await job.client.post("/push", json={})).raise_for_status()


class OfJobs(Shape):
    """Jobs of one kind, enqueued before anybody is cut."""

    first: ClassVar = {}  # options of its jobs

    def __init__(self, name, *handlers, **facts):
        self.name, self.handlers = name, handlers
        for word, value in facts.items():
            setattr(self, word, value)

    def options(self, world):
        provider = Provider(name="api", base_url=world.url, idempotency=Idempotency())
        return {"providers": [provider]} | self.settings

    settings: ClassVar = {}
    payloads = ("x",)
    most_requests = 1

    async def before(self, app, world):
        for payload in self.payloads:
            await app.enqueue(self.handlers[0], payload, **{"resource_key": A, **self.first})

    def more(self, world, look):
        if len(set(world.requests)) > self.most_requests:
            yield f"requests under more keys: {world.requests}"


# -- complete, prepare, a result ---------------------------------------------------------------------------------------


@handler("follow")
async def follow(job: Job[str]) -> None:
    job.deps.note(f"follow {job.payload}")


@handler("work")
async def complete(job: Job[str]) -> str:
    await push(job)
    async with job.complete() as session:
        await row(session)
        job.then(follow, "then")
        await job.app.enqueue(follow, "enqueued", resource_key=A, session=session)
    return "done"


@handler("work")
def complete_plain(job: SyncJob[str]) -> str:
    job.client.post("/push", json={}).raise_for_status()
    with job.complete() as session:
        session.execute(INSERT, {"name": "row"})
        job.then(follow, "then")
        job.app.enqueue_sync(follow, "enqueued", resource_key=A, session=session)
    return "done"


@handler("work", mode="atomic")
async def atomic(job: Job[str]) -> None:
    async with job.prepare() as session:
        await row(session, "prepared")
    async with job.complete() as session:
        await row(session)


@handler("work", mode="atomic")
def atomic_plain(job: SyncJob[str]) -> None:
    with job.prepare() as session:
        session.execute(INSERT, {"name": "prepared"})
    with job.complete() as session:
        session.execute(INSERT, {"name": "row"})


@handler("work")
async def prepared(job: Job[str]) -> None:
    async with job.prepare() as session:
        await session.execute(sa.text("DELETE FROM mine WHERE name = 'prepared'"))
        await row(session, "prepared")
    await push(job)
    async with job.complete() as session:
        await row(session)


@handler("work")
async def result(job: Job[str]) -> dict:
    await push(job)
    job.then(follow, "then")
    return {"of": job.payload}


@handler("work")
def result_plain(job: SyncJob[str]) -> dict:
    job.client.post("/push", json={}).raise_for_status()
    job.then(follow, "then")
    return {"of": job.payload}


@handler("work")
async def progress(job: Job[str]) -> int:
    for n in range(2):
        await job.progress({"n": n})
        (await job.client.post(f"/push/{n}", json={})).raise_for_status()
    return 2


# -- what a handler raises ---------------------------------------------------------------------------------------------


@handler("work", retry=SOON)
async def fails_first(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        job.then(follow, "then")
        if job.attempt == 1:
            raise Transient("not yet")


@handler("work")
async def snoozes_first(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        job.then(follow, "then")
        if not job.deps.state.get("second look"):
            job.deps.state["second look"] = True
            raise Snooze(10)


@handler("work")
async def cancels(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        job.then(follow, "then")
        raise Cancel("no")


@handler("work", retry=SOON)
async def dies(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        raise Permanent("never")


@handler("work")
async def cancels_another(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        await job.app.jobs.cancel(job.deps.other, session=session)


class CancelsAnother(OfJobs):
    async def before(self, app, world):
        world.other = (await app.enqueue(follow, "later", resource_key=A, delay=100_000)).id
        await super().before(app, world)


@handler("work")
async def once_more(job: Job[str]) -> None:
    if not job.deps.state.get("asked"):
        await job.app.enqueue(once_more, "x", resource_key=A, while_running="once_more", **job.deps.unique)
        job.deps.state["asked"] = True
    async with job.complete() as session:
        await row(session)


class OnceMore(OfJobs):
    first: ClassVar = {"unique_key": "u", "unique_until": "finish"}

    async def before(self, app, world):
        world.unique = self.first
        await super().before(app, world)


@handler("batch", batch=5, retry=SOON)
async def batch(jobs: Batch[str]) -> None:
    for job in jobs:
        (await job.client.post(f"/push/{job.payload}", json={})).raise_for_status()
        if job.payload == "bad":
            jobs.fail(job, Permanent("never"))
        elif job.payload == "late" and job.attempt == 1:
            jobs.fail(job, Transient("not yet"))
        elif job.payload == "early":
            jobs.succeed(job, "early")


# -- unique and ordering keys, caps, sealed payloads -------------------------------------------------------------------


@handler("work")
async def named(job: Job[str]) -> None:
    await push(job)
    async with job.complete() as session:
        await row(session, job.payload)


class InOrder(OfJobs):
    def more(self, world, look):
        if (order := list(look.names())) != ["1", "2", "3"]:
            yield f"order: {order}"


class Unique(OfJobs):
    """The program enqueues, and again after the crash: one of them at a time, each as it stands there."""

    payloads, most_requests, is_steady = (), 2, False

    async def act(self, app, world):
        await app.enqueue(named, "row", resource_key=A, **self.first)

    again = act

    async def judge(self, app, world, look):
        ends = [job.state for job in look.jobs()]
        return [] if ends and ends == ["succeeded"] * sum(look.mine().values()) else [f"{ends}, {look.mine()}"]


@handler("work", sealed=True)
async def sealed(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        job.then(sealed_follow, "secret canary")


@handler("sealed_follow", sealed=True)
async def sealed_follow(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session, job.payload)


class Sealed(OfJobs):
    def more(self, world, look):
        if "canary" in str([job.payload for job in look.jobs()]):
            yield "a payload can be read"


# -- events ------------------------------------------------------------------------------------------------------------


@handler("work")
async def tells(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session)
        for name in ("1", "2"):
            job.app.outbox.publish(session, Told(name=name), key="k")


@handler("work")
def tells_plain(job: SyncJob[str]) -> None:
    with job.complete() as session:
        session.execute(INSERT, {"name": "row"})
        for name in ("1", "2"):
            job.app.outbox.publish(session, Told(name=name), key="k")


class Tells(OfJobs):
    def options(self, world):
        hook = StandardWebhook(f"{world.url}/hook", SECRET, allow=["127.0.0.1"])
        return {"destinations": {"sink": world.publish, "hook": hook}, "routes": {Told: ["sink", "hook"]}}

    def more(self, world, look):
        for there in (world.published, world.hooks):
            ids = list(dict.fromkeys(there))  # first arrivals, in their order
            if [name for _, name in ids] != ["1", "2"] or (len(there) > 2 and not world.knife.has_struck):
                yield f"events: {there}"
            if len(there) > 3:
                yield f"more than one event came again: {there}"


@handler("work")
async def consumes(job: Job[str]) -> None:
    async with job.complete() as session:
        if await job.app.inbox.first(session, "billing", job.payload):
            await row(session)


THEN = {("work", "succeeded"): 1, ("follow", "succeeded"): 1}
THEN_TWO = {("work", "succeeded"): 1, ("follow", "succeeded"): 2}
ONE = {("work", "succeeded"): 1}
THREE = {
    "most_requests": 3,
    "payloads": ("1", "2", "3"),
    "rows": {"1": 1, "2": 1, "3": 1},
    "states": {("work", "succeeded"): 3},
}
TOLD = {**ONE, ("outbox.sink", "succeeded"): 2, ("outbox.hook", "succeeded"): 2}
ROW = {"row": 1}

JOBS = [
    OfJobs("complete", complete, follow, rows=ROW, states=THEN_TWO),
    OfJobs("complete in a thread", complete_plain, follow, rows=ROW, states=THEN_TWO),
    OfJobs("atomic", atomic, rows={"row": 1, "prepared": 1}, states=ONE),
    OfJobs("atomic in a thread", atomic_plain, rows={"row": 1, "prepared": 1}, states=ONE),
    OfJobs("prepare", prepared, rows={"row": 1, "prepared": 1}, states=ONE),
    OfJobs("result", result, follow, states=THEN),
    OfJobs("result in a thread", result_plain, follow, states=THEN),
    OfJobs("progress", progress, states=ONE, most_requests=2),
    OfJobs("retry", fails_first, follow, rows=ROW, states=THEN),
    OfJobs("snooze", snoozes_first, follow, rows=ROW, states=THEN),
    OfJobs("cancel", cancels, follow, states={("work", "cancelled"): 1}),
    OfJobs("dead", dies, states={("work", "dead"): 1}),
    CancelsAnother("cancel another", cancels_another, follow, rows=ROW, states={**ONE, ("follow", "cancelled"): 1}),
    OnceMore("once more", once_more, rows={"row": 2}, states=ONE),
    OfJobs(
        "batch", batch, payloads=("bad", "late", "early", "quiet"), most_requests=4,
        states={("batch", "dead"): 1, ("batch", "succeeded"): 3},
    ),
    InOrder("ordering key", named, first={"ordering_key": "o"}, **THREE),
    OfJobs("cap", named, settings={"concurrency": {A: 1}}, **THREE),
    Unique("unique until it starts", named, first={"unique_key": "u"}),
    Unique("unique until it ends", named, first={"unique_key": "u", "unique_until": "finish"}),
    Sealed(
        "sealed", sealed, sealed_follow, settings={"secrets": [KEY]}, rows={"row": 1, "secret canary": 1},
        states={**ONE, ("sealed_follow", "succeeded"): 1},
    ),
    Tells("outbox", tells, rows=ROW, states=TOLD),
    Tells("outbox in a thread", tells_plain, rows=ROW, states=TOLD),
    OfJobs("inbox", consumes, payloads=("m", "m"), rows=ROW, states={("work", "succeeded"): 2}),
]  # fmt: skip
