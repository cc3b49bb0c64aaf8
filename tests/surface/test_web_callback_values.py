"""What a callback says of the account came through a browser: it fits its place, or the callback is refused."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from resilient import ConnectionNotFound, ConsentRefused, InvalidInput, Job, Resilient, Retry, handler, web
from resilient.core.base.bounds import CALLBACK_CODE, CALLBACK_VALUE
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT
from tests.serving import serving

MOST = CALLBACK_VALUE.value
NOWHERE = ["\x1b[2J<script>", "1\r\nX-Evil: 1", "9" * (MOST + 1), "9" * 60_000, "\u202e1", "a\x00", "\ud800"]
NO_HEADER = [" 1", "1 ", "\u0416"]
NO_PART = ["a/b", "../../admin", "a?x=1", "a#", "@evil", "..", "%2e%2e", "12;x", " ", "\u00e9", "{a}"]
SEEN = []


@handler("push", retry=Retry(max_attempts=1))
async def push(job: Job[None]) -> None:
    answer = await job.client.get("/x")
    SEEN.append(answer.request.url.path)


@pytest.fixture
async def make(database_url, idp):
    made = []
    SEEN.clear()

    async def make_(path="", headers=None):
        facts = idp.provider(redirect_uri="")
        facts = replace(
            facts, base_url=f"{idp.url}{path}", headers=headers or {},
            auth=(replace(facts.auth[0], keep_callback=("realmId",)), *facts.auth[1:]),
        )  # fmt: skip
        app = Resilient(database_url, handlers=[push], providers=[facts], secrets=[new_key()])
        made.append(app)
        await app.ready()
        return app

    yield make_
    for app in made:
        await app.close()


async def begin(app, **options):
    """The parameters that a person brings back."""
    url = await app.connections.authorize_url("idp/ann", redirect_uri="http://127.0.0.1:9/cb", bound_to="s", **options)
    async with httpx.AsyncClient(trust_env=False) as client:
        back = (await client.get(url)).headers["location"]
    return {name: values[0] for name, values in parse_qs(urlsplit(back).query).items()}


async def complete(app, realm):
    return await app.connections.complete({**await begin(app), "realmId": realm}, bound_to="s")


@pytest.mark.parametrize(
    ("path", "headers", "values"),
    [
        ("", {}, NOWHERE),
        ("", {"X-Realm": "{realmId}"}, [*NOWHERE, *NO_HEADER]),
        ("/v3/{realmId}", {}, [*NOWHERE, *NO_PART]),
    ],
)
async def test_a_value_that_does_not_fit_its_place_connects_nothing(make, idp, path, headers, values):
    app = await make(path, headers)
    for value in values:
        with pytest.raises(ConsentRefused, match="idp/ann: the callback") as refused:
            await complete(app, value)
        assert value.strip() not in str(refused.value) or not value.strip()
        assert "start again" in str(refused.value)
        with pytest.raises(ConnectionNotFound):
            await app.connections.get("idp/ann")
    assert idp.asked == []  # nor was a code exchanged


@pytest.mark.parametrize("code", ["9" * (CALLBACK_CODE.value + 1), "a\x00b", "a\r\nb", "\u0416", "\ud800"])
async def test_what_can_be_no_code_is_not_exchanged(make, idp, code):
    app = await make()
    with pytest.raises(ConsentRefused, match="code is none: start again") as refused:
        await app.connections.complete({**await begin(app), "code": code, "realmId": "1"}, bound_to="s")
    assert code not in str(refused.value)
    assert idp.asked == []


@pytest.mark.parametrize(
    ("path", "headers", "value", "seen"),
    [
        ("", {}, "\u0416 a/b?" + "9" * (MOST - 7), [None, "/x"]),
        ("", {"X-Realm": "{realmId}"}, "caf 1/2", [b"caf 1/2", "/x"]),
        ("/v3/{realmId}", {"X-Realm": "{realmId}"}, "9130-x.7", [b"9130-x.7", "/v3/9130-x.7/x"]),
    ],
)
async def test_a_value_that_fits_is_kept_and_sent(make, idp, path, headers, value, seen):
    inner = idp.api

    async def api(sent, send):
        SEEN.append(sent.get(b"x-realm"))
        await inner(sent, send)

    idp.api = api
    app = await make(path, headers)
    assert (await complete(app, value)).details == {"realmId": value}
    await app.enqueue(push, resource_key="idp/ann")
    await app.worker().drain(timeout=LIMIT)
    assert seen == SEEN


async def test_what_the_program_gave_itself_is_no_fault_of_the_callback(make):
    app = await make("/{shop}/{realmId}")
    back = await begin(app, details={"shop": "a/b"})
    with pytest.raises(InvalidInput, match="cannot be the shop"):
        await app.connections.complete({**back, "realmId": "7"}, bound_to="s")


async def test_the_route_answers_400_without_a_traceback(make, caplog):
    app = await make("/v3/{realmId}")

    async def late(scope, receive, send):
        await site(scope, receive, send)

    async with serving(late) as url:
        options = {"caller": lambda _: "ann", "account": lambda who, provider, _: f"{provider}/{who}"}
        routes = web.connect_routes(app, base_url=f"{url}/connect", returns=["/settings"], **options)
        site = Starlette(routes=[Mount("/connect", app=routes)])
        async with httpx.AsyncClient(base_url=url, trust_env=False) as ann:
            for value, status in (("a/b", 400), ("\x1b[2J<script>", 400), ("9" * 5_000, 400), ("ok1", 303)):
                sent = await ann.get("/connect/idp/start")
                back = (await ann.get(sent.headers["location"])).headers["location"]
                answer = await ann.get(back, params={**dict(httpx.URL(back).params), "realmId": value})
                assert (answer.status_code, value in answer.text) == (status, False)
    assert "Traceback" not in caplog.text
    assert (await app.connections.get("idp/ann")).details == {"realmId": "ok1"}
