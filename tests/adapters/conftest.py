"""One app, one scriptable provider that takes idempotency keys, one account, and a stranger's server."""

import pytest

from resilient import Idempotency, Limit, OAuth2, Provider, Resilient, Rotation
from resilient.testing import FakeClock, FakeProvider, new_key
from tests.serving import Certificate

ACME = Provider(
    name="acme",
    base_url="https://api.acme.example",
    auth=(OAuth2(token_url="https://api.acme.example/token", rotation=Rotation.SINGLE_USE),),
    limits={"account": [Limit(50, per="1s", burst=50)]},
    idempotency=Idempotency(paths=("/charges",), life=3600, made_up=r"sdk-\d+"),
)


@pytest.fixture
def time():
    return FakeClock()


@pytest.fixture
def fake(time):
    with FakeProvider(ACME, clock=time.now) as found:
        found.on("*", {"ok": True})
        found.account("one")
        yield found


@pytest.fixture
def stranger(time):
    with FakeProvider(Provider(name="stranger", base_url="https://s.example"), clock=time.now) as found:
        found.on("*", {"stranger": True})
        yield found


@pytest.fixture
async def run(fake, time, sqlite_url):
    """``await run(handler)``: one job of it, until nothing is due; the job."""
    apps = []

    async def run(kind, *, again=0):
        app = Resilient(
            sqlite_url, handlers=[kind], providers=[fake.provider], clock=time.now, upgrade=False, secrets=[new_key()]
        )
        apps.append(app)
        await app.connections.import_("acme/one", **fake.account("one").tokens)
        done = await app.enqueue(kind, resource_key="acme/one")
        await app.worker().drain()
        for _ in range(again):
            time.advance(minutes=5)
            await app.worker().drain()
        return await app.jobs.get(done.id)

    yield run
    for app in apps:
        await app.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A server's context, and the file of the certificate that clients trust."""
    made = Certificate(tmp_path_factory.mktemp("tls"))
    return made.server, made.cert
