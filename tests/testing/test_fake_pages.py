"""Lists of the scriptable provider: read by the engine's own streams, over passes, changes, deletions and loops."""

import httpx
import pytest

from resilient import (
    AnswerFacts,
    Incremental,
    InvalidInput,
    Job,
    NextCursor,
    OnePage,
    PageRequest,
    Provider,
    Resilient,
    Retry,
    Stream,
    handler,
    providers_by_name,
)
from resilient.core.base.budgets import Fields
from resilient.core.sync.paging import PageRead
from resilient.core.sync.stream import Cursor, Rules, take
from resilient.testing import FakeClock, FakeProvider
from resilient.testing.fake.pages import Records

ROWS = [{"id": str(n), "updated_at": f"2030-01-0{n}T00:00:00Z"} for n in range(1, 6)]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
async def sync(clock, sqlite_url):
    """``await sync(fake, stream)`` runs one pass; what it saw: (full, ids, deleted) of each page."""
    apps = []

    async def sync(fake, stream):
        passes = []

        @handler("sync", retry=Retry(max_attempts=1))
        async def run(job: Job[None]) -> None:
            async for page in job.pages(stream):
                passes.append((page.full, [one["id"] for one in page.items], page.deleted))
                async with job.checkpoint(page):
                    pass

        app = Resilient(
            sqlite_url, handlers=[run], providers=[fake.provider], clock=clock.now, upgrade=False, secrets=[]
        )
        apps.append(app)
        done = await app.enqueue(run, resource_key=f"{fake.provider.name}/one")
        await app.worker().drain()
        return (await app.jobs.get(done.id)), passes

    yield sync
    for app in apps:
        await app.close()


def listing(fake, path, *, pages="list", changes=None):
    """The stream of a list, read as the provider's facts say."""
    facts, name = fake.provider, path.rpartition("/")[2]
    incremental = {} if changes is None else {"incremental": facts.incremental[changes]}
    return Stream(name, request=lambda: PageRequest(path), paginator=facts.pagination[pages], **incremental)


async def test_changes_deletions_and_a_refused_cursor(clock, sync):
    with FakeProvider("google", clock=clock.now, anonymous=True) as fake:
        listed = fake.records("/calendar/v3/events", ROWS, pages="calendar", incremental="calendar", size=2)
        stream = listing(fake, "/calendar/v3/events", pages="calendar", changes="calendar")
        assert (await sync(fake, stream))[1] == [(True, ["1", "2"], []), (True, ["3", "4"], []), (True, ["5"], [])]
        listed.put({"id": "2", "changed": True}, {"id": "6"})
        listed.delete("1")
        assert (await sync(fake, stream))[1] == [(False, ["2", "6"], []), (False, [], ["1"])]
        assert (await sync(fake, stream))[1] == [(False, [], [])]
        listed.refuse_cursors()
        job, passes = await sync(fake, stream)
        assert job.state.value == "succeeded"
        assert [one[0] for one in passes] == [True, True, True]
        assert sorted(id_ for one in passes for id_ in one[1]) == ["2", "3", "4", "5", "6"]


async def test_pages_that_go_round_are_noticed(clock, sync):
    with FakeProvider("hubspot", clock=clock.now, anonymous=True) as fake:
        fake.records("/contacts", ROWS, size=2).loops = True
        stream = listing(fake, "/contacts")
        job, passes = await sync(fake, stream)
    assert job.finished_at is None or job.state.value == "dead"
    assert 0 < len(passes) < 20
    assert "page" in job.last_error or "records" in job.last_error


async def test_changes_since_a_time(clock, sync):
    with FakeProvider("gitlab", clock=clock.now, anonymous=True) as fake:
        listed = fake.records("/issues", ROWS, incremental="updated")
        stream = listing(fake, "/issues", changes="updated")
        assert [one[1] for one in (await sync(fake, stream))[1]] == [["1", "2", "3", "4", "5"]]
        listed.put({"id": "6", "updated_at": "2030-01-09T00:00:00Z"})
        assert [one[1] for one in (await sync(fake, stream))[1]] == [["6"]]
        assert "updated_after" in fake.log[-1].query


def pages(fake, listed, request):
    """Every page by the list's own paginator."""
    client, items = httpx.Client(transport=fake.transport), []
    request = listed.paginator.first(request)
    while request is not None and len(items) < 20:
        answer = client.request(request.method, request.url, json=request.body)
        body = answer.json() if answer.content else None
        read = listed.paginator.read(request, AnswerFacts(answer.status_code, Fields.of(answer.headers), body=body))
        items.append([one["id"] for one in read.items])
        request = read.next
    return items


@pytest.mark.parametrize(
    ("name", "way", "ask", "expected"),
    [
        ("github", "rest", "?per_page=2", [["1", "2"], ["3", "4"], ["5"]]),
        ("stripe", "list", "?limit=2", [["1", "2"], ["3", "4"], ["5"]]),
        ("stripe", "search", "?limit=3", [["1", "2", "3"], ["4", "5"]]),
        ("gitlab", "numbered", "?per_page=2", [["1", "2"], ["3", "4"], ["5"]]),
        ("jira", "list", "?maxResults=2", [["1", "2"], ["3", "4"], ["5"]]),
        ("box", "offset", "?limit=4", [["1", "2", "3", "4"], ["5"]]),
        ("salesforce", "query", "", [["1", "2", "3", "4", "5"]]),
        ("dropbox", "list_folder", "", [["1", "2", "3", "4", "5"]]),
        ("xero", "list", "?pageSize=2", [["1", "2"], ["3", "4"], ["5"]]),
    ],
)
def test_each_way_to_page(name, way, ask, expected):
    fake = FakeProvider(name, port=False, anonymous=True)
    listed = fake.records("/things", ROWS, pages=way)
    method = "POST" if getattr(listed.paginator, "body", "") else "GET"
    body = {} if method == "POST" else None
    assert pages(fake, listed, PageRequest(f"{fake.url}{listed.path}{ask}", method, body)) == expected


def test_a_conditional_request():
    facts = Provider(
        name="a", base_url="https://a.example", pagination={"all": OnePage()},
        incremental={"etag": Incremental(style="conditional", header="If-None-Match")},
    )  # fmt: skip
    fake = FakeProvider(facts, port=False, anonymous=True)
    listed = fake.records("/x", ROWS, incremental="etag")
    client = httpx.Client(transport=fake.transport, base_url=fake.url)
    tag = client.get("/x").headers["etag"]
    assert client.get("/x", headers={"If-None-Match": tag}).status_code == 304
    listed.delete("1")
    assert len(client.get("/x", headers={"If-None-Match": tag}).json()) == 4


@pytest.mark.parametrize("cursor", ["nonsense", "g7--0"])
def test_a_cursor_that_was_never_given_out_is_refused(cursor):
    fake = FakeProvider("dropbox", port=False, anonymous=True)
    fake.records("/files", ROWS)
    answer = httpx.Client(transport=fake.transport).post(
        f"{fake.provider.base_url}/files/continue", json={"cursor": cursor}
    )
    assert answer.status_code == 409
    assert fake.log[0].kind == "reset_cursor"


# -- deletions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "gone"),
    [
        (["2029-06-01T00:00:00Z", "2029-07-01T00:00:00Z"], "2030-01-01T12:00:00Z"),
        (["2029-06-01", "2029-07-01"], "2030-01-01"),
        (["2029-06-01T00:00:00.000+00:00"] * 2, "2030-01-01T12:00:00.000+00:00"),
        (["2031-06-01T00:00:00Z", "2031-07-01T00:00:00Z"], "2031-07-01T00:00:00Z"),  # records of tomorrow
        ([1_800_000_000, 1_800_000_001], 1_893_499_200),
        ([1_800_000_000_000.0, 1_800_000_000_001.0], 1_893_499_200_000.0),
    ],
)
async def test_deletions_that_are_marked_among_changes_since_a_time(clock, sync, times, gone):
    made = Provider(
        name="box2", base_url="https://box.test",
        pagination={"list": NextCursor(items="data", cursor="next", query="after", size="limit", most=100)},
        incremental={
            "updated": Incremental(
                style="filter", query="since", field="meta.at", deletions="marked", deleted="status=deleted"
            )
        },
    )  # fmt: skip
    rows = [{"id": str(n), "meta": {"at": at}} for n, at in enumerate(times, 1)]
    with FakeProvider(made, clock=clock.now, anonymous=True) as fake:
        listed = fake.records("/rows", rows, incremental="updated", size=1)
        stream = listing(fake, "/rows", changes="updated")
        assert [one[1:] for one in (await sync(fake, stream))[1]] == [(["1"], []), (["2"], [])]
        listed.delete("1")
        assert ["1"] in [one[2] for one in (await sync(fake, stream))[1]]
        (mark,) = [one for _, one in listed.gone.values()]
        assert mark == {"id": "1", "status": "deleted", "meta": {"at": gone}}
        listed.put(rows[0])  # it is back
        assert all(one[2] == [] for one in (await sync(fake, stream))[1])


MARKED = [
    (name, way) for name, make in providers_by_name().items() for way, how in make().incremental.items()
    if how.deletions == "marked"
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), MARKED)
def test_each_providers_feed_shows_a_deletion_as_its_facts_read_it(clock, name, way):
    how = providers_by_name()[name]().incremental[way]
    listed = Records("/rows", OnePage(), how, now=clock.now)
    listed.put({"id": "1"})
    listed.delete("1")
    rules = Rules(incremental=how, deleted=how.deleted, deleted_key=how.deleted_key)
    request = PageRequest("https://a.test/rows")
    (record,), _ = take(Cursor(), request, AnswerFacts(200), PageRead(listed._changed(0), None), rules, clock.now())
    assert record.deleted == ("1",)
    assert listed._all() == []


def test_a_deletion_that_no_change_can_tell_of_is_refused(clock):
    for how in (
        Incremental(style="key", query="after", field="n", deletions="marked", deleted="gone"),
        Incremental(style="filter", query="since", field="n", deletions="marked", deleted="gone"),
    ):
        listed = Records("/rows", OnePage(), how, now=clock.now)
        listed.put({"id": "1", "n": "first"}, {"id": "2", "n": "second"})
        with pytest.raises(InvalidInput, match="/rows: changes are asked for by 'n'"):
            listed.delete("1")
        assert len(listed._all()) == 2


@pytest.mark.parametrize("deletions", ["never", "separate", "webhook"])
def test_a_feed_without_marks_shows_no_deletion(clock, deletions):
    how = Incremental(style="token", query="t", cursor="next", source="last_page", deletions=deletions)
    listed = Records("/rows", OnePage(), how, now=clock.now)
    listed.put({"id": "1"}, {"id": "2"})
    listed.delete("1")
    assert listed._changed(2) == []
    assert listed._all() == [{"id": "2"}]
