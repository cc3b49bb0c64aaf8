"""What a stream can say, end to end: borders, cursors read before, conditional requests, deletions, sweeps, resets."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs

import pytest
import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import (
    Errors,
    FailureKind,
    Incremental,
    Job,
    NextCursor,
    NextUrl,
    OnePage,
    PageRequest,
    Provider,
    Rejected,
    Resilient,
    Retry,
    Rule,
    SetupError,
    Stream,
    SyncJob,
    handler,
)
from resilient.core.sync.stream import Record
from resilient.store.db.database import Database
from tests.helpers import LIMIT

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Item(BaseModel):
    id: int
    name: str

    @field_validator("name", mode="before")
    @classmethod
    def shortened(cls, value):
        """Raises `TypeError` for what has no length, which pydantic does not take for a finding."""
        return value if len(value) < 5 else value[:5]


class Box:
    """Records with a time, a version and a history; answers as told. Its clock is the test's."""

    def __init__(self, clock):
        self.clock, self.rows, self.asked, self.history, self.refuse, self.size = clock, {}, [], 1, lambda *_: False, 3
        self.numbers = False  # whether a cursor is one

    def put(self, id_, **fields):
        self.history += 1
        row = {"id": id_, "name": f"n{id_}", "at": self.clock.now().isoformat(), "v": self.history}
        self.rows[id_] = row | fields

    async def __call__(self, scope, receive, send):
        await receive()
        query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
        sent = {k.decode(): v.decode() for k, v in scope["headers"]}
        self.asked.append((scope["path"], query))
        if refusal := self.refuse(scope["path"], query):
            status, headers, doc = 410 if refusal is True else refusal, {}, {"error": "gone"}
        else:
            status, headers, doc = getattr(self, scope["path"].strip("/"))(query, sent)
        lines = [(b"content-type", b"application/json"), *((k.encode(), v.encode()) for k, v in headers.items())]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": b"" if status == 304 else json.dumps(doc).encode()})

    def _page(self, found, query):
        after = int(query.get("after", 0))
        left = [
            row for row in sorted(found, key=lambda r: r["v"] if "since" in query else r["id"]) if row["id"] > after
        ]
        page = left[: self.size]
        return page, str(page[-1]["id"]) if len(left) > len(page) else None

    def filtered(self, query, _sent):
        """Changed since a time, the border included; the provider's clock is told."""
        since = datetime.fromisoformat(query.get("since", "0001-01-01T00:00:00+00:00"))
        page, after = self._page([r for r in self.rows.values() if datetime.fromisoformat(r["at"]) >= since], query)
        date = self.clock.now().strftime("%a, %d %b %Y %H:%M:%S GMT")
        return 200, {"date": date}, {"items": page, "next": after}

    def messages(self, query, _sent):
        page, after = self._page(self.rows.values(), query)
        return 200, {}, {"items": page, "next": after}

    def profile(self, _query, _sent):
        return 200, {}, {"historyId": self.history if self.numbers else str(self.history)}

    def changed(self, query, _sent):
        found = [row for row in self.rows.values() if row["v"] > int(query["start"])]
        page, after = self._page(found, query)
        return 200, {}, {"items": page, "next": after}

    def tagged(self, _query, sent):
        tag = f'"{self.history}"'
        if sent.get("if-none-match") == tag:
            return 304, {"etag": tag}, None
        return 200, {"etag": tag}, {"items": list(self.rows.values())}

    def newest(self, query, _sent):
        found = [row for row in self.rows.values() if row["id"] > int(query.get("since_id", 0))]
        return 200, {}, {"items": sorted(found, key=lambda r: r["id"])}

    def delta(self, query, _sent):
        since = int(query.get("token", 0))
        page, after = self._page([row for row in self.rows.values() if row["v"] > since], query)
        if after is not None:
            return 200, {}, {"items": page, "nextLink": f"/delta?token={since}&after={after}"}
        return 200, {}, {"items": page, "deltaLink": f"/delta?token={self.history}"}


PAGED = NextCursor(items="items", cursor="next", query="after")
FILTER = Incremental(style="filter", query="since", field="at", precision=0.0)
STREAMS = {
    "filtered": Stream(
        "filtered", request=lambda: PageRequest("/filtered"), paginator=PAGED, incremental=FILTER, model=Item
    ),
    "overlapping": Stream(
        "overlapping", request=lambda: PageRequest("/filtered"), paginator=PAGED, incremental=FILTER, overlap="10m"
    ),
    "gmail": Stream(
        "gmail",
        request=lambda: PageRequest("/messages"),
        paginator=PAGED,
        before=lambda: PageRequest("/profile"),
        changes=lambda since: PageRequest(f"/changed?start={since}"),
        incremental=Incremental(
            style="token", query="start", cursor="historyId", source="before_pass", deletions="marked", deleted="gone"
        ),
    ),
    "tagged": Stream(
        "tagged",
        request=lambda: PageRequest("/tagged"),
        paginator=OnePage(items="items"),
        incremental=Incremental(style="conditional", header="If-None-Match"),
    ),
    "newest": Stream(
        "newest",
        request=lambda: PageRequest("/newest"),
        paginator=OnePage(items="items"),
        incremental=Incremental(style="key", query="since_id", field="id"),
    ),
    "delta": Stream(
        "delta",
        request=lambda: PageRequest("/delta"),
        paginator=NextUrl(items="items", url="nextLink", resume="deltaLink"),
        incremental=Incremental(style="link", cursor="deltaLink", source="last_page"),
        full_every="1d",
    ),
    "mortal": Stream(
        "mortal",
        request=lambda: PageRequest("/delta"),
        paginator=NextUrl(items="items", url="nextLink", resume="deltaLink"),
        incremental=Incremental(style="link", cursor="deltaLink", source="last_page", life=7200.0),
    ),
    "plain": Stream("plain", request=lambda: PageRequest("/messages"), paginator=PAGED, model=Item),
}  # fmt: skip
SEEN, STOP_AT, SWEPT = [], [], []


@handler("pages")
async def pages_alone(job: Job[str]) -> None:
    async for page in job.pages(STREAMS[job.payload]):
        async with job.checkpoint(page):
            pass


@handler("sweep", retry=Retry(max_attempts=1))
async def sweep_alone(job: Job[str]) -> None:
    async with job.sweep(STREAMS[job.payload]) as sweep:
        SWEPT.append(None if sweep is None else sweep.pass_id)


@handler("read", retry=Retry(max_attempts=1))
async def read(job: Job[str]) -> None:
    stream, pages = STREAMS[job.payload], 0
    async for page in job.pages(stream):
        pages += 1
        if [pages] == STOP_AT:
            STOP_AT.clear()
            raise RuntimeError("broken off")
        ids = [i.id if isinstance(i, Item) else i["id"] for i in page.items]
        SEEN.append((page.full, ids, page.deleted, [r.key for r in page.rejected]))
        async with job.checkpoint(page) as session:
            await session.execute(sa.text("SELECT 1"))
    async with job.sweep(stream) as sweep:
        if sweep is not None:
            SWEPT.append(sweep.pass_id)


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()
    STOP_AT.clear()
    SWEPT.clear()


@pytest.fixture
def box(serve, clock):
    box = Box(clock)
    box.url = serve(box, date_header=False)  # it tells its own
    return box


@pytest.fixture
async def app(sqlite_url, box, clock):
    errors = Errors(rules=(Rule(FailureKind.RESET_CURSOR, status=410),))
    app = Resilient(
        Database(sqlite_url, clock=clock.now),
        handlers=[read, pages_alone, sweep_alone],
        providers=[Provider(name="p", base_url=box.url, errors=errors)],
        upgrade=False,
    )
    yield app
    await app.close()


async def run(app, stream, kind="read"):
    """One job; what its pages brought."""
    SEEN.clear()
    done = await app.enqueue(kind, stream, resource_key="p/1")
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    return job.state if job.state != "succeeded" else list(SEEN)


def ids(pages):
    return [id_ for _, found, *_ in pages for id_ in found]


async def test_the_border_is_read_again_and_what_is_known_left_out(app, box, clock):
    box.put(1)
    box.put(2)
    assert ids(await run(app, "filtered")) == [1, 2]
    box.put(3)  # in the very instant of the newest one
    pages = await run(app, "filtered")
    assert box.asked[-1][1]["since"] == NOON.isoformat()
    assert (pages[0][0], ids(pages)) == (False, [3])
    assert ids(await run(app, "filtered")) == []
    clock.advance(60)
    box.put(2, name="new")
    assert ids(await run(app, "filtered")) == [2]


async def test_a_record_that_changes_behind_a_long_pass_comes_next_time(app, box, clock):
    for n in range(1, 7):
        box.put(n)
    clock.advance(60)
    answer = box.filtered

    def while_it_lasts(query, sent):
        found = answer(query, sent)
        if query.get("after") == "3":
            clock.advance(60)
            box.put(1, name="changed behind it")
            clock.advance(60)
            box.put(6, name="newest of all")
            found = answer(query, sent)
        return found

    box.filtered = while_it_lasts
    assert ids(await run(app, "filtered")) == [1, 2, 3, 4, 5, 6]
    box.filtered = answer
    assert 1 in ids(await run(app, "filtered"))


async def test_an_overlap_goes_back_and_brings_only_what_was_not_seen(app, box, clock):
    box.put(1)
    clock.advance(minutes=5)
    box.put(2)
    assert ids(await run(app, "overlapping")) == [1, 2]
    box.put(3, at=NOON.isoformat())  # written down late, with an earlier time
    assert ids(await run(app, "overlapping")) == [3]
    assert box.asked[-1][1]["since"] == (NOON - timedelta(minutes=5)).isoformat()
    assert ids(await run(app, "overlapping")) == []


async def test_a_cursor_that_is_read_before_the_pass(app, box):
    for n in range(1, 6):
        box.put(n)
    answer = box.messages

    def meanwhile(query, sent):
        if not query:
            box.put(9)  # after the cursor was read, so the changes bring it (again)
        return answer(query, sent)

    box.messages = meanwhile
    assert ids(await run(app, "gmail")) == [1, 2, 3, 4, 5, 9]
    assert [path for path, _ in box.asked] == ["/profile", "/messages", "/messages"]
    box.put(2, gone=True)
    pages = await run(app, "gmail")
    assert pages == [(False, [9], ["2"], [])]
    assert ids(await run(app, "gmail")) == []


async def test_broken_off_before_its_first_page_is_saved_the_cursor_is_read_again(app, box):
    box.put(1)
    STOP_AT.append(1)
    assert await run(app, "gmail") == "dead"
    box.put(2)
    await run(app, "gmail")
    assert ids(await run(app, "gmail")) == []
    assert [path for path, _ in box.asked].count("/profile") == 3


async def test_broken_off_in_its_middle_it_keeps_the_cursor_read_before(app, box):
    for n in range(1, 6):
        box.put(n)
    STOP_AT.append(2)
    assert await run(app, "gmail") == "dead"
    box.put(1, name="changed while nobody read")
    assert ids(await run(app, "gmail")) == [4, 5]
    assert ids(await run(app, "gmail")) == [1]


async def test_an_account_without_a_history_has_a_cursor_too(app, box):
    box.history, box.numbers = 0, True
    assert ids(await run(app, "gmail")) == []
    box.put(1)
    assert ids(await run(app, "gmail")) == [1]
    assert box.asked[-1] == ("/changed", {"start": "0"})


async def test_a_record_that_says_never_breaks_no_pass(app, box):
    box.put(1, at="0001-01-01T00:00:00+00:00")
    assert ids(await run(app, "overlapping")) == [1]
    assert ids(await run(app, "overlapping")) == []
    box.put(2, at="2001-01-01T00:00:00+00:00")
    assert ids(await run(app, "overlapping")) == [2]


async def test_conditional_requests(app, box):
    box.put(1)
    assert ids(await run(app, "tagged")) == [1]
    assert await run(app, "tagged") == [(False, [], [], [])]
    box.put(2)
    ((full, found, *_),) = await run(app, "tagged")
    assert (full, found) == (True, [1, 2])
    assert SWEPT == [1, 3]


async def test_ids_after_the_last_one(app, box):
    box.put(1)
    box.put(2)
    assert ids(await run(app, "newest")) == [1, 2]
    box.put(11)
    assert ids(await run(app, "newest")) == [11]
    assert ids(await run(app, "newest")) == []


async def test_long_ids_after_the_last_one(app, box):
    """Of two that follow each other a float makes one; one of twelve digits is no time in milliseconds."""
    for number in (99_999_999_999, 100_000_000_000, 1_234_567_890_123_456_788, 1_234_567_890_123_456_789):
        box.put(number)
        assert ids(await run(app, "newest")) == [number]
    assert ids(await run(app, "newest")) == []


async def test_links_and_a_full_pass_now_and_then(app, box, clock):
    for n in range(1, 5):
        box.put(n)
    assert ids(await run(app, "delta")) == [1, 2, 3, 4]
    box.put(2)
    assert await run(app, "delta") == [(False, [2], [], [])]
    clock.advance(days=1)
    pages = await run(app, "delta")
    assert ([full for full, *_ in pages], ids(pages)) == ([True, True], [1, 2, 3, 4])
    assert SWEPT == [1, 3]


async def test_a_cursor_that_is_too_old_is_not_sent(app, box, clock):
    box.put(1)
    await run(app, "mortal")
    clock.advance(hours=2)
    assert (await run(app, "mortal"))[0][0] is True


def test_a_strict_model_takes_a_time_as_json_has_it():
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        at: datetime = Field(alias="theTime")

    stream = Stream("strict", request=lambda: PageRequest("/"), paginator=OnePage(), model=Strict)
    raw = {"theTime": "2030-01-01T12:00:00Z"}
    assert stream.read(Record(raw, "1", gone=False)) == Strict(theTime=NOON)
    assert isinstance(stream.read(Record({"at": raw["theTime"]}, "1", gone=False)), Rejected)  # is no provider's name


@pytest.mark.parametrize("at", ["first", "middle"])
async def test_a_refused_cursor_means_a_full_pass_in_the_same_execution(app, box, at):
    for n in range(1, 5):
        box.put(n)
    await run(app, "delta")
    for n in range(1, 5):
        box.put(n)
    refusals = []

    def refuse(_path, query):
        if "token" in query and (at == "first" or "after" in query) and not refusals:
            refusals.append(query)
            return True
        return False

    box.refuse = refuse
    pages = await run(app, "delta")
    assert [full for full, *_ in pages] == ([True, True] if at == "first" else [False, True, True])
    (info,) = await app.streams.list()
    assert (info.cursor.error, info.cursor.resets, info.doing) == (None, 0, "up to date")
    assert [1, info.cursor.pass_id] == SWEPT


async def test_a_provider_that_refuses_every_cursor_is_given_up(app, box):
    for n in range(1, 5):
        box.put(n)
    box.refuse = lambda _path, query: "after" in query
    assert await run(app, "delta") == "dead"
    assert 5 <= len(box.asked) <= 12
    (info,) = await app.streams.list()
    assert (info.doing, info.cursor.may_sweep) == ("to be read anew", False)
    box.refuse = lambda *_: True
    box.asked.clear()
    assert await run(app, "delta") == "dead"
    assert len(box.asked) == 1  # it refused the first request of a full pass: nothing will help


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_stored_page_that_the_provider_does_not_know_any_more_begins_a_full_pass(app, box, status):
    """Few providers say that a page's token is too old in words of their own."""
    for n in range(1, 5):
        box.put(n)
    STOP_AT.append(2)
    assert await run(app, "plain") == "dead"
    refusals = []
    box.refuse = lambda _path, query: "after" in query and not refusals and (refusals.append(query) or status)
    assert ids(await run(app, "plain")) == [1, 2, 3, 4]
    assert (len(refusals), SWEPT) == (1, [2])
    (info,) = await app.streams.list()
    assert (info.cursor.error, info.cursor.resets) == (None, 0)


async def test_a_page_that_can_never_be_read_costs_one_full_pass_and_then_a_request_each_time(app, box):
    for n in range(1, 5):
        box.put(n)
    box.refuse = lambda _path, query: "after" in query and 404
    requests = []
    for _ in range(4):
        box.asked.clear()
        assert await run(app, "plain") == "dead"
        requests.append(len(box.asked))
    assert requests == [2, 3, 1, 1]
    (info,) = await app.streams.list()
    assert info.cursor.error == "the provider answered 404 to the stored next page"
    box.refuse = lambda *_: False
    assert ids(await run(app, "plain")) == [4]


@pytest.mark.parametrize("status", [401, 403, 409, 503])
async def test_what_says_nothing_of_the_page_leaves_the_stored_page(app, box, status):
    for n in range(1, 5):
        box.put(n)
    STOP_AT.append(2)
    assert await run(app, "plain") == "dead"
    box.refuse = lambda *_: status
    await run(app, "plain")
    (info,) = await app.streams.list()
    assert (info.cursor.error, info.cursor.next.url[-7:]) == (None, "after=3")


async def test_nothing_is_swept_but_after_a_full_pass_that_ended(app, box):
    for n in range(1, 6):
        box.put(n)
    STOP_AT.append(2)
    assert await run(app, "plain") == "dead"
    assert SWEPT == []
    await run(app, "plain")
    assert SWEPT == [1]


async def test_nothing_is_swept_between_a_reset_by_hand_and_the_end_of_the_next_full_pass(app, box):
    """What its last full pass saw is not to be trusted: somebody had it read again."""
    for n in range(1, 6):
        box.put(n)
    await run(app, "plain", "pages")
    await app.streams.reset("plain", "p/*")
    await run(app, "plain", "sweep")
    assert SWEPT == [None]
    STOP_AT.append(2)
    assert await run(app, "plain") == "dead"
    await run(app, "plain", "sweep")
    assert SWEPT == [None, None]
    await run(app, "plain", "pages")
    await run(app, "plain", "sweep")
    assert SWEPT == [None, None, 2]


async def test_a_validator_that_fails_rejects_its_record(app, box):
    box.put(1, name=5)
    box.put(2)
    assert await run(app, "plain") == [(True, [2], [], ["1"])]
    rejected = STREAMS["plain"].read(Record({"id": 1, "name": 5}, "1", gone=False))
    assert rejected == Rejected({"id": 1, "name": 5}, "1", "TypeError in a validator of the model")


async def test_a_record_without_a_key_forbids_the_sweep_and_holds_up_nothing(app, box):
    box.put(1)
    box.put(2, name=None)
    assert await run(app, "plain") == [(True, [1], [], ["2"])]
    assert SWEPT == [1]
    box.messages = lambda *_: (200, {}, {"items": [{"name": "x"}, {"id": 1, "name": "a"}], "next": None})
    assert await run(app, "plain") == [(True, [1], [], [None])]
    assert SWEPT == [1]
    (info,) = await app.streams.list()
    assert (info.cursor.rejected, info.cursor.may_sweep) == (1, False)


async def test_a_reset_in_the_middle_of_a_pass_is_noticed_at_its_next_checkpoint(app, box):
    for n in range(1, 6):
        box.put(n)
    answer = box.messages

    def meanwhile(query, sent):
        if query.get("after") == "3":
            app.sync.streams.reset("plain")
            box.messages = answer
        return answer(query, sent)

    box.messages = meanwhile
    assert await run(app, "plain") == "dead"  # of one attempt
    pages = await run(app, "plain")
    assert (ids(pages), [full for full, *_ in pages]) == ([1, 2, 3, 4, 5], [True, True])
    (info,) = await app.streams.list()
    assert info.cursor.pass_id == 2


async def test_progress_tells_how_far_it_is(app, box):
    for n in range(1, 8):
        box.put(n)
    told = []
    answer = box.messages

    def look(query, sent):
        told.append(app.sync.jobs.list()[0].progress)
        return answer(query, sent)

    box.messages = look
    await run(app, "plain")
    assert told == [None, *({"stream": "plain", "pass": 1, "pages": n, "records": 3 * n} for n in (1, 2))]


class TestSessionFactory:
    @pytest.fixture
    def make(self, sqlite_url, box, clock):
        def make(factory, *handlers):
            return Resilient(
                Database(sqlite_url, clock=clock.now), handlers=handlers, session_factory=factory, upgrade=False,
                providers=[Provider(name="p", base_url=box.url)],
            )  # fmt: skip

        return make

    async def test_the_programs_own_sessions(self, make, box):
        box.put(1)
        made = []

        class Mine(Session):
            pass

        @handler("mine")
        def mine(job: SyncJob[None]) -> None:
            for page in job.pages(STREAMS["plain"]):
                with job.checkpoint(page) as session:
                    made.append(type(session))
                    assert session.info["mine"]

        app = make(lambda: Mine(app.database.sync_engine, info={"mine": True}), mine)
        await app.enqueue("mine", resource_key="p/1")
        await app.worker().drain(timeout=LIMIT)
        assert made == [Mine]
        assert [job.state for job in await app.jobs.list()] == ["succeeded"]
        await app.close()

    async def test_sessions_of_the_wrong_sort_are_refused(self, make, box):
        box.put(1)

        @handler("wrong", retry=Retry(max_attempts=1))
        async def wrong(job: Job[None]) -> None:
            async for page in job.pages(STREAMS["plain"]):
                async with job.checkpoint(page):
                    pass

        app = make(lambda: Session(app.database.sync_engine), wrong)
        done = await app.enqueue("wrong", resource_key="p/1")
        await app.worker().drain(timeout=LIMIT)
        job = await app.jobs.get(done.id)
        assert "session_factory= makes a Session, but this handler needs an AsyncSession" in job.last_error
        assert AsyncSession.__name__ in job.last_error
        assert SetupError.__name__ in job.last_error
        await app.close()
