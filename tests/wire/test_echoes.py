"""Answers that echo what a request carried: nothing that is kept, shown or logged of them holds it."""

import base64
import json
import logging
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, quote_plus

import pytest
from starlette.responses import JSONResponse

from resilient import Errors, OAuth2, RequestFacts
from resilient.core.base.frames import Hidden
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.requests.call import AsyncCall
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.redact import notations
from resilient.wire.requests.request_log import RequestLog
from tests.serving import serving

TOKEN = "canary+Token/123="
USER, PASSWORD = "canary-user", "canary:pass"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
ECHOES = [TOKEN, quote(TOKEN, safe=""), quote_plus(TOKEN), f"Bearer {TOKEN}"]


def test_the_forms_of_basic():
    assert {BASIC, f"{USER}:{PASSWORD}", USER, PASSWORD} <= notations([f"Basic {BASIC}"])
    assert repr(Hidden(["canary"])) == "<1 hidden>"


def test_of_many_tokens_the_newest_is_kept_secret(hooks):
    """Whatever its length: a job may run for days, and its token be refreshed every hour."""
    request_log = RequestLog(hooks)
    request = RequestFacts("GET", "", "", "")
    for number in range(50):
        request_log.keep_secret(Permit(request, headers={"Authorization": f"Bearer {'long' * 20}{number}"}))
    request_log.keep_secret(Permit(request, headers={"Authorization": "Bearer canary"}))
    assert {"canary", "Bearer canary", f"{'long' * 20}49"} <= set(request_log.secrets)
    assert len(request_log.secrets) <= 64


@pytest.mark.parametrize("scheme", ["bearer", "basic"])
@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
async def test_codes_and_messages(client, hooks, provider, status, scheme, caplog):
    caplog.set_level(logging.DEBUG)
    hooks.credentials = {"Authorization": f"Bearer {TOKEN}" if scheme == "bearer" else f"Basic {BASIC}"}
    for echo in ECHOES if scheme == "bearer" else [BASIC, USER, PASSWORD, f"{USER}:{PASSWORD}"]:
        body = json.dumps({"error": {"code": f"bad_{echo}", "message": f"no: {echo}!"}, "errors": [{"type": echo}]})
        api = client(provider(errors=Errors(code=("error.code",))))
        answer = await api.get("/x", params={"status": status, "body": body})
        failure = answer.extensions["resilient"]
        kept = [str(failure), repr(failure)]
        if failure is not None:
            with pytest.raises(Exception, match="answered") as caught:
                answer.raise_for_status()
            kept += [str(caught.value), str(caught.value.bare_message), repr(caught.value)]
        assert echo not in "".join(kept)
    assert "canary" not in "".join(record.getMessage() for record in caplog.records if "httpx" in record.name)


@pytest.mark.parametrize("before", [0, 1, 60, 88, 93, 94])
async def test_half_a_token_at_the_end_of_a_code_that_is_cut(client, hooks, provider, before):
    """A code has a hundred characters: of a longer token its beginning would be left."""
    token = "canary-" + "0123456789" * 40
    hooks.credentials = {"Authorization": f"Bearer {token}"}
    said = {"code": "-" * before + token}
    failure = (await client(provider(errors=Errors(code=("code",)))).get(
        "/x", params={"status": 400, "body": json.dumps(said)})
    ).extensions["resilient"]  # fmt: skip
    assert failure.code == "-" * before + "[hidden]"
    said = {"errors": [{"message": "no", "extensions": {"code": "-" * before + token}}]}
    with pytest.raises(Exception, match="answered 200") as caught:
        await client(provider()).graphql("{ me }", url=f"/graphql?body={quote(json.dumps(said))}")
    assert caught.value.failure.code == "-" * before + "[hidden]"


def test_a_password_with_what_json_and_a_single_line_write_otherwise():
    word = 'canary  "x"\\y'
    found = notations([f"Basic {base64.b64encode(f'user:{word}'.encode()).decode()}"])
    assert {word, json.dumps(word)[1:-1], " ".join(word.split())} <= found


async def test_graphql_errors_in_a_success(client, hooks, provider):
    hooks.credentials = {"Authorization": f"Bearer {TOKEN}"}
    said = {"errors": [{"message": f"token {TOKEN} is unknown", "extensions": {"code": TOKEN}}]}
    api = client(provider())
    with pytest.raises(Exception, match="answered 200") as caught:
        await api.graphql("{ me }", url=f"/graphql?body={quote(json.dumps(said))}")
    assert "canary" not in str(caught.value) + repr(caught.value.failure) + str(caught.value.bare_message)


async def test_what_a_vendors_sdk_reports(hooks, provider):
    hooks.credentials = {"Authorization": f"Bearer {TOKEN}"}
    request_log = RequestLog(hooks, provider(errors=Errors(code=("code",))))
    async with AsyncCall(request_log, "GET", f"{request_log.base_url}/x") as call:
        call.report(400, {}, {"code": TOKEN, "message": f"{TOKEN}?"})
    with pytest.raises(Exception, match="answered 400") as caught:
        call.raise_for_failure()
    assert (call.failure.code, caught.value.failure.code) == ("[hidden]", "[hidden]")
    assert "canary" not in str(caught.value) + repr(caught.value.failure)


@pytest.mark.parametrize("way", ["post", "basic"])
async def test_token_endpoints_that_echo_the_form(way):
    echoed = []

    async def app(scope, receive, send):
        form = dict(parse_qsl((await receive())["body"].decode()))
        secret = [*form.values(), "canary-client-secret"][len(echoed) % (len(form) + 1)]
        echoed.append(secret)
        await JSONResponse({"error": f"bad {secret}", "error_description": secret}, 400)(scope, receive, send)

    token = TokenClient()
    async with serving(app) as url:
        oauth = OAuth2(
            token_url=f"{url}/token", client_id="canary-client", client_secret="canary-client-secret", client_auth=way
        )
        for _ in range(8):
            answer = await token.refresh(oauth, "canary-refresh", datetime.now(UTC))
            assert "canary" not in repr(answer)
    assert "canary-refresh" in echoed
    await token.aclose()
