"""What the guides promise something about, beyond plain jobs: streams, workflows, schedules, webhooks, credentials."""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from typing import ClassVar

from cut_shapes import INSERT, KEY, OfJobs, Tells, follow, named, push, row, tells
from pydantic import BaseModel

from resilient import (
    Bearer,
    Delivery,
    Inbound,
    Incremental,
    Job,
    NextCursor,
    PageRequest,
    Permanent,
    Provider,
    Rotation,
    Schedule,
    Signature,
    Snooze,
    Stream,
    SyncJob,
    Webhook,
    WebhookEvent,
    handler,
)
from resilient import Item as NewItem

A = "api/1"
IDP = "idp/acct-1"

# -- streams -----------------------------------------------------------------------------------------------------------


class Item(BaseModel):
    id: int


def _stream(name, **facts):
    pages = NextCursor(items="items", cursor="next", query="after")
    return Stream(name, request=lambda: PageRequest(f"/feed/{name}"), paginator=pages, model=Item, **facts)


FULL, OTHER = _stream("full"), _stream("other")
TOKENS = Incremental(style="token", query="since", cursor="sync", source="last_page")
CHANGES = _stream("changes", incremental=TOKENS)


async def read(job, stream):
    async for page in job.pages(stream):
        async with job.checkpoint(page) as session:
            for item in page.items:
                await row(session, f"{stream.name} {item.id}")


async def swept(job, stream):
    async with job.sweep(stream) as sweep:
        if sweep is not None:
            await row(sweep.session, f"{stream.name} swept")


@handler("sync")
async def sync(job: Job[str]) -> None:
    await read(job, FULL)
    await swept(job, FULL)


@handler("sync")
def sync_plain(job: SyncJob[str]) -> None:
    for page in job.pages(FULL):
        with job.checkpoint(page) as session:
            for item in page.items:
                session.execute(INSERT, {"name": f"full {item.id}"})
    with job.sweep(FULL) as sweep:
        if sweep is not None:
            sweep.session.execute(INSERT, {"name": "full swept"})


@handler("sync")
async def sync_two(job: Job[str]) -> None:
    await read(job, FULL)
    await read(job, OTHER)
    await push(job)


@handler("sync")
async def sync_changes(job: Job[str]) -> None:
    await read(job, CHANGES)
    await swept(job, CHANGES)


@handler("sync")
async def sync_and_complete(job: Job[str]) -> None:
    await read(job, FULL)
    async with job.complete() as session:
        await row(session)
        job.then(follow, "then")


@handler("sync")
async def sync_and_snooze(job: Job[str]) -> None:
    """Two passes: the second one is asked for."""
    await read(job, FULL)
    if not job.deps.state.get("second look"):
        job.deps.state["second look"] = True
        raise Snooze(10)


class Sync(OfJobs):
    feeds: ClassVar = {"full": (1, 2, 3)}

    async def before(self, app, world):
        world.feeds = {f"/feed/{name}": dict.fromkeys(ids, 1) for name, ids in self.feeds.items()}
        await super().before(app, world)

    def more(self, world, look):
        return ()


class Changes(Sync):
    """An incremental pass, after a full one that nobody disturbed."""

    feeds: ClassVar = {"changes": (1, 2, 3)}

    async def before(self, app, world):
        await super().before(app, world)
        await app.worker().drain()
        world.feeds["/feed/changes"] |= {2: 2, 4: 2, 5: 2}
        await app.enqueue("sync", "again", resource_key=A)


class SyncAndSnooze(Sync):
    async def judge(self, app, world, look):
        return [] if set(look.mine().values()) <= {1, 2} and len(look.mine()) == 3 else [f"rows: {look.mine()}"]


FULL_ROWS = {"full 1": 1, "full 2": 1, "full 3": 1}
SWEPT = {**FULL_ROWS, "full swept": 1}
CHANGED = {"changes 1": 1, "changes 2": 2, "changes 3": 1, "changes 4": 1, "changes 5": 1, "changes swept": 1}
SYNCED = {("sync", "succeeded"): 1}

STREAMS = [
    Sync("sync", sync, rows=SWEPT, states=SYNCED),
    Sync("sync in a thread", sync_plain, rows=SWEPT, states=SYNCED),
    Sync("sync of two streams", sync_two, rows={**FULL_ROWS, "other 1": 1}, feeds={"full": (1, 2, 3), "other": (1,)}),
    Changes("sync of changes", sync_changes, rows=CHANGED, states={("sync", "succeeded"): 2}),
    Sync("sync and complete", sync_and_complete, follow, rows={**FULL_ROWS, "row": 1},
         states={**SYNCED, ("follow", "succeeded"): 1}),
    SyncAndSnooze("sync and snooze", sync_and_snooze, states=SYNCED),
]  # fmt: skip

# -- workflows ---------------------------------------------------------------------------------------------------------


@handler("first")
async def first(job: Job[str]) -> str:
    async with job.complete() as session:
        await row(session, "first")
    return "of the first"


@handler("undo")
async def undo(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session, "undo")


@handler("second")
async def second(job: Job[str]) -> None:
    if job.payload == "fails":
        raise Permanent("no")
    async with job.complete() as session:
        await row(session, await job.result_of(first))


@handler("grows")
async def grows(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session, "grows")
        async with job.workflow() as wf:
            wf.step(second, "x", name="added", resource_key=A)


class Flow(OfJobs):
    payload, end, kinds = "x", "succeeded", (first, second)

    async def before(self, app, world):
        async with app.workflow("flow", resource_key=A) as wf:
            one = wf.step(self.kinds[0], "x", name="one", undo=undo)
            for kind in self.kinds[1:]:
                one = wf.step(kind, self.payload, after=one)

    async def is_over(self, app, world):
        return all(w.finished_at is not None for w in await app.workflows.list())

    async def judge(self, app, world, look):
        found = [str(w.state) for w in await app.workflows.list()]
        return (found != [self.end]) * [f"workflow: {found}"] + await super().judge(app, world, look)


FLOWS = [
    Flow("workflow", first, second, undo, rows={"first": 1, "of the first": 1}),
    Flow("workflow that is undone", first, second, undo, payload="fails", end="undone", rows={"first": 1, "undo": 1}),
    Flow("workflow that grows", first, grows, second, undo, kinds=(first, grows),
         rows={"first": 1, "grows": 1, "of the first": 1}),
]  # fmt: skip

# -- schedules, webhooks -----------------------------------------------------------------------------------------------


@handler("tick")
async def tick(job: Job[dict]) -> None:
    async with job.complete() as session:
        await row(session)


class Ticks(OfJobs):
    def options(self, world):
        return {"schedules": [Schedule(tick, {}, every="1h", resource_key=A, name="s")]}

    async def before(self, app, world):
        await app.schedules.tick()
        world.clock.advance(3600)

    async def act(self, app, world):
        await app.schedules.tick()

    again = act


@handler("hooked")
async def hooked(job: Job[WebhookEvent]) -> None:
    async with job.complete() as session:
        await row(session)


class Hooked(OfJobs):
    """The provider sends a delivery, and sends it again: also if the first was acknowledged."""

    def options(self, world):
        facts = Webhook(signatures=(Signature(header="x-sign"),), delivery="x-id", event="x-event")
        acme = Provider(name="acme", base_url=world.url, auth=(Bearer(),), webhook=facts)
        return {"providers": [acme], "webhooks": [Inbound(provider="acme", secrets=["a secret"], jobs=hooked)]}

    async def before(self, app, world):
        pass

    async def act(self, app, world):
        body = b'{"n": 1}'
        sign = hmac.new(b"a secret", body, hashlib.sha256).hexdigest()
        headers = {"X-Sign": sign, "X-Event": "made", "X-Id": "d-1", "Content-Type": "application/json"}
        answer = await app.webhooks.receive("acme", Delivery(headers, body, "https://shop.example/webhooks"))
        world.state["acknowledged"] = answer.status == 200

    async def again(self, app, world):
        if world.state.get("acknowledged") and len(await app.jobs.list()) != 1:
            world.state["lost"] = True
        await self.act(app, world)

    def more(self, world, look):
        if world.state.get("lost"):
            yield "a delivery was acknowledged, and there was no job"


# -- credentials -------------------------------------------------------------------------------------------------------


@handler("me")
async def me(job: Job[str]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


class Refreshes(OfJobs):
    """A token that has expired, at a provider that takes the token before the last; and then once more."""

    is_steady = False

    def options(self, world):
        world.idp.url, world.idp.rotation = world.url, "grace"
        return {"providers": [world.idp.provider(rotation=Rotation.GRACE)], "secrets": [KEY]}

    async def before(self, app, world):
        access, refresh = world.idp.issue()
        at = world.clock.now() - timedelta(seconds=5)
        await app.connections.import_(IDP, access_token=access, refresh_token=refresh, expires_at=at)
        await app.enqueue(me, "x", resource_key=IDP)

    async def is_over(self, app, world):
        if "second" in world.state:
            return True
        world.state["second"] = await app.enqueue(me, "y", resource_key=IDP)
        world.idp.expire()
        return False

    def more(self, world, look):
        if any(job.attempts > 1 for job in look.jobs()):
            yield "a refresh cost an attempt"
        if world.idp.issued > 4:
            yield f"{world.idp.issued - 1} tokens were issued"


# -- writes without a key ----------------------------------------------------------------------------------------------


@handler("charge")
async def charge(job: Job[str]) -> None:
    (await job.client.post("/charge", json={})).raise_for_status()
    async with job.complete() as session:
        await row(session)


async def look_up(job: Job[str]) -> bool:
    if not job.deps.requests:
        return False
    async with job.complete() as session:
        await row(session)
    return True


@handler("charge", reconcile=look_up)
async def charge_and_look(job: Job[str]) -> None:
    (await job.client.post("/charge", json={})).raise_for_status()
    async with job.complete() as session:
        await row(session)


class Charges(OfJobs):
    is_steady = False

    def options(self, world):
        return {"providers": [Provider(name="api", base_url=world.url)]}

    async def judge(self, app, world, look):
        found = [] if len(world.requests) <= 1 else [f"charged {len(world.requests)} times"]
        (job,) = look.jobs()
        rows = look.mine()["row"]
        if self.rows or not world.knife.has_struck:  # with a hook nothing is in doubt
            return found + (job.state != "succeeded" or rows != 1) * [f"{job.state}, {rows} rows"]
        fits = rows == 1 if job.state == "succeeded" else rows == 0 and "unknown outcome" in job.last_error
        return found + (not fits) * [f"{job.state}, {rows} rows, {job.last_error}"]


# -- what people and housekeeping do -----------------------------------------------------------------------------------


class Rescues(OfJobs):
    """The program that is cut rescues the job of another one, which died before."""

    async def before(self, app, world):
        await super().before(app, world)
        sets = "state = 'running', version = version + 1, executions = 1, locked_by = 'gone', lease_until = created_at"

        def lose(c, d):
            d.run(c, f"UPDATE {{job}} SET {sets}, started_at = created_at")
            d.run(c, "DELETE FROM {turn}")

        app.database.transaction_sync(lose)
        world.clock.advance(400)

    async def act(self, app, world):
        await app.worker(concurrency=4).sweeper.rescue()


@handler("work")
async def dies_at_first(job: Job[str]) -> None:
    async with job.complete() as session:
        await row(session, job.payload)
        if not job.deps.state.get("mended"):
            raise Permanent("not yet")


class Replays(OfJobs):
    """Dead jobs are retried, and again after the crash: those that are still dead."""

    replayed = True

    async def before(self, app, world):
        await super().before(app, world)
        await app.worker().drain()
        world.state["mended"] = True

    async def act(self, app, world):
        await app.jobs.retry(state="dead")

    again = act


class Many(OfJobs):
    """Many at once are there as a whole or not at all."""

    is_steady = False

    async def before(self, app, world):
        pass

    async def act(self, app, world):
        await app.enqueue_many(follow, [NewItem(f"{n}", resource_key=A) for n in range(50)])

    async def judge(self, app, world, look):
        return [] if sum(look.states().values()) in (0, 50) else [f"{look.states()}"]


class Follows(OfJobs):
    async def before(self, app, world):
        first = await app.enqueue(self.handlers[0], "1", resource_key=A)
        await app.enqueue(self.handlers[0], "2", resource_key=A, after=[first.id])

    def more(self, world, look):
        if look.names() != ["1", "2"]:
            yield f"order: {look.names()}"


class PublishesAgain(Tells):
    async def before(self, app, world):
        await super().before(app, world)
        await app.worker().drain()

    async def act(self, app, world):
        await app.outbox.replay(since=timedelta(hours=2), type="thing.told")

    def more(self, world, look):
        for there in (world.published, world.hooks):
            if len(set(there)) != 2:
                yield f"events: {there}"


OPERATIONS = [
    Rescues("rescue", named, payloads=("1", "2"), rows={"1": 1, "2": 1}, states={("work", "succeeded"): 2},
            most_requests=2),
    Replays("dead jobs retried", dies_at_first, payloads=("1", "2"), rows={"1": 1, "2": 1},
            states={("work", "succeeded"): 2}),
    Many("many at once", follow),
    Follows("dependency", named, rows={"1": 1, "2": 1}, states={("work", "succeeded"): 2}, most_requests=2),
    PublishesAgain("outbox, published again", tells, rows={"row": 1}),
]  # fmt: skip


FEATURES = [
    *STREAMS, *FLOWS, *OPERATIONS,
    Ticks("schedule", tick, rows={"row": 1}, states={("tick", "succeeded"): 1}),
    Hooked("webhook", hooked, rows={"row": 1}, states={("hooked", "succeeded"): 1}),
    Refreshes("refresh", me, states={("me", "succeeded"): 2}),
    Charges("write without a key", charge),
    Charges("write without a key, with a hook", charge_and_look, rows={"row": 1}),
]  # fmt: skip
