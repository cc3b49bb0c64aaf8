"""Streams end to end: a paging HTTP server, both databases, the user's rows beside the cursor."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from resilient import (
    Errors,
    FailureKind,
    Incremental,
    InvalidInput,
    Job,
    NextCursor,
    Page,
    PageRequest,
    Permanent,
    Provider,
    Resilient,
    Retry,
    Rule,
    Snooze,
    Stream,
    SyncJob,
    Transient,
    handler,
)
from resilient.engine.run.execution import Pausable
from tests import nursery
from tests.helpers import LIMIT, bury
from tests.serving import Server

ITEMS = sa.Table(
    "item", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.String(50)),
    sa.Column("seen", sa.Integer),
)  # fmt: skip


class Item(BaseModel):
    id: int
    name: str


class Shop:
    """``GET /items``: pages by cursor, changes by token; tokens before ``oldest`` are refused."""

    def __init__(self):
        self.rows, self.version, self.oldest, self.asked, self.loops, self.size = {}, 0, 0, [], False, 3

    def put(self, id_, **fields):
        self.version += 1
        self.rows[id_] = {"id": id_, "name": f"n{id_}", "v": self.version, **fields}

    async def __call__(self, scope, _receive, send):
        if scope["type"] != "http":
            return
        query = dict(p.split("=") for p in scope["query_string"].decode().split("&") if p)
        self.asked.append(query)
        after, since = int(query.get("after", 0)), int(query.get("since", 0))
        if "since" in query and since < self.oldest:
            await self._answer(send, 410, {"error": "gone"})
            return
        found = sorted((r for r in self.rows.values() if r["v"] > since), key=lambda r: r["id"])
        if not since:
            found = [r for r in found if not r.get("gone")]
        page = [r for r in found if r["id"] > after][: self.size]
        body = {"items": page}
        if self.loops and page:
            body["next"] = "1"
        elif page and page[-1]["id"] != found[-1]["id"]:
            body["next"] = str(page[-1]["id"])
        else:
            body["sync"] = str(self.version)
        await self._answer(send, 200, body)

    async def _answer(self, send, status, body):
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.fixture
def shop():
    shop = Shop()
    with Server(shop) as shop.url:
        yield shop


STREAM = Stream(
    "items",
    request=lambda: PageRequest("/items"),
    paginator=NextCursor(items="items", cursor="next", query="after"),
    incremental=Incremental(
        style="token", query="since", cursor="sync", source="last_page", deletions="marked", deleted="gone"
    ),
    model=Item,
)

CHILD = Path(__file__).with_name("sync_child.py")
SEEN = []


@pytest.fixture(autouse=True)
def _seen():
    SEEN.clear()


def upsert(session, page):
    for item in page.items:
        session.execute(sa.delete(ITEMS).where(ITEMS.c.id == item.id))
        session.execute(sa.insert(ITEMS).values(id=item.id, name=item.name, seen=page.pass_id))
    for key in page.deleted:
        session.execute(sa.delete(ITEMS).where(ITEMS.c.id == int(key)))


@handler("items", retry=Retry(max_attempts=1))
async def sync_items(job: Job[dict]) -> None:
    async for page in job.pages(STREAM):
        SEEN.append(
            (
                page.full,
                page.pass_id,
                [i.id for i in page.items],
                page.deleted,
                [r.key for r in page.rejected],
            )
        )
        async with job.checkpoint(page) as session:
            await session.run_sync(upsert, page)
    async with job.sweep(STREAM) as sweep:
        if sweep is not None:
            await sweep.session.execute(sa.delete(ITEMS).where(ITEMS.c.seen < sweep.pass_id))


@handler("plain", retry=Retry(max_attempts=1))
def sync_plain(job: SyncJob[dict]) -> None:
    for page in job.pages(STREAM):
        SEEN.append(
            (
                page.full,
                page.pass_id,
                [i.id for i in page.items],
                page.deleted,
                [r.key for r in page.rejected],
            )
        )
        with job.checkpoint(page) as session:
            upsert(session, page)
    with job.sweep(STREAM) as sweep:
        if sweep is not None:
            sweep.session.execute(sa.delete(ITEMS).where(ITEMS.c.seen < sweep.pass_id))


@handler("greedy", retry=Retry(max_attempts=1))
async def greedy(job: Job[dict]) -> None:
    async for _page in job.pages(STREAM):
        pass


@handler("caller", retry=Retry(max_attempts=1))
async def caller(job: Job[dict]) -> None:
    async for page in job.pages(STREAM):
        async with job.checkpoint(page) as session:
            await session.run_sync(upsert, page)
            await job.client.get("/items")


@handler("robbed", retry=Retry(max_attempts=1))
async def robbed(job: Job[dict]) -> None:
    if job.execution > 1:
        return
    async for page in job.pages(STREAM):
        async with job.checkpoint(page) as session:
            await session.run_sync(upsert, page)
            await session.execute(sa.text("UPDATE resilient_job SET version = version + 1"))


@pytest.fixture
async def app(database_url, shop):
    provider = Provider(name="p", base_url=shop.url, errors=Errors(rules=(Rule(FailureKind.RESET_CURSOR, status=410),)))
    app = Resilient(
        database_url,
        handlers=[sync_items, sync_plain, greedy, caller, robbed],
        providers=[provider],
        upgrade=False,
    )
    app.database.transaction_sync(lambda c, _d: ITEMS.create(c))
    yield app
    await app.close()


async def run(app, kind="items"):
    done = await app.enqueue(kind, {}, resource_key="p/1")
    await app.worker(concurrency=2).drain(timeout=LIMIT)
    return await app.jobs.get(done.id)


def rows(app):
    return app.database.transaction_sync(
        lambda c, _d: dict(c.execute(sa.select(ITEMS.c.id, ITEMS.c.name).order_by(ITEMS.c.id)).all())
    )


@pytest.mark.parametrize("kind", ["items", "plain"])
async def test_full_then_changes_then_reset(app, shop, kind):
    for n in range(1, 8):
        shop.put(n)
    assert (await run(app, kind)).state == "succeeded"
    assert [(full, ids) for full, _, ids, _, _ in SEEN] == [(True, [1, 2, 3]), (True, [4, 5, 6]), (True, [7])]
    assert list(rows(app)) == [1, 2, 3, 4, 5, 6, 7]
    SEEN.clear()
    shop.put(2, name="new")
    shop.put(5, gone=True)
    shop.put(8)
    assert (await run(app, kind)).state == "succeeded"
    assert [(full, ids, gone) for full, _, ids, gone, _ in SEEN] == [(False, [2, 8], ["5"])]
    assert rows(app)[2] == "new"
    SEEN.clear()
    del shop.rows[1]  # and nobody tells
    shop.put(9)
    shop.oldest = shop.version + 100
    assert (await run(app, kind)).state == "succeeded"
    assert all(full for full, *_ in SEEN)
    assert list(rows(app)) == [2, 3, 4, 6, 7, 8, 9]  # swept after the full pass
    (info,) = await app.streams.list()
    assert (info.doing, info.cursor.full_pass, info.cursor.may_sweep) == (
        "up to date",
        info.cursor.pass_id,
        False,
    )


async def test_a_bad_record_is_put_aside_and_a_nameless_one_stops_the_sweep(app, shop):
    shop.put(1)
    shop.put(2, name=None)
    assert (await run(app)).state == "succeeded"
    assert SEEN == [(True, 1, [1], [], ["2"])]
    (info,) = await app.streams.list("items", "p/*")
    assert info.cursor.rejected == 1


@pytest.fixture
async def plain_app(database_url, shop):
    """Its provider's facts say nothing of cursors."""
    app = Resilient(
        database_url, handlers=[sync_items], providers=[Provider(name="p", base_url=shop.url)], upgrade=False
    )
    app.database.transaction_sync(lambda c, _d: ITEMS.create(c))
    yield app
    await app.close()


async def test_a_cursor_that_is_gone_begins_anew_whatever_the_providers_facts_say(plain_app, shop):
    shop.put(1)
    assert (await run(plain_app)).state == "succeeded"
    shop.oldest = shop.version + 1
    shop.put(2)
    assert (await run(plain_app)).state == "succeeded"
    assert [seen[0] for seen in SEEN] == [True, True]
    assert len(rows(plain_app)) == 2


async def test_an_address_that_is_gone_is_no_refused_cursor(plain_app, shop, monkeypatch):
    async def gone(self, send, _status, body):
        await answer(self, send, 410, body)

    answer = Shop._answer
    monkeypatch.setattr(Shop, "_answer", gone)
    job = await run(plain_app)
    assert (job.state, job.last_error_kind, len(shop.asked)) == ("dead", "permanent", 1)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"items": [' + b"1" * 5_000 + b"]}"], ids=["deep", "large"])
async def test_an_answer_that_python_does_not_read_is_no_page(app, monkeypatch, body):
    async def unreadable(_self, send, _status, _body):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    monkeypatch.setattr(Shop, "_answer", unreadable)
    job = await run(app)
    assert (job.state, job.last_error_kind) == ("dead", "transient")
    assert job.last_error.startswith("an answer is no page: ")


async def test_pages_that_go_round_are_noticed(app, shop):
    for n in range(1, 8):
        shop.put(n)
    shop.loops = True
    job = await run(app)
    assert (job.state, job.last_error_kind) == ("dead", "permanent")
    assert "go round" in job.last_error or "same records" in job.last_error
    shop.loops = False
    assert (await run(app)).state == "succeeded"
    assert len(rows(app)) == 7


@pytest.mark.parametrize(("kind", "said"), [("greedy", "was not saved"), ("caller", "TransactionOpen")])
async def test_misuse_is_refused_and_nothing_is_written(app, shop, kind, said):
    shop.put(1)
    job = await run(app, kind)
    assert said in job.last_error
    assert rows(app) == {}


async def test_a_lost_lease_rolls_the_rows_back(app, shop):
    shop.put(1)
    await run(app, "robbed")
    assert rows(app) == {}
    assert await app.streams.list() == []


async def test_a_reset_by_hand_reads_everything_again(app, shop):
    shop.put(1)
    await run(app)
    assert await app.streams.reset(STREAM, "p/*") == 1
    SEEN.clear()
    await run(app)
    assert SEEN == [(True, 2, [1], [], [])]


async def test_killed_five_times_a_sync_of_2000_records_ends_complete(app, shop, database_url):
    shop.size = 50
    for n in range(1, 2001):
        shop.put(n)
    app.database.transaction_sync(lambda c, _d: c.execute(sa.text("CREATE TABLE copy (item integer)")))
    done = await app.enqueue("items", {}, resource_key="p/1")
    deaths = [
        ("3", "inside"),
        ("4", "after"),
        ("1", "inside"),
        ("9", "inside"),
        ("7", "after"),
        ("0", "never"),
    ]
    for at, where in deaths:
        child = nursery.start(CHILD, database_url, shop.url, at, where)
        assert await asyncio.to_thread(child.wait, LIMIT) == (0 if where == "never" else -signal.SIGKILL)
        await bury(app)
    found = app.database.transaction_sync(lambda c, _d: list(c.execute(sa.text("SELECT item FROM copy")).scalars()))
    assert sorted(found) == list(range(1, 2001))
    assert (await app.jobs.get(done.id)).state == "succeeded"


# -- a job that comes back after its pass ended ------------------------------------------------------------------------

EVERYTHING = Stream("everything", request=lambda: PageRequest("/items"), paginator=STREAM.paginator)


async def test_killed_after_its_last_page_a_sync_reads_nothing_again(app, shop, database_url):
    for n in range(1, 8):
        shop.put(n)
    app.database.transaction_sync(lambda c, _d: c.execute(sa.text("CREATE TABLE copy (item integer)")))
    done = await app.enqueue("items", {}, resource_key="p/1")
    for at, code in (("3", -signal.SIGKILL), ("0", 0)):
        child = nursery.start(CHILD, database_url, shop.url, at, "after", "full")
        assert await asyncio.to_thread(child.wait, LIMIT) == code
        await bury(app)
    copied = app.database.transaction_sync(lambda c, _d: list(c.execute(sa.text("SELECT item FROM copy")).scalars()))
    assert sorted(copied) == list(range(1, 8))
    assert (await app.jobs.get(done.id)).state == "succeeded"


async def read_all(job, stream):
    async for page in job.pages(stream):
        SEEN.append((job.execution, page.stream, page.full))
        async with job.checkpoint(page):
            pass


def returning(end, delay=0):
    """A job that reads two streams to their ends, and whose first execution ends with ``end``."""

    @handler("returning", retry=Retry(max_attempts=2, delay=delay))
    async def read(job: Job[dict]) -> None:
        for stream in (EVERYTHING, STREAM):
            await read_all(job, stream)
        if job.execution == 1:
            await end(job)

    return read


async def fail(_job):
    raise Transient("the mail after it did not go out")


async def snooze(_job):
    raise Snooze(0)


async def once_more(job):
    await job.app.enqueue(**ONE, while_running="once_more")


async def once_more_and_fail(job):
    await once_more(job)
    await fail(job)


async def die(_job):
    raise Permanent("the mail after it is refused")


ONE = {"kind": "returning", "payload": {}, "resource_key": "p/1", "unique_key": "one", "unique_until": "finish"}
FIRST = [(1, "everything", True), (1, "items", True)]


@pytest.mark.parametrize(
    ("end", "then"),
    [
        (fail, []),
        (snooze, [(2, "everything", True), (2, "items", False)]),
        (once_more, [(2, "everything", True), (2, "items", False)]),
        (once_more_and_fail, [(3, "everything", True), (3, "items", False)]),
        (die, [(2, "everything", True), (2, "items", False)]),
    ],
)
async def test_what_follows_a_pass_goes_on_or_begins_anew(slow_app, shop, end, then):
    shop.size = 20
    app = slow_app(returning(end))
    job = await app.enqueue(**ONE)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    if end is die:
        assert (await app.jobs.get(job.id)).state == "dead"
        await app.jobs.retry(job.id)
        await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert (await app.jobs.get(job.id)).state == "succeeded"
    assert FIRST + then == SEEN


async def test_retried_and_cut_off_between_two_streams_it_reads_the_second_one_anew(slow_app, shop):
    @handler("returning", retry=Retry(max_attempts=2, delay=0))
    async def read(job: Job[dict]) -> None:
        for stream in (EVERYTHING, STREAM):
            await read_all(job, stream)
            if job.execution == 2:
                raise Transient("its worker died")

    shop.size = 20
    app = slow_app(read)
    job = await app.enqueue(**ONE)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    await app.jobs.retry(job.id)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [*FIRST, (2, "everything", True), (3, "items", False)] == SEEN


async def test_without_the_history_of_once_more_its_retry_reads_its_pass(slow_app, shop):
    """The oldest rows are pruned first; and versions before this one wrote none where a success runs once more."""

    @handler("returning", retry=Retry(max_attempts=2, delay=0))
    async def read(job: Job[dict]) -> None:
        if job.execution == 2:
            note = "DELETE FROM {attempt} WHERE decision = 'once_more'"
            assert await job.app.database.transaction(lambda c, d: d.run(c, note).rowcount) == 1
            raise Transient("before it has read anything")
        await read_all(job, EVERYTHING)
        if job.execution == 1:
            await once_more(job)

    shop.size = 20
    app = slow_app(read)
    await app.enqueue(**ONE)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [FIRST[0], (3, "everything", True)] == SEEN


async def test_a_sweep_is_no_pass(slow_app, shop):
    """A job that sweeps after another job's pass, and comes back before it has read anything, reads its own."""

    @handler("first")
    async def first(job: Job[dict]) -> None:
        await read_all(job, EVERYTHING)

    @handler("returning", retry=Retry(max_attempts=2, delay=0))
    async def sweeps(job: Job[dict]) -> None:
        async with job.sweep(EVERYTHING) as sweep:
            SEEN.append((job.execution, sweep is not None))
        if job.execution == 1:
            raise Transient("the first request failed")
        await read_all(job, EVERYTHING)

    shop.size = 20
    app = slow_app(first, sweeps)
    for one in ("first", "returning"):
        await app.enqueue(one, {}, resource_key="p/1")
        await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [FIRST[0], (1, True), (2, False), (2, "everything", True)] == SEEN


async def test_cut_off_after_its_sweep_it_reads_nothing_again(slow_app, shop):
    @handler("returning", retry=Retry(max_attempts=2, delay=0))
    async def sweeps(job: Job[dict]) -> None:
        await read_all(job, EVERYTHING)
        async with job.sweep(EVERYTHING) as sweep:
            SEEN.append((job.execution, sweep is not None))
        if job.execution == 1:
            raise Transient("the mail after it did not go out")

    shop.size = 20
    app = slow_app(sweeps)
    await app.enqueue("returning", {}, resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [FIRST[0], (1, True), (2, False)] == SEEN


async def test_a_job_that_was_replaced_begins_anew(slow_app, shop):
    shop.size = 20
    app = slow_app(returning(fail, delay=3600))
    await app.enqueue(**ONE)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert not (await app.enqueue(**ONE, on_conflict="replace")).created
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [*FIRST, (2, "everything", True), (2, "items", False)] == SEEN


async def test_a_second_pass_of_one_execution_is_read(slow_app, shop):
    @handler("returning")
    async def twice(job: Job[dict]) -> None:
        for _ in range(2):
            await read_all(job, EVERYTHING)

    shop.size = 20
    app = slow_app(twice)
    await app.enqueue("returning", {}, resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [FIRST[0], FIRST[0]] == SEEN


async def test_a_page_has_one_checkpoint_and_comes_of_the_stream(slow_app):
    refusals = []

    @handler("saving", retry=Retry(max_attempts=1))
    async def saving(job: Job[dict]) -> None:
        async for page in job.pages(STREAM):
            own = Page(page.full, page.pass_id, page.items, page.deleted, page.rejected, page.last, page.stream)
            for each in (own, page, page):
                try:
                    async with job.checkpoint(each):
                        pass
                except InvalidInput as error:
                    refusals.append(str(error))
            return

    app = slow_app(saving)
    await app.enqueue("saving", {}, resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert refusals == [
        "a checkpoint saves a page that job.pages(...) gave: this one was made by the program",
        "this page of stream 'items' was saved before: a page has one checkpoint",
    ]


# -- the handler's time ------------------------------------------------------------------------------------------------


def paged(timeout, pause):
    """A pass that rests after each page, under a timeout; SEEN has (execution, ids)."""

    @handler("slow", timeout=timeout, retry=Retry(max_attempts=1))
    async def slow(job: Job[dict]) -> None:
        async for page in job.pages(STREAM):
            SEEN.append((job.execution, [item.id for item in page.items]))
            async with job.checkpoint(page) as session:
                await session.run_sync(upsert, page)
            await asyncio.sleep(pause(job))

    return slow


@pytest.fixture
async def slow_app(app, shop):
    made = []
    for n in range(1, 11):
        shop.put(n)

    def make(*handlers):
        made.append(Resilient(app.database, handlers=handlers, providers=list(app.providers.values()), upgrade=False))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_a_checkpoint_starts_the_handlers_time_anew(slow_app):
    """Four pages, each in less than the timeout, together in more."""
    app = slow_app(paged(2.0, lambda _: 0.7))
    done = await app.enqueue("slow", {}, resource_key="p/1")
    await app.worker().drain(timeout=LIMIT)
    assert SEEN == [(1, [1, 2, 3]), (1, [4, 5, 6]), (1, [7, 8, 9]), (1, [10])]
    assert (await app.jobs.get(done.id)).state == "succeeded"


@pytest.mark.parametrize("kind", ["items", "plain"])
async def test_a_handlers_time_changes_on_the_loop_alone(app, shop, monkeypatch, kind):
    shop.put(1)
    changes = []

    def note(one, name, value):
        object.__setattr__(one, name, value)
        if name == "started" or (name in vars(Pausable) and name.startswith("wait")):
            changes.append((name, threading.current_thread()))

    monkeypatch.setattr(Pausable, "__setattr__", note, raising=False)
    assert (await run(app, kind)).state == "succeeded"
    names = [name for name, _ in changes]
    assert names.count("started") > 1
    assert {"waits", "waits_since", "waited_before"} <= set(names)
    assert {thread for _, thread in changes} == {threading.current_thread()}


async def test_a_used_up_slice_is_charged_nothing_and_goes_to_the_back_of_the_line(slow_app):
    @handler("other")
    async def other(job: Job[None]) -> None:
        SEEN.append("other")

    app = slow_app(paged(0.6, lambda job: 30 if job.execution == 1 else 0), other)
    done = await app.enqueue("slow", {}, resource_key="p/1")
    await app.enqueue("other", resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert SEEN == [(1, [1, 2, 3]), "other", (2, [4, 5, 6]), (2, [7, 8, 9]), (2, [10])]
    job = await app.jobs.get(done.id)
    assert (job.state, job.attempts, job.deferrals) == ("succeeded", 0, 1)
    assert [(one.decision, one.charged, one.kind) for one in await app.jobs.attempts(done.id)] == [
        ("slice", False, "timeout")
    ]
