"""Requests of real jobs to where their account lives, with its own headers and credentials, and to other resources."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from urllib.parse import parse_qs

import httpx
import pytest

from resilient import (
    ApiKey,
    Basic,
    Bearer,
    BreakerPolicy,
    Errors,
    FailureKind,
    Fixed,
    Idempotency,
    InvalidInput,
    Job,
    Limit,
    NextUrl,
    OAuth2,
    PageRequest,
    Provider,
    Resilient,
    Retry,
    Rule,
    Scope,
    Stream,
    SyncJob,
    Wait,
    handler,
)
from resilient.store.accounts.secrets import new_key
from resilient.wire.requests.request_log import derive
from tests.helpers import LIMIT

KEY = new_key()
SOON = Retry(max_attempts=3, delay=Fixed(0))


class Api:
    """Writes down what came, and answers as `script` (by path) says."""

    def __init__(self):
        self.seen, self.script = [], {}

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        query = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode()).items()}
        self.seen.append((scope["path"], headers, query))
        left = self.script.get(scope["path"])
        told = left.pop(0) if left else {}
        body = json.dumps(told.get("body", {"ok": True})).encode()
        extra = [(k.encode(), v.encode()) for k, v in told.get("headers", {}).items()]
        await send({
            "type": "http.response.start", "status": told.get("status", 200),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *extra],
        })  # fmt: skip
        await send({"type": "http.response.body", "body": body})

    @property
    def paths(self):
        return [path for path, _, _ in self.seen]

    def sent(self, name):
        return [headers.get(name) for _, headers, _ in self.seen]


@pytest.fixture
def apis(serve):
    """Two hosts, as two customers' instances would be."""
    found = [Api(), Api()]
    for api in found:
        api.url = serve(api)
    return found


@pytest.fixture
async def make(database_url):
    made = []

    def make_(*providers, handlers, **options):
        app = Resilient(database_url, handlers=handlers, providers=providers, secrets=[KEY], upgrade=False, **options)
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


def tenants(**facts):
    """Each account at an address and with a header of its own."""
    facts = {"auth": (Bearer(),), "headers": {"Accept": "application/x", "X-Tenant": "{tenant}"}, **facts}
    return Provider(**{"name": "crm", "base_url": "{home}/v1", "private_hosts": ("127.0.0.1",), **facts})


async def join(app, api, key, tenant):
    await app.connections.add(key, token=f"canary-{tenant}", details={"home": api.url, "tenant": tenant})


@handler("get", retry=SOON)
async def get(job: Job[str]) -> int:
    response = await job.client.get(job.payload)
    response.raise_for_status()
    return response.status_code


@handler("plain", retry=SOON)
def plain(job: SyncJob[str]) -> int:
    return job.client.get(job.payload).status_code


@handler("call", retry=SOON)
async def foreign(job: Job[str]) -> dict[str, str]:
    async with job.call("GET", job.payload) as call:
        call.report(200)
    return {"url": call.url, **call.headers}


@handler("call.plain", retry=SOON)
def foreign_plain(job: SyncJob[str]) -> dict[str, str]:
    with job.call("GET", job.payload) as call:
        call.report(200)
    return {"url": call.url, **call.headers}


# -- an account's own address ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [get, plain])
async def test_each_account_is_asked_where_it_lives_with_its_own_headers(make, apis, kind):
    app = make(tenants(), handlers=[kind])
    for api, key, tenant in ((apis[0], "crm/1", "one"), (apis[1], "crm/2", "two")):
        await join(app, api, key, tenant)
        await app.enqueue(kind, "/things", resource_key=key)
    await app.worker().drain(timeout=LIMIT)
    assert await app.jobs.count(state="succeeded") == 2
    for api, tenant in zip(apis, ("one", "two"), strict=True):
        assert api.paths == ["/v1/things"]
        assert api.sent("x-tenant") == [tenant]
        assert api.sent("accept") == ["application/x"]
        assert api.sent("authorization") == [f"Bearer canary-{tenant}"]


@pytest.mark.parametrize("kind", [foreign, foreign_plain])
async def test_a_foreign_client_is_told_the_same(make, apis, kind):
    app = make(tenants(), handlers=[kind])
    await join(app, apis[0], "crm/1", "one")
    done = await app.enqueue(kind, "/things", resource_key="crm/1")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).result == {
        "url": f"{apis[0].url}/v1/things", "Accept": "application/x", "X-Tenant": "one",
        "Authorization": "Bearer canary-one",
    }  # fmt: skip


async def test_another_accounts_host_gets_nothing_even_by_redirect(make, apis):
    app = make(tenants(), handlers=[get])
    await join(app, apis[0], "crm/1", "one")
    apis[0].script = {"/v1/moved": [{"status": 307, "headers": {"location": f"{apis[1].url}/v1/things"}}]}

    @handler("follow", retry=SOON)
    async def follow(job: Job[None]) -> None:
        (await job.client.get("/moved", follow_redirects=True)).raise_for_status()
        await job.client.get(f"{apis[1].url}/straight")

    app = make(tenants(), handlers=[follow])
    await app.enqueue(follow, resource_key="crm/1")
    await app.worker().drain(timeout=LIMIT)
    assert apis[0].sent("authorization") == ["Bearer canary-one"]
    assert apis[1].paths == ["/v1/things", "/straight"]
    assert apis[1].sent("authorization") == apis[1].sent("x-tenant") == [None, None]


async def test_an_sdk_builds_its_own_client_over_the_transport(make, apis):
    @handler("sdk", retry=SOON)
    async def sdk(job: Job[None]) -> None:
        async with httpx.AsyncClient(transport=job.transport, base_url=str(job.client.base_url)) as own:
            await own.get("/one")
        await job.client.get("/two")

    @handler("sdk.plain", retry=SOON)
    def sdk_plain(job: SyncJob[None]) -> None:
        with httpx.Client(transport=job.transport, base_url=str(job.client.base_url)) as own:
            own.get("/three")

    app = make(tenants(), handlers=[sdk, sdk_plain])
    await join(app, apis[0], "crm/1", "one")
    for kind in (sdk, sdk_plain):
        await app.enqueue(kind, resource_key="crm/1")
    await app.worker().drain(timeout=LIMIT)
    assert sorted(apis[0].paths) == ["/v1/one", "/v1/three", "/v1/two"]
    assert set(apis[0].sent("authorization")) == {"Bearer canary-one"}


async def test_what_the_caller_says_wins_over_the_providers_headers(make, apis):
    @handler("own", retry=SOON)
    async def own(job: Job[None]) -> None:
        await job.client.get("/x", headers={"accept": "text/csv"})

    app = make(tenants(), handlers=[own])
    await join(app, apis[0], "crm/1", "one")
    await app.enqueue(own, resource_key="crm/1")
    await app.worker().drain(timeout=LIMIT)
    assert apis[0].sent("accept") == ["text/csv"]


async def test_fixed_headers_of_a_provider_go_with_every_request(make, apis):
    app = make(Provider(name="gh", base_url=apis[0].url, headers={"X-Version": "7"}), handlers=[get])
    await app.enqueue(get, "/x", resource_key="gh/1")
    await app.enqueue(get, f"{apis[1].url}/x", resource_key="gh/1")
    await app.worker().drain(timeout=LIMIT)
    assert apis[0].sent("x-version") == ["7"]
    assert apis[1].sent("x-version") == [None]


async def test_an_account_without_a_connection_waits_for_it(make, apis):
    app = make(tenants(), handlers=[get])
    done = await app.enqueue(get, "/x", resource_key="crm/1", max_attempts=1)
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).attempts == 0
    assert (await app.resources.get("crm/1")).auth == "not_connected"


async def test_a_key_whose_provider_the_app_does_not_have_says_so(make, apis):
    done = await (app := make(tenants(), handlers=[get])).enqueue(get, "/x", resource_key="cmr/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, job.last_error_code) == ("dead", "permanent", "bad_url")
    assert "GET /x: the app has no provider 'cmr', so no base URL: list it in Resilient(prov" in job.last_error


async def test_an_address_at_a_strangers_is_refused_when_it_is_given(make, apis):
    app = make(tenants(hosts=("*.crm.example",)), handlers=[get])
    with pytest.raises(InvalidInput, match="not among the hosts"):
        await join(app, apis[0], "crm/1", "one")


async def test_the_address_may_come_with_the_first_token(make, apis):
    idp = apis[1]
    idp.script = {"/token": [{"body": {"access_token": "canary-t", "expires_in": 3600, "home": apis[0].url}}]}
    oauth = OAuth2(
        token_url=f"{idp.url}/token", client_id="app", client_secret="s", flows=("client_credentials",), keep=("home",)
    )
    app = make(tenants(auth=(oauth,)), handlers=[get])
    await app.connections.add("crm/1", client_credentials=True, details={"tenant": "one"})
    await app.enqueue(get, "/x", resource_key="crm/1")
    await app.worker().drain(timeout=LIMIT)
    assert (apis[0].paths, apis[0].sent("authorization")) == (["/v1/x"], ["Bearer canary-t"])
    access = await app.credentials("crm/1")
    assert (access.base_url, access.headers["X-Tenant"]) == (f"{apis[0].url}/v1", "one")


# -- every way to send credentials -------------------------------------------------------------------------------------


async def test_a_key_in_the_url_is_sent_and_shown_nowhere(make, apis, caplog, read_all):
    api = apis[0]
    refused = {"status": 422, "body": {"message": "bad key canary/s e, see https://x.example/?k=canary%2Fs+e"}}
    api.script = {"/bad": [refused]}
    provider = Provider(name="maps", base_url=api.url, auth=(ApiKey(query="k", prefix=""),))
    app = make(provider, handlers=[get, foreign])
    await app.connections.add("maps/1", api_key="canary/s e")
    caplog.set_level(logging.DEBUG)
    good = await app.enqueue(get, "/good?k=old&q=1", resource_key="maps/1")
    bad = await app.enqueue(get, "/bad", resource_key="maps/1")
    abroad = await app.enqueue(get, f"{apis[1].url}/abroad", resource_key="maps/1")
    call = await app.enqueue(foreign, f"{api.url}/call?q=1#part", resource_key="maps/1")
    await app.worker().drain(timeout=LIMIT)
    assert {path: query for path, _, query in api.seen} == {
        "/good": {"k": "canary/s e", "q": "1"}, "/bad": {"k": "canary/s e"},
    }  # fmt: skip
    assert apis[1].seen[0][2] == {}
    assert (await app.jobs.get(good.id)).result == (await app.jobs.get(abroad.id)).result == 200
    assert (await app.jobs.get(call.id)).result["url"] == f"{api.url}/call?q=1&k=canary%2Fs+e#part"
    assert (await app.jobs.get(bad.id)).state == "dead"
    rows = read_all("SELECT last_error FROM {job}")
    for table in ("attempt", "resource", "grant", "connection"):
        rows += read_all(f"SELECT * FROM {{{table}}}")
    shown = caplog.text + str(rows)
    assert "canary/s" not in shown
    assert "canary%2Fs" not in shown


async def test_a_key_that_comes_back_in_the_next_pages_address_is_kept_nowhere(make, apis, read_all):
    api = apis[0]
    stream = Stream("things", request=lambda: PageRequest("/things"), paginator=NextUrl(items="items", url="next"))
    pages = [{"body": {"items": [{"id": 1}], "next": f"{api.url}/things?k=canary%2Dkey&page=2"}}]
    api.script = {"/things": [*pages, {"body": {"items": [{"id": 2}]}}]}
    kept = []

    @handler("sync", retry=SOON)
    async def sync(job: Job[None]) -> None:
        async for page in job.pages(stream):
            async with job.checkpoint(page):
                pass
            kept.extend(str(row) for row in read_all("SELECT * FROM {cursor}"))

    app = make(Provider(name="maps", base_url=api.url, auth=(ApiKey(query="k"),)), handlers=[sync])
    await app.connections.add("maps/1", api_key="canary-key")
    await app.enqueue(sync, resource_key="maps/1")
    await app.worker().drain(timeout=LIMIT)
    assert [query for _, _, query in api.seen] == [{"k": "canary-key"}, {"k": "canary-key", "page": "2"}]
    assert "page=2" in kept[0]
    assert "canary" not in str(kept)


async def test_a_refused_key_in_the_url_gates_the_account(make, apis):
    apis[0].script = {"/x": [{"status": 401}]}
    provider = Provider(name="maps", base_url=apis[0].url, auth=(ApiKey(query="k"),))
    app = make(provider, handlers=[get])
    await app.connections.add("maps/1", api_key="canary-key")
    await app.enqueue(get, "/x", resource_key="maps/1")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.resources.get("maps/1")).auth == "needs_reauth"


async def test_header_keys_and_passwords(make, apis):
    provider = Provider(name="api", base_url=apis[0].url, auth=(ApiKey(header="X-Key", prefix="k:"), Basic(), Bearer()))
    app = make(provider, handlers=[get])
    await app.connections.add("api/1", api_key="canary-key")
    await app.connections.add("api/2", user="who", password="canary-pass")
    for n in (1, 2):
        await app.enqueue(get, f"/{n}", resource_key=f"api/{n}")
    await app.worker().drain(timeout=LIMIT)
    by_path = {path: headers for path, headers, _ in apis[0].seen}
    assert by_path["/1"]["x-key"] == "k:canary-key"
    assert by_path["/2"]["authorization"] == "Basic d2hvOmNhbmFyeS1wYXNz"


# -- what a call says of itself ----------------------------------------------------------------------------------------

DEAR = {"cost": 7, "op": "charge", "body": b"{}"}


@handler("dear", retry=SOON)
async def dear(job: Job[None]) -> dict[str, str]:
    async with job.call("POST", "/charges", **DEAR) as call:
        call.report(200)
    async with job.call("POST", "/search", cost=2, idempotent=True) as read:
        read.report(200)
    async with job.call("POST", "/mine", cost=1, idempotency_key="own", trusted=True) as own:
        own.report(200)
    return {"charge": call.headers["Idempotency-Key"], "own": own.headers["Idempotency-Key"], **read.headers}


@handler("dear.plain", retry=SOON)
def dear_plain(job: SyncJob[None]) -> dict[str, str]:
    with job.call("POST", "/charges", **DEAR) as call:
        call.report(200)
    with job.call("POST", "/search", cost=2, idempotent=True) as read:
        read.report(200)
    with job.call("POST", "/mine", cost=1, idempotency_key="own") as own:
        own.report(200)
    return {"charge": call.headers["Idempotency-Key"], "own": own.headers["Idempotency-Key"], **read.headers}


@pytest.mark.parametrize("kind", [dear, dear_plain])
async def test_a_call_draws_what_it_costs_under_the_key_of_its_name(make, apis, kind, read_all):
    hour = Limit(100, per="1h", burst=100, name="hour")
    shop = Provider(name="shop", base_url=apis[0].url, limits={"account": [hour]}, idempotency=Idempotency())
    app = make(shop, handlers=[kind])
    began = time.time()
    done = await app.enqueue(kind, resource_key="shop/1")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).result == {"charge": derive(str(done.id), "charge"), "own": "own"}
    (row,) = read_all("SELECT tat FROM {rate_limit}")
    assert 10 <= (row["tat"] - began) / hour.interval < 11


# -- through another resource ------------------------------------------------------------------------------------------


def two(apis, **facts):
    """A job's own provider, and another one."""
    return (
        Provider(name="mine", base_url=apis[0].url, auth=(Bearer(),)),
        Provider(name="other", base_url=apis[1].url, auth=(Bearer(),), **facts),
    )


@handler("copy", retry=SOON)
async def copy(job: Job[None]) -> int:
    other = await job.through("other/team")
    found = await job.client.get("/from")
    found.raise_for_status()
    done = await other.client.post("/to", json=found.json())
    done.raise_for_status()
    async with other.call("GET", f"{other.client.base_url}/seen") as call:
        call.report(200)
    assert call.headers == {"Authorization": "Bearer canary-other"}
    return done.status_code


@handler("copy.plain", retry=SOON)
def copy_plain(job: SyncJob[None]) -> int:
    other = job.through("other/team")
    found = job.client.get("/from")
    done = other.client.post("/to", json=found.json())
    done.raise_for_status()
    with other.call("GET", "/seen") as call:
        call.report(200)
    assert call.headers == {"Authorization": "Bearer canary-other"}
    return done.status_code


async def connected(app):
    await app.connections.add("mine/1", token="canary-mine")
    await app.connections.add("other/team", token="canary-other")


async def scheduled_now(app):
    """What waits for a time is due."""
    await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET run_at = :now WHERE state = 'scheduled'", {"now": d.now(c)})
    )


@pytest.mark.parametrize("kind", [copy, copy_plain])
async def test_a_job_sends_through_another_resource_with_its_credentials(make, apis, kind, read_all):
    app = make(*two(apis, limits={"account": [Limit(100, per="1h", name="hour")]}), handlers=[kind])
    await connected(app)
    done = await app.enqueue(kind, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).state == "succeeded"
    assert apis[0].sent("authorization") == ["Bearer canary-mine"]
    assert apis[1].sent("authorization") == ["Bearer canary-other"]
    assert [row["resource_key"] for row in read_all("SELECT * FROM {rate_limit} WHERE tat > 0")] == ["other/team"]


@pytest.mark.parametrize("kind", [copy, copy_plain])
async def test_a_job_waits_for_the_other_resource_and_is_not_run_to_find_out(make, apis, kind):
    app = make(*two(apis), handlers=[kind])
    await connected(app)
    await app.resources.pause("other/team", reason="holiday")
    done = await app.enqueue(kind, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.waiting_for, job.attempts, job.executions) == ("scheduled", "other/team", 0, 1)
    assert (await app.resources.get("mine/1")).blocked_until is None
    for _ in range(2):
        await scheduled_now(app)
        await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.executions) == ("scheduled", 1)
    assert apis[1].seen == []
    await app.resources.resume("other/team")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.executions, job.deferrals) == ("succeeded", 2, 1)


async def test_a_throttle_of_the_other_resource_stops_it_alone(make, apis):
    apis[1].script = {"/to": [{"status": 429, "headers": {"retry-after": "600"}}]}
    app = make(*two(apis), handlers=[copy, get])
    await connected(app)
    done = await app.enqueue(copy, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.waiting_for, job.attempts) == ("scheduled", "other/team", 0)
    assert (await app.resources.get("other/team")).blocked_until is not None
    await app.enqueue(get, "/x", resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    assert apis[0].paths == ["/from", "/x"]


async def test_a_call_through_the_other_resource_fails_as_the_others(make, apis):
    @handler("reported", retry=SOON)
    async def reported(job: Job[None]) -> None:
        other = await job.through("other/team")
        async with other.call("GET", "/x") as call:
            call.report(429, {"retry-after": "600"})
            call.raise_for_failure()

    app = make(*two(apis), handlers=[reported])
    await connected(app)
    done = await app.enqueue(reported, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.waiting_for) == ("scheduled", "other/team")


async def test_names_of_two_resources_are_never_mixed_up(make, apis, read_all):
    """Otherwise one request's answer would clear the other's mark."""
    apis[1].script = {"/make": [{"status": 502}]}

    @handler("twins", retry=Retry(max_attempts=1))
    async def twins(job: Job[None]) -> None:
        other = await job.through("other/team")
        await other.client.post("/make")
        (await job.client.post("/make")).raise_for_status()
        again = await job.through("mine/1")
        (await again.client.post("/make")).raise_for_status()
        raise ValueError("whatever")

    app = make(*two(apis), handlers=[twins])
    await connected(app)
    done = await app.enqueue(twins, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    (row,) = read_all("SELECT sent FROM {job}")
    sent = json.loads(row["sent"]) if isinstance(row["sent"], str) else row["sent"]
    assert list(sent) == ["other/team POST /make #1", "POST /make #2"]  # the last one was answered, and then?
    assert (await app.jobs.get(done.id)).state == "dead"


async def test_why_names_the_other_resource(make, apis):
    app = make(*two(apis), handlers=[copy])
    await connected(app)
    await app.resources.pause("other/team", reason="holiday")
    done = await app.enqueue(copy, resource_key="mine/1")
    await app.worker().drain(timeout=LIMIT)
    assert "It waits for other/team and goes on with it" in str(await app.jobs.why(done.id))


# -- circuits that no claim probes -------------------------------------------------------------------------------------

QUICK = BreakerPolicy(streak=2, first_open=0.01, longest_open=0.02, ramp=0)


async def test_a_circuit_of_a_resource_only_reached_through_is_probed_and_closes(make, apis):
    apis[1].script = {"/to": [{"status": 500}] * 2}
    app = make(*two(apis), handlers=[copy], breakers={"other/team": QUICK, "other": BreakerPolicy(streak=99)})
    await connected(app)
    done = await app.enqueue(copy, resource_key="mine/1", max_attempts=9)
    for _ in range(8):
        await app.worker().drain(timeout=LIMIT)
        await scheduled_now(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"
    assert (await app.resources.get("other/team")).breaker == "closed"
    assert apis[1].paths.count("/to") >= 3


async def test_jobs_that_wait_elsewhere_go_on_one_by_one_while_a_circuit_is_tried(make, apis):
    """Five wait; staging lets one be the probe and puts the others off, in the database."""
    app = make(*two(apis), handlers=[copy], breakers={"other/team": BreakerPolicy(streak=2, first_open=30, ramp=0)})
    await connected(app)
    apis[1].script = {"/to": [{"status": 500}] * 2}
    first = await app.enqueue(copy, resource_key="mine/1", max_attempts=9)
    for _ in range(3):
        await app.worker().drain(timeout=LIMIT)
        await scheduled_now(app)
    await app.worker().drain(timeout=LIMIT)
    assert (await app.resources.get("other/team")).breaker == "open"
    for n in range(4):  # accounts of their own, each connected: they wait for the other resource alone
        await app.connections.add(f"mine/{n + 2}", token="canary-mine")
        await app.enqueue(copy, resource_key=f"mine/{n + 2}")
    await app.worker().drain(timeout=LIMIT)
    before = apis[1].paths.count("/to")
    over = "UPDATE {resource} SET open_until = created_at, revision = revision + 1 WHERE key = 'other/team'"
    await app.database.transaction(lambda c, d: d.run(c, over))
    await scheduled_now(app)
    async with asyncio.timeout(LIMIT):
        while await app.jobs.count(state="succeeded") < 5:
            await app.worker().drain(timeout=LIMIT)
            await asyncio.sleep(0.1)
    assert apis[1].paths.count("/to") == before + 5
    assert (await app.jobs.get(first.id)).state == "succeeded"
    rest = [job for job in await app.jobs.list() if job.id != first.id]
    assert all(job.executions <= 3 for job in rest)


# -- routes ------------------------------------------------------------------------------------------------------------


def routed(api, **facts):
    return Provider(
        name="api", base_url=api.url,
        route=lambda asked: ("search", 5.0) if asked.path == "/search" else ("", 1.0),
        cost=lambda answer: answer.body["cost"] if isinstance(answer.body, dict) and "cost" in answer.body else None,
        **facts,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [get, plain])
async def test_a_routed_request_draws_its_cost_on_the_whole_path(make, apis, read_all, kind):
    limits = {
        "account": [Limit(100, per="1h", name="points")], "account/search": [Limit(50, per="1h", name="search")],
    }  # fmt: skip
    app = make(routed(apis[0], limits=limits), handlers=[kind])
    for path in ("/search", "/other"):  # one after the other: a place that a slow machine reached too late comes back
        await app.enqueue(kind, path, resource_key="api/1")
        await app.worker().drain(timeout=LIMIT)
    spans = {row["name"]: row["tat"] for row in read_all("SELECT name, tat FROM {rate_limit}")}
    assert set(spans) == {"points", "search"}
    drawn = await left(app)
    assert drawn == {"points": pytest.approx(6, abs=0.5), "search": pytest.approx(5, abs=0.5)}


async def left(app):
    """Units drawn and not yet flowed back, by limit, as of the first row's time."""
    from resilient.core.gates.rate_limit import available
    from resilient.store.gates import limits

    def read(c, d):
        found = {}
        states = limits.read(c, d, ["api/1", "api/1/search"])
        now = d.now(c).timestamp()
        for key, by_name in states.items():
            for limit in app.policies.for_key(key, None).limits:
                found[limit.name] = limit.capacity - available(limit, by_name[limit.name], now)
        return found

    return await app.database.transaction(read)


async def test_the_answer_settles_what_the_request_really_cost(make, apis):
    apis[0].script = {"/search": [{"body": {"cost": 45}}]}
    limits = {"account": [Limit(100, per="1000s", burst=100, name="points")]}
    app = make(routed(apis[0], limits=limits), handlers=[get])
    await app.enqueue(get, "/search", resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    assert await left(app) == {"points": pytest.approx(45, abs=0.5)}


async def test_a_throttled_endpoint_leaves_the_account_flowing(make, apis):
    rule = Rule(FailureKind.THROTTLED, status=429, scope=Scope.ENDPOINT, wait=Wait(fallback=600))
    apis[0].script = {"/search": [{"status": 429}]}
    app = make(routed(apis[0], errors=Errors(rules=(rule,))), handlers=[get])
    search = await app.enqueue(get, "/search", resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    again = await app.enqueue(get, "/search", resource_key="api/1")
    await app.enqueue(get, "/other", resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    assert apis[0].paths == ["/search", "/other"]
    for done in (search, again):
        job = await app.jobs.get(done.id)
        assert (job.state, job.waiting_for, job.attempts) == ("scheduled", "api/1/search", 0)
    assert (await app.resources.get("api/1")).blocked_until is None


async def test_the_circuit_of_an_endpoint_is_probed_by_its_requests(make, apis):
    rule = Rule(FailureKind.TRANSIENT, status=500, scope=Scope.ENDPOINT, provider_wide=False)
    apis[0].script = {"/search": [{"status": 500}] * 2}
    app = make(routed(apis[0], errors=Errors(rules=(rule,))), handlers=[get], breakers={"api/1/search": QUICK})
    done = await app.enqueue(get, "/search", resource_key="api/1", max_attempts=9)
    for _ in range(8):
        await app.worker().drain(timeout=LIMIT)
        await scheduled_now(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"
    await app.enqueue(get, "/search", resource_key="api/1")  # the first may have got through just before it opened
    await app.worker().drain(timeout=LIMIT)
    assert (await app.resources.get("api/1/search")).breaker == "closed"
    assert (await app.resources.get("api/1")).breaker == "closed"


async def test_a_route_below_an_undeclared_host_is_never_asked(make, apis):
    def route(asked):
        assert asked.host == "127.0.0.1"
        assert asked.path != "/abroad"
        return "", 1.0

    app = make(Provider(name="api", base_url=apis[0].url, route=route), handlers=[get])
    done = await app.enqueue(get, f"{apis[1].url}/abroad", resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).state == "succeeded"
