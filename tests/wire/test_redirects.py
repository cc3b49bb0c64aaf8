"""Who gets what on the way through redirects: credentials and keys go to declared hosts only."""

import logging
from urllib.parse import quote

import httpx
import pytest

from resilient import Idempotency, Provider
from resilient.wire.requests.request_log import derive


@pytest.fixture(autouse=True)
def _credentials(hooks):
    hooks.credentials = {"Authorization": "Bearer canary", "X-Api-Key": "canary-key"}


async def test_a_foreign_host_gets_a_bare_request(client, provider, server, stranger, hooks):
    api = client(provider(idempotency=Idempotency()))
    url = f"/x?status=307&location={stranger.url}/taken"
    response = await api.post(
        url, content=b"{}", headers={"cookie": "s=canary", "X-Mine": "canary"}, follow_redirects=True
    )
    assert response.status_code == 200
    (_, _, home, _), (method, path, away, body) = server.app.seen[0], stranger.app.seen[0]
    assert home["authorization"] == "Bearer canary"
    assert home["x-api-key"] == "canary-key"
    assert home["idempotency-key"] == derive("job-1", "POST /x #1")
    assert (method, path, body) == ("POST", "/taken", b"{}")
    assert not any("canary" in value for value in away.values())
    assert not {"authorization", "x-api-key", "idempotency-key", "cookie", "x-mine"} & set(away)


async def test_a_foreign_hop_is_not_gated_but_a_post_there_is_marked(client, provider, stranger, hooks):
    api = client(provider(idempotency=Idempotency()))
    await api.post(f"/x?status=307&location={stranger.url}/taken", follow_redirects=True)
    assert hooks.steps == ["admit", "answered", "admit", "mark", "clear"]
    assert [a.gated for a in hooks.requests] == [True, False]
    assert [a.trusted for a in hooks.requests] == [True, False]


async def test_a_chain_that_left_gets_no_credentials_when_it_comes_back(client, provider, server, stranger):
    back = f"{server.url}/back"
    await client(provider()).get(
        f"/x?status=302&location={stranger.url}/y%3Fstatus=302%26location={back}", follow_redirects=True
    )
    assert [h.get("authorization") for _, _, h, _ in server.app.seen] == ["Bearer canary", None]
    assert stranger.app.seen.named("authorization") == [None]


async def test_a_declared_host_gets_them_all(client, hooks, server, stranger):
    provider = Provider(name="api", base_url=server.url, hosts=(stranger.url,), idempotency=Idempotency())
    await client(provider).post(f"/x?status=308&location={stranger.url}/y", follow_redirects=True)
    key = derive("job-1", "POST /x #1")
    for running in (server, stranger):
        assert running.app.seen.named("authorization") == ["Bearer canary"]
        assert running.app.seen.named("idempotency-key") == [key]
    assert hooks.steps == ["admit", "answered"] * 2


async def test_once_bare_to_the_end_of_the_chain(client, provider, server, stranger):
    """A second hop within the stranger's host, and one back to the provider, carry nothing of the caller's either."""
    third = quote(f"{server.url}/back")
    second = quote(f"/again?status=302&location={third}")
    first = quote(f"{stranger.url}/there?status=302&location={second}")
    headers = {"x-own-key": "canary", "cookie": "c=canary"}
    await client(provider()).get(f"/out?status=302&location={first}", headers=headers, follow_redirects=True)
    assert [(path, "canary" in str(sent)) for _, path, sent, _ in stranger.app.seen] == [
        ("/there", False), ("/again", False),
    ]  # fmt: skip
    assert [(path, "canary" in str(sent)) for _, path, sent, _ in server.app.seen] == [
        ("/out", True), ("/back", False),
    ]  # fmt: skip


async def test_a_stranger_that_redirects_to_itself_gets_bare_requests(client, provider, stranger):
    first = f"/out?status=302&location={stranger.url}/loop"
    with pytest.raises(httpx.TooManyRedirects):
        await client(provider()).get(first, headers={"x-own-key": "canary"}, follow_redirects=True)
    assert len(stranger.app.seen) > 2
    assert not any("canary" in str(sent) for _, _, sent, _ in stranger.app.seen)


async def test_a_hop_to_a_stranger_that_is_sent_twice_is_bare_twice(client, provider, stranger):
    api = client(provider())
    answer = await api.get(f"/out?status=302&location={stranger.url}/there", headers={"x-own-key": "canary"})
    for _ in range(2):
        await api.send(answer.next_request)
    assert stranger.app.seen.named("x-own-key") == [None, None]


async def test_another_port_or_scheme_is_another_host(client, provider, stranger):
    await client(provider()).get(stranger.url + "/x")
    assert stranger.app.seen.named("authorization") == [None]


async def test_a_request_made_to_a_foreign_host_goes_as_it_was_written(client, provider, stranger, hooks):
    await client(provider()).get(stranger.url + "/x?status=429", headers={"authorization": "Bearer their-own"})
    assert stranger.app.seen.named("authorization") == ["Bearer their-own"]
    assert hooks.steps == ["admit"]


async def test_a_provider_that_declares_no_hosts_is_gated_and_gets_no_credentials(client, server, hooks):
    await client().get("/x")
    assert server.app.seen.named("authorization") == [None]
    assert hooks.steps == ["admit", "answered"]


async def test_a_303_becomes_a_get_and_is_no_repeat(client, provider, server, hooks):
    api = client(provider(idempotency=Idempotency()))
    await api.post("/x?status=303&location=/done", follow_redirects=True)
    assert [(m, p) for m, p, _, _ in server.app.seen] == [("POST", "/x"), ("GET", "/done")]
    assert server.app.seen.named("idempotency-key")[1] is None


async def test_an_endless_redirect_is_permanent(client, provider, server, hooks):
    from resilient.core.base.errors import FailureKind
    from resilient.wire.requests.explain import explain

    api = client(provider())
    with pytest.raises(httpx.TooManyRedirects) as caught:
        await api.get("/loop", follow_redirects=True)
    failure = explain(caught.value, api.request_log, hooks.now()).failure
    assert (failure.kind, failure.code) == (FailureKind.PERMANENT, "too_many_redirects")


async def test_no_secret_reaches_a_log(client, provider, hooks, caplog, stranger):
    for name in (None, "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    api = client(provider())
    place = f"{stranger.url}/y%3Fsig=canary2"
    await api.get(
        f"/x?api_key=canary3&status=302&location={place}&h=set-cookie:s=canary4|x-secret:canary5",
        follow_redirects=True,
    )
    ours = [r for r in caplog.records if r.name.startswith(("httpx", "httpcore"))]  # not the server's own log
    text = "\n".join(record.getMessage() for record in ours)
    assert "HTTP Request: GET" in text
    assert "receive_response_headers" in text
    assert "canary" not in text
