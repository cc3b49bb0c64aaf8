"""Every way of paging against a real server: complete, in order, once; also when it breaks off; and going round."""

from __future__ import annotations

import json
from urllib.parse import parse_qs

import pytest
import sqlalchemy as sa

from resilient import (
    GraphQLPages,
    Job,
    LastKey,
    LinkHeader,
    NextCursor,
    NextUrl,
    Offset,
    OnePage,
    PageNumber,
    PageRequest,
    Provider,
    Resilient,
    Retry,
    Stream,
    handler,
)
from tests.helpers import LIMIT

SIZE, COUNT = 3, 10


class Feed:
    """Ten records, three a page, in every dialect; ``round_at``: the page that leads back to the first one."""

    def __init__(self):
        self.asked, self.round_at, self.url = [], None, ""

    def page(self, start):
        items = [{"id": n + 1} for n in range(start, min(start + SIZE, COUNT))]
        after = start + SIZE
        if self.round_at is not None and after > self.round_at:
            return items, 0
        return items, after if after < COUNT else None

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
        doc = json.loads(body) if body else {}
        self.asked.append((scope["path"], query, doc))
        headers, answer = getattr(self, scope["path"].strip("/").split("/")[0])(scope["path"], query, doc)
        lines = [(b"content-type", b"application/json"), *((k.encode(), v.encode()) for k, v in headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def whole(self, *_):
        return {}, [{"id": n + 1} for n in range(COUNT)]

    def link(self, _path, query, _doc):
        items, after = self.page(int(query.get("from", 0)))
        last = f'<{self.url}/link?from=9>; rel="last"'
        return {"link": last if after is None else f'<{self.url}/link?from={after}>; rel="next", {last}'}, items

    def nexturl(self, _path, query, _doc):
        items, after = self.page(int(query.get("from", 0)))
        following = None if after is None else f"{self.url}/nexturl?from={after}"
        return {}, {"value": items, "@odata": {"nextLink": following}}

    def cursor(self, _path, query, _doc):
        items, after = self.page(int(query.get("cursor", "c0")[1:]))
        return {}, {"items": items, "meta": {"next": "" if after is None else f"c{after}"}}

    def header(self, _path, query, _doc):
        items, after = self.page(int(query.get("cursor", "c0")[1:]))
        return {} if after is None else {"x-next-cursor": f"c{after}"}, items

    def continued(self, path, _query, doc):
        assert path.endswith("/continue") == (list(doc) == ["cursor"])
        items, after = self.page(int(doc.get("cursor", "c0")[1:]))
        return {}, {"entries": items, "cursor": f"c{after}", "has_more": after is not None}

    def lastkey(self, _path, query, _doc):
        items, after = self.page(int(query.get("starting_after", 0)))
        return {}, {"data": items, "has_more": after is not None}

    def number(self, _path, query, _doc):
        items, after = self.page((int(query.get("page", 1)) - 1) * SIZE)
        return {} if after is None else {"x-next-page": str(after // SIZE + 1)}, {"items": items, "pages": 4}

    def offset(self, _path, query, doc):
        items, _ = self.page(int(query.get("offset", doc.get("paging", {}).get("at", 0))))
        return {}, {"items": items, "total": COUNT}

    def clause(self, _path, query, _doc):
        _, _, at = query["query"].partition("STARTPOSITION ")
        items, _ = self.page(int(at or 1) - 1)
        return {}, {"items": items}

    def graphql(self, _path, _query, doc):
        items, after = self.page(int(doc["variables"].get("after", "c0")[1:]))
        info = {"hasNextPage": after is not None, "endCursor": f"c{after}"}
        return {}, {"data": {"viewer": {"issues": {"edges": [{"node": i} for i in items], "pageInfo": info}}}}


GRAPHQL = {"query": "query($after: String) { viewer { issues(after: $after) { edges } } }", "variables": {}}
STYLES = {
    "whole": (PageRequest("/whole"), OnePage()),
    "link": (PageRequest("/link"), LinkHeader()),
    "nexturl": (PageRequest("/nexturl"), NextUrl(items="value", url="@odata.nextLink")),
    "cursor": (PageRequest("/cursor"), NextCursor(items="items", cursor="meta.next", query="cursor")),
    "header": (PageRequest("/header"), NextCursor(header="x-next-cursor", query="cursor")),
    "continued": (
        PageRequest("/continued", "POST", {"path": "/"}),
        NextCursor(items="entries", cursor="cursor", body="cursor", path="/continue", alone=True, more="has_more"),
    ),
    "lastkey": (PageRequest("/lastkey"), LastKey(items="data", more="has_more")),
    "number": (PageRequest("/number"), PageNumber(items="items", page=SIZE)),
    "pages": (PageRequest("/number"), PageNumber(items="items", pages="pages")),
    "numbered": (PageRequest("/number"), PageNumber(items="items", header="x-next-page")),
    "offset": (PageRequest("/offset"), Offset(items="items", total="total")),
    "in_body": (PageRequest("/offset", "POST", {"paging": {"at": 0}}), Offset(items="items", body="paging.at", page=3)),
    "clause": (
        PageRequest("/clause?query=select%20*"),
        Offset(items="items", query="query", clause="STARTPOSITION {offset}", start=1, page=SIZE),
    ),
    "graphql": (PageRequest("/graphql", "POST", GRAPHQL), GraphQLPages()),
}
BY_NUMBER = {"whole", "number", "pages", "offset", "in_body", "clause", "lastkey"}
GOES_ROUND = [name for name in STYLES if name not in BY_NUMBER]
STREAMS = {
    name: Stream(name, request=lambda r=request: r, paginator=paginator)
    for name, (request, paginator) in STYLES.items()
}


@handler("read", retry=Retry(max_attempts=3, delay=0.01))
async def read(job: Job[dict]) -> None:
    pages = 0
    async for page in job.pages(STREAMS[job.payload["stream"]]):
        pages += 1
        async with job.checkpoint(page) as session:
            for item in page.items:
                await session.execute(sa.text("INSERT INTO seen (id) VALUES (:id)"), item)
            if pages == job.payload["break_at"] and job.execution == 1:
                raise RuntimeError("broken off")


@pytest.fixture
async def feed(serve):
    feed = Feed()
    feed.url = serve(feed)
    return feed


@pytest.fixture
async def app(sqlite_url, feed):
    app = Resilient(
        sqlite_url, handlers=[read], providers=[Provider(name="p", base_url=feed.url)], upgrade=False
    )  # fmt: skip
    app.database.transaction_sync(lambda c, _d: c.execute(sa.text("CREATE TABLE seen (id integer)")))
    yield app
    await app.close()


async def run(app, stream, break_at=0):
    done = await app.enqueue("read", {"stream": stream, "break_at": break_at}, resource_key="p/1")
    for _ in range(20):
        await app.worker(concurrency=1).drain(timeout=LIMIT)
        job = await app.jobs.get(done.id)
        if job.finished_at:
            return job
        await app.jobs.edit(done.id, delay=0)
    raise AssertionError(job)


def seen(app):
    return app.database.transaction_sync(lambda c, _d: list(c.execute(sa.text("SELECT id FROM seen")).scalars()))


@pytest.mark.parametrize("stream", STYLES)
@pytest.mark.parametrize("break_at", [0, 2])
async def test_read_to_the_end_once_and_in_order(app, feed, stream, break_at):
    job = await run(app, stream, break_at)
    assert (job.state, job.last_error if job.state != "succeeded" else None) == ("succeeded", None)
    assert seen(app) == list(range(1, COUNT + 1))
    pages = 1 if stream == "whole" else 4
    broke = break_at == 2 and pages > 1
    assert job.executions == 1 + broke
    assert len(feed.asked) == pages + broke  # what was saved is not asked for again
    (info,) = await app.streams.list()
    assert (info.cursor.pages, info.cursor.records, info.cursor.may_sweep) == (pages, COUNT, True)
    assert job.progress == {"stream": stream, "pass": 1, "pages": pages, "records": COUNT}


@pytest.mark.parametrize("stream", GOES_ROUND)
async def test_pages_that_go_round_end_the_pass(app, feed, stream):
    feed.round_at = 6
    job = await run(app, stream)
    assert job.state == "dead"
    assert "go round" in job.last_error or "same records" in job.last_error
    assert len(feed.asked) <= 9
    (info,) = await app.streams.list()
    assert (info.cursor.may_sweep, info.cursor.full_pass) == (False, 0)


async def test_a_page_that_is_repeated_ends_the_pass(app, feed):
    feed.page = lambda _start: ([{"id": 1}, {"id": 2}, {"id": 3}], 3)
    for stream in ("number", "offset", "lastkey", "clause"):
        job = await run(app, stream)
        assert (job.state, "same records" in job.last_error or "go round" in job.last_error) == ("dead", True)


async def test_a_next_page_on_another_host_is_not_asked_for(app, feed):
    feed.url = "http://127.0.0.2:1"
    for stream in ("link", "nexturl"):
        job = await run(app, stream)
        assert (job.state, "which is another host" in job.last_error) == ("dead", True)
    assert len(feed.asked) == 2 * 3  # three attempts each: it might have been an error page
