"""A test request: the provider's harmless one, through an account's credentials and every gate."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resilient import (
    ConnectionNotFound,
    FailureKind,
    InvalidInput,
    Limit,
    Provider,
    Resilient,
    ResilientError,
    ResourceStopped,
)
from resilient.engine.accounts import whoami
from resilient.engine.accounts.grants import Grants
from resilient.store.accounts.secrets import new_key
from resilient.testing import FakeProvider

KEY = "github/acme"


@pytest.fixture
def fake(clock):
    with FakeProvider("github", clock=clock.now) as fake:
        fake.on("GET /rate_limit", {"resources": {}})
        yield fake


@pytest.fixture
async def app(database, clock, fake):
    app = Resilient(database, providers=[fake.provider], secrets=[new_key()], clock=clock.now)
    await app.ready()
    await app.connections.import_(KEY, **fake.account("acme").tokens)
    yield app
    await app.close()


def sent(fake):
    return [(one.method, one.path) for one in fake.log.api]


async def test_it_is_sent_with_the_accounts_credentials_and_says_how_it_was_answered(app, fake):
    answer = await app.resources.test(KEY)
    assert (answer.status, answer.failure, answer.probe) == (200, None, False)
    assert answer.request == "GET /rate_limit"
    assert 0 < answer.seconds < 30
    assert answer.line.startswith(f"GET /rate_limit through {KEY}: answered 200 in ")
    assert sent(fake) == [("GET", "/rate_limit")]
    assert fake.log.api[0].account == "acme"
    assert any("'core'" in one and "are left" in one for one in answer.lessons), answer.lessons
    row = (await app.audit.list())[0]
    assert (row.action, row.subject) == ("resources test", KEY)
    assert answer.to_json()["status"] == 200


async def test_the_synchronous_app_sends_it_too(app, fake):
    assert app.sync.resources.test(KEY).status == 200
    assert sent(fake) == [("GET", "/rate_limit")]


@pytest.mark.parametrize("gate", ["pause", "breaker"])
@pytest.mark.parametrize("where", ["github", KEY])
async def test_a_gate_refuses_it_before_anything_is_sent(app, fake, gate, where):
    stop = app.resources.pause if gate == "pause" else app.resources.open
    await stop(where, reason="support asked")
    with pytest.raises(ResourceStopped, match=f"{where}' is stopped by .*; no test request was sent") as refused:
        await app.resources.test(KEY)
    assert refused.value.gate == gate
    assert sent(fake) == []
    assert "ResourceStopped" in (await app.audit.list())[0].outcome["error"]


async def test_a_throttle_becomes_a_cooldown_which_refuses_the_next(app, fake, clock):
    fake.throttle(for_=300)
    answer = await app.resources.test(KEY)
    assert (answer.status in (403, 429), answer.failure) == (True, FailureKind.THROTTLED)
    assert any(f"{KEY} waits until" in one for one in answer.lessons)
    with pytest.raises(ResourceStopped, match="its cooldown until"):
        await app.resources.test(KEY)
    assert len(sent(fake)) == 1
    fake.up()
    clock.advance(minutes=20)
    assert (await app.resources.test(KEY)).failure is None


async def test_where_a_circuit_is_due_it_is_the_probe(app, fake, clock):
    await app.resources.open(KEY, until=timedelta(minutes=5))
    clock.advance(minutes=6)
    answer = await app.resources.test(KEY)
    assert (answer.status, answer.probe) == (200, True)
    assert any(f"The circuit of {KEY} is closed" in one for one in answer.lessons)
    assert (await app.resources.get(KEY)).breaker == "closed"


async def test_a_probe_that_fails_leaves_the_circuit_open(app, fake, clock):
    await app.resources.open(KEY, until=timedelta(minutes=5))
    clock.advance(minutes=6)
    fake.down()
    answer = await app.resources.test(KEY)
    assert (answer.status, answer.failure, answer.probe) == (503, FailureKind.TRANSIENT, True)
    assert len(sent(fake)) == 1, "a probe is sent once"
    assert (await app.resources.get(KEY)).breaker == "open"


async def test_a_refused_token_is_refreshed_and_the_request_repeated(app, fake):
    fake.expire_tokens()
    answer = await app.resources.test(KEY)
    assert (answer.status, answer.failure) == (200, None)
    assert [one.status for one in fake.log.api] == [401, 200]


async def test_a_refusal_that_is_not_repeated_is_a_failure(app, fake, clock, monkeypatch):
    """The credentials were renewed, but a gate shut before the request went again: its 401 is what there is."""
    renew = Grants.renew

    async def renew_and_pause(grants, account, access):
        is_renewed = await renew(grants, account, access)
        await app.resources.pause(KEY)
        clock.advance(seconds=5)  # so that the gates are looked at again
        return is_renewed

    monkeypatch.setattr(Grants, "renew", renew_and_pause)
    fake.expire_tokens()
    answer = await app.resources.test(KEY)
    assert [one.status for one in fake.log.api] == [401]
    assert (answer.status, answer.failure) == (401, FailureKind.AUTH)
    assert "answered 401" in answer.line
    assert "which means auth" in answer.line


async def test_without_an_answer_it_is_given_up_in_time(app, fake, monkeypatch):
    monkeypatch.setattr(whoami, "LONGEST", 0.2)
    with fake.hold(), pytest.raises(ResilientError, match=f"{KEY}: the test request was given up after 0 s without"):
        await app.resources.test(KEY)


async def test_a_time_out_of_something_else_is_told_as_it_is(app, fake, monkeypatch):
    async def late(*_):
        raise TimeoutError("the pool has no connection")

    monkeypatch.setattr(whoami.RequestTests, "_require_connection", late)
    with pytest.raises(TimeoutError, match="the pool has no connection"):
        await app.resources.test(KEY)
    assert sent(fake) == []


async def test_dead_credentials_are_found_out_and_then_refuse(app, fake):
    fake.revoke()
    answer = await app.resources.test(KEY)
    assert answer.failure is FailureKind.AUTH
    assert any(f"The credentials of {KEY} are" in one for one in answer.lessons)
    with pytest.raises(ResourceStopped, match="its credentials; no test request was sent"):
        await app.resources.test(KEY)


async def test_no_answer_is_a_result_too(app, fake):
    fake.down(refuse=True)
    answer = await app.resources.test(KEY)
    assert (answer.status, answer.failure) == (None, FailureKind.TRANSIENT)
    assert "no answer" in answer.line


async def test_a_slip_of_the_pen_makes_no_row(app, fake):
    with pytest.raises(ConnectionNotFound, match="github/acmee has no connection"):
        await app.resources.test("github/acmee")
    assert (await app.resources.get("github/acmee")).created_at is None
    with pytest.raises(InvalidInput, match="no provider 'gitbuh' is known here"):
        await app.resources.test("gitbuh/acme")
    with pytest.raises(InvalidInput, match="test one of its accounts"):
        await app.resources.test("github")
    assert sent(fake) == []


async def test_limits_are_drawn_for_it(database, clock):
    provider = Provider(name="free", whoami="GET /me", anonymous=True, limits={"account": [Limit(1, per="1h")]})
    with FakeProvider(provider, clock=clock.now, base_url="http://localhost/v1") as fake:
        fake.on("GET /me", {})
        app = Resilient(database, providers=[fake.provider], clock=clock.now)
        await app.ready()
        assert (await app.resources.test("free/a")).status == 200
        with pytest.raises(ResourceStopped, match="no test request was sent"):
            await app.resources.test("free/a")
        await app.close()
    assert [one.path for one in fake.log.api] == ["/v1/me"]


async def test_facts_without_one_say_so(database, clock):
    app = Resilient(database, providers=[Provider(name="bare", base_url="https://bare.example")], clock=clock.now)
    with pytest.raises(InvalidInput, match=r"name no request to test it with: Provider\(whoami="):
        await app.resources.test("bare/a")
    await app.close()
