"""What a provider's answer says of its request: not the credentials that we added, in the URL or in a header."""

import aiohttp as aiohttp_
import pytest
import requests as requests_

from resilient import ApiKey, Bearer, Job, Provider, Resilient, SyncJob, handler
from resilient.adapters import aiohttp, requests
from resilient.testing import FakeProvider, new_key

CANARY = "canary-0123456789"
WAYS = [(ApiKey(query="key"), {"api_key": CANARY}), (Bearer(), {"token": CANARY})]
by_way = pytest.mark.parametrize(("auth", "credentials"), WAYS, ids=["in the URL", "in a header"])


@pytest.fixture
def fake(auth):
    with FakeProvider(Provider(name="maps", base_url="https://maps.example", auth=(auth,))) as found:
        found.fail_next(404)
        yield found


async def run(fake, sqlite_url, kind, credentials):
    async with Resilient(sqlite_url, handlers=[kind], providers=[fake.provider], secrets=[new_key()]) as app:
        await app.connections.add("maps/one", **credentials)
        job = await app.enqueue(kind, resource_key="maps/one")
        await app.worker().drain()
        assert (await app.jobs.get(job.id)).state.value == "succeeded"


@by_way
async def test_requests(fake, sqlite_url, credentials):
    shown = []

    @handler("h")
    def h(job: SyncJob[None]) -> None:
        with requests.session(job) as s:
            answer = s.get(f"{fake.url}/geocode?q=1")
            with pytest.raises(requests_.HTTPError) as raised:
                answer.raise_for_status()
            shown.extend([answer.url, answer.request.url, str(answer.request.headers), str(raised.value)])

    await run(fake, sqlite_url, h, credentials)
    assert "/geocode?q=1" in shown[0]
    assert CANARY not in str(shown)


@by_way
async def test_aiohttp(fake, sqlite_url, credentials):
    shown = []

    @handler("h")
    async def h(job: Job[None]) -> None:
        async with aiohttp.session(job) as s, s.get(f"{fake.url}/geocode?q=1") as answer:
            with pytest.raises(aiohttp_.ClientResponseError) as raised:
                answer.raise_for_status()
            shown.extend([str(answer.url), repr(answer.request_info), str(raised.value), repr(raised.value)])

    await run(fake, sqlite_url, h, credentials)
    assert "/geocode?q=1" in shown[0]
    assert CANARY not in str(shown)
