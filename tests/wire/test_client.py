"""The job's client against a real server: order of steps, keys, marks, repeats, credentials."""

import asyncio
import json

import httpx
import pytest

from resilient import (
    AnswerFacts,
    Errors,
    Idempotency,
    InvalidInput,
    JobFailure,
    LostLease,
    Permanent,
    ResourceStopped,
    Rule,
    Throttled,
    Transient,
)
from resilient.core.base.errors import FailureKind as K
from resilient.wire.requests.answer import FailedAnswer
from resilient.wire.requests.request_log import derive
from tests.helpers import until

SLACKISH = Errors(code=("error",), rules=(Rule(K.PERMANENT, status=200, where={"ok": False}),))


# -- the order of things -------------------------------------------------------------------------------------


async def test_a_get_is_admitted_sent_and_reported(client, hooks, server):
    response = await client().get("/x")
    assert response.json() == {"ok": True}
    assert response.extensions["resilient"] is None
    assert hooks.log == [("admit", "api/acct", 1.0), ("answered", 200, None)]


async def test_a_refusal_comes_before_any_io(client, hooks, server):
    hooks.stop_from = 1
    with pytest.raises(ResourceStopped):
        await client().get("/x")
    assert server.app.seen == []
    assert hooks.steps == ["admit"]


async def test_a_post_without_a_key_is_marked_before_it_is_sent_and_cleared_by_the_answer(client, hooks, server):
    api = client()
    await api.post("/charges", json={"a": 1})
    assert hooks.steps == ["admit", "mark", "answered", "clear"]
    assert hooks.log[1] == ("mark", "POST /charges #1")
    assert hooks.marks == {}
    asked = hooks.requests[0]
    assert (asked.repeatable, asked.needs_mark, len(asked.body_hash)) == (False, True, 64)


async def test_nothing_is_sent_if_the_mark_cannot_be_made(client, hooks, server):
    hooks.on_mark = LostLease("gone")
    with pytest.raises(LostLease):
        await client().post("/charges")
    assert server.app.seen == []
    assert hooks.steps == ["admit", "mark", "abandoned"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_idempotent_methods_need_no_mark(client, hooks, method):
    await client().request(method, "/x")
    assert "mark" not in hooks.steps


@pytest.mark.parametrize("method", ["POST", "PATCH", "MKCOL"])
async def test_other_methods_do(client, hooks, method):
    await client().request(method, "/x")
    assert "mark" in hooks.steps


async def test_the_callers_word_wins_over_the_method(client, hooks):
    api = client()
    await api.post("/search", extensions={"idempotent": True})
    assert "mark" not in hooks.steps
    await api.put("/counter", extensions={"idempotent": False})
    assert hooks.steps[-4:] == ["admit", "mark", "answered", "clear"]


async def test_a_providers_reads_need_no_mark(client, hooks, provider):
    api = client(provider(reads=("POST /v1/*/query",)))
    await api.post("/v1/db/query")
    assert hooks.steps == ["admit", "answered"]
    await api.post("/v1/db")
    assert "mark" in hooks.steps


async def test_what_only_reads_gets_no_key_unless_one_is_given(client, provider, server):
    api = client(provider(reads=("POST /search",), idempotency=Idempotency()))
    await api.post("/search")
    await api.post("/other", extensions={"idempotent": True})
    await api.post("/search", extensions={"idempotency_key": "k"})
    assert server.app.seen.named("idempotency-key") == [None, None, "k"]


async def test_a_cancelled_request_is_abandoned_and_its_mark_stands(client, hooks, server):
    api = client()
    sending = asyncio.create_task(api.post("/x?hold=1"))
    await until(lambda: server.app.seen)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert hooks.steps == ["admit", "mark", "abandoned"]
    assert list(hooks.marks) == ["POST /x #1"]


async def test_routes_and_costs(client, hooks, provider):
    api = client(provider(
        route=lambda asked: ("search", 5.0) if asked.path == "/search" else ("", 1.0),
        cost=lambda answer: float(answer.headers["x-cost"]) if "x-cost" in answer.headers else None,
    ))  # fmt: skip
    await api.get("/search?h=x-cost:7.5")
    await api.get("/other")
    await api.get("/search", extensions={"cost": 2})
    assert [(a.key, a.cost) for a in hooks.requests] == [
        ("api/acct/search", 5),
        ("api/acct", 1),
        ("api/acct/search", 2),
    ]
    assert [answer.cost for answer, _ in hooks.answers] == [7.5, None, None]


async def test_a_job_of_the_endpoint_is_not_sent_below_itself(client, hooks, provider):
    hooks.resource_key = "api/acct/search"
    await client(provider(route=lambda _: ("search", 1.0))).get("/search")
    await client(provider(route=lambda _: ("other", 1.0))).get("/other")
    assert [a.key for a in hooks.requests] == ["api/acct/search", "api/acct/other"]


async def test_budgets_are_read_off_every_answer(client, hooks):
    await client().get("/x?h=x-ratelimit-remaining:7|x-ratelimit-limit:100|x-ratelimit-reset:60")
    (budget,) = hooks.answers[0][0].budgets
    assert (budget.remaining, budget.limit) == (7, 100)


# -- classification ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (429, Throttled, K.THROTTLED),
        (503, Transient, K.TRANSIENT),
        (422, Permanent, K.PERMANENT),
        (409, JobFailure, K.CONFLICT),
        (401, JobFailure, K.AUTH),
    ],
)
async def test_every_answer_is_returned_and_raise_for_status_raises_what_it_means(client, hooks, status, error, kind):
    response = await client().get(f"/x?status={status}&h=retry-after:5")
    assert response.status_code == status
    assert response.extensions["resilient"].kind is kind
    with pytest.raises(error) as caught:
        response.raise_for_status()
    assert isinstance(caught.value, httpx.HTTPStatusError)
    assert caught.value.failure.kind is kind
    assert caught.value.response is response
    assert hooks.log[-1] == ("answered", status, kind)


async def test_a_throttle_is_told_to_the_engine_before_the_handler_sees_it(client, hooks):
    await client().get("/x?status=429&h=retry-after:30")
    (answer, failure) = hooks.answers[0]
    assert (failure.kind, failure.retry_in) == (K.THROTTLED, 30)
    assert isinstance(answer, AnswerFacts)


async def test_a_200_the_dialect_calls_an_error(client, hooks, provider):
    api = client(provider(errors=SLACKISH))
    response = await api.get('/x?body={"ok":false,"error":"no_channel"}')
    with pytest.raises(Permanent, match="no_channel") as caught:
        response.raise_for_status()
    assert caught.value.failure.code == "no_channel"
    assert response.json() == {"ok": False, "error": "no_channel"}
    good = await api.get("/x")
    assert good.raise_for_status() is good
    assert good.json() == good.json() == {"ok": True}


async def test_a_success_body_is_not_read_unless_the_dialect_asks(client, provider):
    async with client().stream("GET", "/x") as response:
        assert not response.is_closed
        assert await response.aread() == b'{"ok": true}'
    async with client(provider(errors=SLACKISH)).stream("GET", "/x?type=text/csv") as response:
        assert not response.is_closed
    async with client(provider(errors=SLACKISH)).stream("GET", "/x") as response:
        assert response.is_closed
        assert await response.aread() == b'{"ok": true}'


async def test_redirects_are_not_followed_unasked_and_are_no_success(client):
    response = await client().get("/x?status=302&location=/y")
    assert response.extensions["resilient"] is None
    with pytest.raises(FailedAnswer, match="302"):
        response.raise_for_status()


async def test_messages_carry_the_providers_words_and_no_secrets(client, hooks, provider):
    hooks.credentials = {"Authorization": "Bearer canary-token-1"}
    body = '{"message":"bad key canary-token-1 for Bearer abcdefghij at https://h/?sig=canary2"}'
    response = await client(provider()).get("/x?status=400&api_key=canary3", params=None)
    response = await client(provider()).get("/x", params={"status": 400, "api_key": "canary3", "body": body})
    with pytest.raises(Permanent) as caught:
        response.raise_for_status()
    text = str(caught.value)
    assert "bad key" in text
    assert "canary" not in text
    assert "abcdefghij" not in text
    assert "api_key=…" in text


# -- idempotency keys ----------------------------------------------------------------------------------------


async def test_each_request_has_its_own_key_stable_over_executions(client, hooks, provider, server):
    declared = provider(idempotency=Idempotency())
    for _ in range(2):  # two executions of the job
        api = client(declared)
        await api.post("/charges", json={"n": 1})
        await api.post("/charges", json={"n": 1})
        await api.post("/refunds")
    keys = server.app.seen.named("idempotency-key")
    assert keys[:3] == keys[3:]
    assert len(set(keys[:3])) == 3
    assert keys[0] == derive("job-1", "POST /charges #1")
    assert "mark" not in hooks.steps
    assert hooks.requests[0].repeatable


async def test_an_op_names_the_key(client, provider, server):
    api = client(provider(idempotency=Idempotency()))
    await api.post("/charges", extensions={"op": "charge"})
    await api.post("/charges", extensions={"op": "charge"})
    assert server.app.seen.named("idempotency-key") == [derive("job-1", "charge")] * 2
    with pytest.raises(InvalidInput, match="'charge'"):
        await api.post("/charges", json={"other": 1}, extensions={"op": "charge"})


async def test_a_request_without_a_conclusion_keeps_its_name(client, provider, server):
    api = client(provider(idempotency=Idempotency()))
    await api.post("/a?status=500", json={"n": 1})  # the caller's own retry loop
    await api.post("/a?status=429", json={"n": 1})
    await api.post("/a", json={"n": 1})
    await api.post("/a", json={"n": 1})  # now it is a second one
    one, two = derive("job-1", "POST /a #1"), derive("job-1", "POST /a #2")
    assert server.app.seen.named("idempotency-key") == [one, one, one, two]


async def test_a_refused_request_is_concluded(client, provider, server):
    api = client(provider(idempotency=Idempotency()))
    await api.post("/a?status=422", json={"n": 1})
    await api.post("/a", json={"n": 1})
    assert len(set(server.app.seen.named("idempotency-key"))) == 2


async def test_a_key_set_by_hand_wins_and_one_an_sdk_made_up_is_replaced(client, provider, server):
    api = client(provider(idempotency=Idempotency(made_up=r"sdk-.*")))
    await api.post("/a", headers={"Idempotency-Key": "mine"})
    await api.post("/a", extensions={"idempotency_key": "mine-too"}, headers={"idempotency-key": "sdk-9"})
    await api.post("/b?status=500", headers={"idempotency-key": "sdk-1"}, json={"t": 1})
    await api.post("/b", headers={"idempotency-key": "sdk-1"}, json={"t": 2})  # the SDK's retry, with a new body
    await api.post("/b", headers={"idempotency-key": "sdk-2"}, json={"t": 1})
    one, two = derive("job-1", "POST /b #1"), derive("job-1", "POST /b #2")
    assert server.app.seen.named("idempotency-key") == ["mine", "mine-too", one, one, two]


async def test_keys_go_where_the_provider_takes_them(client, hooks, provider, server):
    api = client(provider(idempotency=Idempotency(methods=frozenset({"PUT"}), paths=("/a/*",), quoted=True)))
    await api.put("/a/1")
    await api.put("/b/1")
    await api.post("/a/1")
    keys = server.app.seen.named("idempotency-key")
    assert keys == [f'"{derive("job-1", "PUT /a/1 #1")}"', None, None]
    assert [a.needs_mark for a in hooks.requests] == [False, False, True]


async def test_a_key_as_a_parameter(client, provider, server, hooks):
    response = await client(provider(idempotency=Idempotency(query="requestid"))).post("/invoice?minor=75")
    assert response.status_code == 200
    assert server.app.seen.named("idempotency-key") == [None]
    assert hooks.requests[0].idempotency_key == derive("job-1", "POST /invoice #1")


async def test_a_key_for_a_provider_that_takes_none_is_refused(client):
    with pytest.raises(InvalidInput, match="idempotent"):
        await client().post("/a", extensions={"idempotency_key": "k"})


async def test_concurrent_requests_are_numbered_as_they_start(client, provider, server):
    api = client(provider(idempotency=Idempotency()))
    await asyncio.gather(*(api.post("/a", json={"n": n}) for n in range(5)))
    sent = {json.loads(body)["n"]: headers["idempotency-key"] for _, _, headers, body in server.app.seen}
    assert sent == {n: derive("job-1", f"POST /a #{n + 1}") for n in range(5)}


# -- repeats within a call -----------------------------------------------------------------------------------


async def test_what_is_safe_is_repeated_within_the_call(client, hooks, patient, server):
    response = await client(over=patient).get("/x?status=503&times=2")
    assert response.status_code == 200
    assert len(server.app.seen) == 3
    assert hooks.steps == ["admit", "answered"] * 3


async def test_a_keyed_post_is_repeated_with_the_same_key(client, patient, provider, server):
    api = client(provider(idempotency=Idempotency()), over=patient)
    response = await api.post("/x?status=503&times=1", json={"a": 1})
    assert response.status_code == 200
    keys = server.app.seen.named("idempotency-key")
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert [body for *_, body in server.app.seen] == [b'{"a":1}'] * 2


async def test_a_post_after_one_that_was_repeated_is_another_one(client, patient, provider, server):
    api = client(provider(idempotency=Idempotency()), over=patient)
    await api.post("/x?status=503&times=1", json={"a": 1})
    await api.post("/x?status=503&times=1", json={"a": 1})
    one, two = derive("job-1", "POST /x #1"), derive("job-1", "POST /x #2")
    assert server.app.seen.named("idempotency-key") == [one, one, two]


async def test_while_a_post_may_be_repeated_another_like_it_is_none_of_its_repeats(client, patient, provider, server):
    api = client(provider(idempotency=Idempotency()), over=patient)
    first = asyncio.create_task(api.post("/x?status=503&times=1", json={"a": 1}))
    while not server.app.seen:  # noqa: ASYNC110 - the server is in another thread
        await asyncio.sleep(0.001)
    await asyncio.gather(first, api.post("/x?status=503&times=1", json={"a": 1}))
    one, two = derive("job-1", "POST /x #1"), derive("job-1", "POST /x #2")
    assert sorted(server.app.seen.named("idempotency-key")) == sorted([one, one, two])


async def test_a_post_that_its_gate_refused_keeps_its_name(client, hooks, provider, server):
    api = client(provider(idempotency=Idempotency()))
    await api.post("/x?status=500", json={"a": 1})
    hooks.stop_from = 2
    with pytest.raises(ResourceStopped):
        await api.post("/x", json={"a": 1})
    hooks.stop_from = None
    await api.post("/x", json={"a": 1})
    assert server.app.seen.named("idempotency-key") == [derive("job-1", "POST /x #1")] * 2


async def test_a_post_without_a_key_is_sent_once(client, patient, server):
    response = await client(over=patient).post("/x?status=503&times=1")
    assert response.status_code == 503
    assert len(server.app.seen) == 1


@pytest.mark.parametrize("status", [429, 400, 401, 409])
async def test_only_passing_faults_are_repeated(client, patient, server, status):
    await client(over=patient).get(f"/x?status={status}")
    assert len(server.app.seen) == 1


async def test_a_told_wait_is_the_jobs(client, patient, server):
    await client(over=patient).get("/x?status=503&h=retry-after:2")
    assert len(server.app.seen) == 1


async def test_a_probe_of_a_circuit_is_sent_once(client, hooks, patient, server):
    hooks.probing = True
    response = await client(over=patient).get("/x?status=503&times=2")
    assert response.status_code == 503
    assert len(server.app.seen) == 1


async def test_a_streamed_body_cannot_be_sent_twice(client, patient, server):
    async def body():
        yield b"once"

    await client(over=patient).put("/x?status=503", content=body())
    assert len(server.app.seen) == 1


async def test_a_length_beside_chunks_is_not_sent(client, server):
    """A proxy may believe the one and its server the other: the rest of the body would be another request."""
    for extra in ({}, {"Content-Length": "9"}):
        await client().post("/x", content=b"{}", headers={"Transfer-Encoding": "chunked", **extra})
        _, _, headers, body = server.app.seen[-1]
        assert (headers.get("content-length"), headers["transfer-encoding"], body) == (None, "chunked", b"{}")


async def test_an_upload_that_is_refused_before_it_has_come_is_not_in_doubt(client, hooks, rude):
    async def behave(_reader, writer):
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await asyncio.Event().wait()

    async with rude(behave) as (url, _):
        answer = await client().post(url, content=bytes(32 << 20))
    assert answer.extensions["resilient"].kind is K.PERMANENT
    assert hooks.steps == ["admit", "mark", "answered", "clear"]


async def test_a_gate_that_closes_between_tries_leaves_the_first_answer(client, hooks, patient):
    hooks.stop_from = 2
    response = await client(over=patient).get("/x?status=503")
    assert response.status_code == 503
    assert hooks.steps == ["admit", "answered", "admit"]


# -- credentials ---------------------------------------------------------------------------------------------


async def test_credentials_are_added_on_the_wire_only(client, hooks, provider, server):
    hooks.credentials = {"Authorization": "Bearer canary"}
    response = await client(provider()).get("/x", headers={"authorization": "Bearer placeholder"})
    assert server.app.seen.named("authorization") == ["Bearer canary"]
    assert "canary" not in str(response.request.headers.raw)
    assert "canary" not in repr(response.request.extensions)


async def test_refused_credentials_are_refreshed_once_and_the_request_repeated(client, hooks, provider, server):
    hooks.credentials = {"Authorization": "Bearer stale-token"}
    hooks.refreshes = [{"Authorization": "Bearer fresh-token"}]
    response = await client(provider()).post("/bearer", json={"a": 1})
    assert response.status_code == 200
    assert hooks.steps == [
        "admit", "mark", "refreshed", "answered", "clear",
        "admit", "mark", "answered", "clear",
    ]  # fmt: skip
    assert hooks.log[3] == ("answered", 401, None)


async def test_a_post_after_one_whose_credentials_were_refused_is_another_one(client, hooks, provider, server):
    hooks.credentials = {"Authorization": "Bearer stale-token"}
    hooks.refreshes = [{"Authorization": "Bearer fresh-token"}]
    api = client(provider(idempotency=Idempotency()))
    await api.post("/bearer", json={"a": 1})
    hooks.credentials = {"Authorization": "Bearer fresh-token"}
    await api.post("/bearer", json={"a": 1})
    one, two = derive("job-1", "POST /bearer #1"), derive("job-1", "POST /bearer #2")
    assert server.app.seen.named("idempotency-key") == [one, one, two]


async def test_a_second_refusal_is_a_failure_of_the_account(client, hooks, provider):
    hooks.credentials = {"Authorization": "Bearer stale-token"}
    hooks.refreshes = [{"Authorization": "Bearer bad-token"}, {"Authorization": "Bearer fresh-token"}]
    response = await client(provider()).get("/bearer")
    assert response.status_code == 401
    assert hooks.steps == ["admit", "refreshed", "answered", "admit", "answered"]
    assert hooks.log[-1] == ("answered", 401, K.AUTH)


async def test_nothing_is_refreshed_that_was_not_given(client, hooks):
    await client().get("/bearer")
    assert hooks.steps == ["admit", "answered"]


async def test_a_200_about_credentials_is_refreshed_too(client, hooks, provider, server):
    hooks.credentials = {"Authorization": "Bearer stale-token"}
    hooks.refreshes = [{"Authorization": "Bearer fresh-token"}]
    errors = Errors(code=("error",), rules=(Rule(K.AUTH, status=200, code="token_expired"),))
    await client(provider(errors=errors)).get('/x?body={"error":"token_expired"}')
    assert server.app.seen.named("authorization") == ["Bearer stale-token", "Bearer fresh-token"]


async def test_a_credential_with_a_line_break_never_leaves(client, hooks, provider, server):
    hooks.credentials = {"Authorization": "Bearer a\r\nX-Evil: 1"}
    with pytest.raises(httpx.LocalProtocolError):
        await client(provider()).get("/x")
    assert server.app.seen == []
    assert hooks.log[-1] == ("failed", K.PERMANENT, "bad_request")


# -- GraphQL -------------------------------------------------------------------------------------------------


async def test_graphql_returns_data_and_knows_a_query(client, hooks, provider, server):
    api = client(provider())
    data = await api.graphql(
        "query Q($n: Int) { things(n: $n) { id } }", {"n": 1}, url='/graphql?body={"data":{"a":1}}'
    )
    assert data == {"a": 1}
    assert json.loads(server.app.seen[0][3])["variables"] == {"n": 1}
    assert hooks.steps == ["admit", "answered"]
    await api.graphql("mutation { charge { id } }", url='/graphql?body={"data":null}')
    assert hooks.steps[2:] == ["admit", "mark", "answered", "clear"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"errors":[{"message":"no","extensions":{"code":"FORBIDDEN"}}]}', "FORBIDDEN"),
        ('{"data":{"a":1},"errors":[{"message":"half"}]}', "graphql_error"),
        ('{"unexpected":1}', "graphql_error"),
        ("<html>", "graphql_error"),
    ],
)
async def test_graphql_raises_for_any_error(client, provider, body, code):
    api = client(provider())
    with pytest.raises(Permanent) as caught:
        await api.graphql("{ a }", url=str(httpx.URL("/graphql", params={"body": body})))
    assert caught.value.failure.code == code
    assert api.request_log.last_failure.code == code


async def test_graphql_by_status(client, provider):
    with pytest.raises(Throttled):
        await client(provider()).graphql("{ a }", url="/graphql?status=429")


async def test_the_client_of_one_job_shares_connections_but_no_cookies(client, pool, server):
    one, two = client(), client()
    await one.get("/x?h=set-cookie:a=1")
    await two.get("/x")
    await one.get("/x")
    assert server.app.seen.named("cookie") == [None, None, "a=1"]
    await one.aclose()
    assert (await two.get("/x")).status_code == 200


async def test_a_request_nobody_waited_for_is_the_same_one_when_it_is_sent_again(client, provider, server):
    api = client(provider(idempotency=Idempotency()))
    sending = asyncio.create_task(api.post("/x?hold=1", json={"n": 1}))
    while not server.app.seen:  # noqa: ASYNC110 - the server is in another thread
        await asyncio.sleep(0.01)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await api.post("/x", json={"n": 1})
    assert server.app.seen.named("idempotency-key") == [derive("job-1", "POST /x #1")] * 2


async def test_a_refusal_that_gates_the_account_leaves_no_mark(client, hooks, monkeypatch):
    """401, and the grant is dead: nothing was done, so the job waits; it is not in doubt."""

    async def gates(_permit, _answer, _failure):
        raise ResourceStopped("api/acct", "auth", None)

    monkeypatch.setattr(hooks, "answered", gates)
    with pytest.raises(ResourceStopped):
        await client().post("/x?status=401")
    assert "mark" in hooks.steps
    assert hooks.marks == {}
