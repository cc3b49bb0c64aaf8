"""Every provider once, as a program would use it: the fake speaks its dialect, a real job's client understands it."""

import time
from datetime import timedelta

import pytest

from resilient import (
    FailureKind,
    GraphQLPages,
    Job,
    Offset,
    PageRequest,
    Resilient,
    Retry,
    Stream,
    handler,
    providers_by_name,
)
from resilient.testing import FakeClock, FakeProvider, new_key

MAKERS = providers_by_name()
NAMES = sorted(MAKERS)
ROWS = [{"id": str(n), "name": f"row {n}"} for n in range(1, 6)]


def stream_of(fake):
    """Its usual list, in pages of two; search endpoints and GraphQL are asked by POST."""
    paginator = next(iter(fake.provider.pagination.values()))
    asked_in_body = isinstance(paginator, GraphQLPages) or getattr(paginator, "body", "")
    path = fake.provider.graphql if isinstance(paginator, GraphQLPages) else "/things"
    request = PageRequest(path, "POST" if asked_in_body else "GET", {"query": "{}"} if asked_in_body else None)
    if paginator.size:
        request = request.with_body(paginator.size, 2) if asked_in_body else request.with_query(**{paginator.size: 2})
    if isinstance(paginator, Offset) and paginator.clause:
        request = request.with_query(query="select *")
    return path, Stream("things", request=lambda: request, paginator=paginator)


class RunningClock(FakeClock):
    """Goes on by itself: a request that waits for its limit in place waits really, and must not arrive too early."""

    def __init__(self):
        super().__init__()
        self.began = time.monotonic()

    def now(self):
        return super().now() + timedelta(seconds=time.monotonic() - self.began)


class World:
    """One app, one fake, one account, and what the handlers saw."""

    def __init__(self, name, url):
        self.clock = RunningClock()
        self.fake = FakeProvider(name, clock=self.clock.now)
        self.key = f"{name}/acct"
        self.seen, self.passes = [], []
        self.path, self.stream = stream_of(self.fake)

        @handler("get", retry=Retry(max_attempts=2))
        async def get(job: Job[None]) -> None:
            (await job.client.get("/thing")).raise_for_status()

        @handler("sync", retry=Retry(max_attempts=3))
        async def sync(job: Job[None]) -> None:
            async for page in job.pages(self.stream):
                self.seen += [item["id"] for item in page.items]
                self.passes.append(page.pass_id)
                async with job.checkpoint(page):
                    pass

        self.get, self.sync = get, sync
        self.app = Resilient(
            url, handlers=[get, sync], providers=[self.fake.provider], clock=self.clock.now, upgrade=False,
            secrets=[new_key()],
        )  # fmt: skip

    async def connect(self):
        account = self.fake.account("acct")
        details = dict.fromkeys(self.fake.provider.placeholders, "acct")
        if self.fake.oauth is not None:
            await self.app.connections.import_(self.key, **account.tokens, details=details)
        elif self.fake.provider.auth:
            await self.app.connections.add(self.key, **account.key, details=details)
        return account

    async def run(self, kind):
        await self.app.enqueue(kind, resource_key=self.key)
        await self.app.worker().drain()
        return (await self.app.jobs.list(limit=1))[0]


@pytest.fixture
async def world(request, sqlite_url):
    made = World(request.param, sqlite_url)
    with made.fake:
        made.fake.on("GET */thing", {"ok": True})
        yield made
        await made.app.close()


@pytest.mark.parametrize("world", NAMES, indirect=True)
async def test_each_provider_through_a_jobs_client(world):
    fake = world.fake
    if fake.provider.auth:
        account = await world.connect()
        if fake.provider.oauth is not None and fake.provider.oauth.refreshes:
            fake.expire_tokens()
            assert (await world.run(world.get)).state.value == "succeeded"
            assert (account.refreshes, [one.kind for one in fake.log.api]) == (1, [FailureKind.AUTH, None])

    fake.fail_next(FailureKind.THROTTLED, wait=40)
    job = await world.run(world.get)
    assert (job.finished_at, job.attempts, fake.log[-1].kind) == (None, 0, FailureKind.THROTTLED)
    world.clock.advance(120)
    assert await world.app.worker().drain() == 1
    assert (await world.app.jobs.get(job.id)).state.value == "succeeded"
    assert fake.early == 0

    fake.records(world.path, ROWS, size=2)
    assert (await world.run(world.sync)).state.value == "succeeded", fake.log[-3:]
    assert world.seen == ["1", "2", "3", "4", "5"]
    assert (fake.over_admitted, fake.duplicates) == (0, 0)


REFUSING = [n for n in NAMES if any(r.kind is FailureKind.RESET_CURSOR for r in MAKERS[n]().errors.rules)]


@pytest.mark.parametrize("world", REFUSING, indirect=True)
async def test_a_refused_cursor_starts_over(world):
    if world.fake.provider.auth:
        await world.connect()
    world.fake.records(world.path, ROWS, size=2)
    refused = []

    def once(request):
        """The second page's cursor is refused, once."""
        listing = world.fake.log.where(path=request.path)
        return len(listing) == 2 and not refused and not refused.append(request)

    world.fake.fail_next(FailureKind.RESET_CURSOR, on=once)
    assert (await world.run(world.sync)).state.value == "succeeded"
    assert world.seen[:2] == ["1", "2"]
    assert world.seen[-5:] == ["1", "2", "3", "4", "5"]
    assert len(set(world.passes)) == 2
    assert [one.kind for one in world.fake.log.api].count(FailureKind.RESET_CURSOR) == 1


REVOKING = [n for n in NAMES if (oauth := MAKERS[n]().oauth) is not None and oauth.revoke_url]


@pytest.mark.parametrize("world", REVOKING, indirect=True)
async def test_disconnecting_tells_the_provider(world):
    account = await world.connect()
    assert await world.app.connections.disconnect(world.key)
    assert account.revoked
    assert [(one.what, one.status) for one in world.fake.log] == [("revoke", 200)]
