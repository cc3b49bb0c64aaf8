"""After a job met a server that echoes its token and tries the terminal: database, log, alerts and screen."""

import base64
import hashlib
import hmac
import json
import logging
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs
from uuid import uuid4

import pytest
from starlette.responses import JSONResponse

from resilient import (
    Alerting,
    Basic,
    Bearer,
    Delivery,
    Errors,
    Inbound,
    Job,
    OAuth2,
    Provider,
    Resilient,
    Retry,
    Signature,
    Webhook,
    WebhookEvent,
    handler,
)
from resilient.surface.cli.output import Output, Row
from resilient.testing import new_key
from tests.dump import dump
from tests.serving import Server

ECHOED = Errors(code=("code",), message=("message",))
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b\u202e\nINFO forged line"
OBEYED = ("\x1b", "\x07", "\x9b", "\u202e")


@pytest.fixture
def canary():
    """Each test's own: the log of changes of a server is shared."""
    return f"canary-{uuid4().hex}"


@pytest.fixture
def log(caplog):
    """The log as a file has it, that of libraries too."""
    caplog.set_level(logging.DEBUG)
    for quiet in ("uvicorn", "asyncio", "aiosqlite"):
        caplog.set_level(logging.WARNING, logger=quiet)
    line = logging.Formatter("%(levelname)s:%(name)s:%(message)s")
    return lambda: "\n".join(line.format(record) for record in caplog.records)


def check(*texts, secrets, obeyed=OBEYED):
    for text in texts:
        for secret in secrets:
            for form in (secret, base64.b64encode(secret.encode()).decode().rstrip("="), secret.encode().hex()):
                assert form not in text
        assert not [one for one in obeyed if one in text]


def check_database(url, *secrets, obeyed=OBEYED):
    rows, files = dump(url)
    assert "api" in rows
    check(rows, secrets=secrets, obeyed=obeyed)
    check(files, secrets=secrets, obeyed=())


def check_lines(log):
    """Every line of the log is one of a logger, or of a traceback below it."""
    for line in log.splitlines():
        assert line.startswith(("DEBUG:", "INFO:", "WARNING:", "ERROR:", "    ")), line


async def echo(scope, receive, send):
    said = dict(scope["headers"]).get(b"authorization", b"").decode()
    where = scope["path"]
    headers = {"x-code": said}
    body = {"code": f"{said}{EVIL}", "message": f"you sent {said} {EVIL}", "errors": [{"message": said, "type": said}]}
    await JSONResponse(body, {"/ok": 200, "/down": 500}.get(where, 422), headers)(scope, receive, send)


async def plain_status(job):
    (await job.client.get("/refused")).raise_for_status()


async def server_error(job):
    (await job.client.get("/down")).raise_for_status()


async def graphql(job):
    await job.client.graphql("{ me }", url="/ok")


async def sdk_that_shows_everything(job):
    answer = await job.client.get("/refused")
    raise RuntimeError(f"API error {answer.json()}")


async def by_call(job):
    async with job.call("GET", "/refused") as call:
        call.report(422, {}, {"code": call.headers["Authorization"], "message": call.headers["Authorization"] + EVIL})
    call.raise_for_failure()


@pytest.mark.parametrize("way", ["token", "basic"])
@pytest.mark.parametrize("work", [plain_status, server_error, graphql, sdk_that_shows_everything, by_call])
async def test_nothing_is_left_of_the_token(work, way, canary, database_url, log):
    notices = []

    @handler("h", retry=Retry(max_attempts=1))
    async def h(job: Job[None]) -> None:
        await work(job)

    with Server(echo) as url:
        provider = Provider(name="api", base_url=url, auth=(Bearer(), Basic()), errors=ECHOED)
        app = Resilient(
            database_url, handlers=[h], providers=[provider], upgrade=False, secrets=[new_key()],
            alerts=Alerting(sinks=[notices.append]),
        )  # fmt: skip
        given = {"token": canary} if way == "token" else {"user": f"user-{canary}", "password": canary}
        await app.connections.add("api/one", **given)
        done = await app.enqueue(h, resource_key="api/one")
        await app.worker().drain()
        job = await app.jobs.get(done.id)
        assert job.last_error
        await app.close()
    told = "\n".join(one.text for one in notices)
    assert told
    check_database(database_url, canary)
    check(log(), told, secrets=[canary])
    check_lines(log())
    assert "\n" not in (job.last_error_code or "")
    assert "\n" not in told


class Stranger:
    """A token endpoint that says back everything it was told, and what a terminal obeys."""

    def __init__(self):
        self.heard = set()

    async def __call__(self, scope, receive, send):
        body = (await receive()).get("body", b"")
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        self.heard |= form.keys()
        said = " ".join([*form.values(), *(value.decode() for _, value in scope["headers"])])
        answer = {"error": said + EVIL, "error_description": said + EVIL, "message": said + EVIL}
        await JSONResponse(answer, 400)(scope, receive, send)


async def test_nothing_is_left_of_what_a_token_endpoint_was_told(canary, database_url, log):
    secrets = [f"{canary}-{what}" for what in ("access", "refresh", "client", "code")]
    stranger, notices = Stranger(), []
    shown = []

    @handler("h", retry=Retry(max_attempts=1))
    async def h(job: Job[None]) -> None:
        (await job.client.get("/me")).raise_for_status()

    with Server(stranger) as url:
        oauth = OAuth2(
            authorize_url=f"{url}/authorize", token_url=f"{url}/token", client_id="app", client_secret=secrets[2]
        )
        app = Resilient(
            database_url, handlers=[h], providers=[Provider(name="api", base_url=url, auth=(oauth,))], upgrade=False,
            secrets=[new_key()], alerts=Alerting(sinks=[notices.append]),
        )  # fmt: skip
        ended = datetime.now(UTC) - timedelta(seconds=5)
        await app.connections.import_("api/one", access_token=secrets[0], refresh_token=secrets[1], expires_at=ended)
        await app.enqueue(h, resource_key="api/one")
        await app.worker().drain()
        for parameters in ({"code": secrets[3]}, {"error": EVIL, "error_description": EVIL + secrets[3]}):
            at = await app.connections.authorize_url("api/two", redirect_uri="http://127.0.0.1/callback")
            state = parse_qs(at.partition("?")[2])["state"][0]
            with pytest.raises(Exception, match="api") as caught:
                await app.connections.complete({"state": state, **parameters})
            shown.append(str(caught.value))
        await app.close()
    assert {"refresh_token", "client_secret"} <= stranger.heard
    check_database(database_url, *secrets, state)
    check(log(), *shown, *(one.text for one in notices), secrets=[*secrets, state])
    check_lines(log())


async def test_nothing_is_left_of_what_secures_a_webhook(canary, database_url, log):
    """Genuine deliveries whose every word is hostile, and forged ones that guess at the secret."""

    @handler("hooked", retry=Retry(max_attempts=1))
    async def hooked(job: Job[WebhookEvent]) -> None:
        raise ValueError(f"{job.payload}")

    facts = Provider(
        name="api", base_url="https://api.example", auth=(Bearer(),),
        webhook=Webhook(signatures=(Signature(header="x-sign"),), delivery="x-id", event="x-event"),
    )  # fmt: skip
    app = Resilient(
        database_url, handlers=[hooked], providers=[facts], upgrade=False, secrets=[new_key()],
        webhooks=[Inbound(provider="api", secrets=[canary], jobs=hooked)],
    )  # fmt: skip
    body = json.dumps({"text": EVIL, EVIL: 1}).encode()
    sign = hmac.new(canary.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Sign": sign, "X-Event": EVIL, "X-Id": EVIL, "X-Other": EVIL}
    for delivery in (
        Delivery(headers, body, "https://our.example/webhooks"),
        Delivery(headers | {"X-Sign": EVIL}, body, f"https://our.example/webhooks?{EVIL}"),
        Delivery(headers | {"X-Sign": canary}, EVIL.encode("utf-8", "surrogatepass"), EVIL),
    ):
        await app.webhooks.receive("api", delivery)
        await app.webhooks.receive("api", delivery, account=EVIL)
    await app.worker().drain()
    assert await app.jobs.count(state="dead") == 1
    await app.close()
    check_database(database_url, canary, obeyed=())  # a payload is what was sent
    check(log(), secrets=[canary])
    check_lines(log())


def test_rows_that_somebody_wrote_by_hand_do_nothing_to_a_terminal(capsys):
    out = Output()
    out.say(f"job {EVIL}")
    out.table(("a", "b"), [Row(EVIL, EVIL, remark=EVIL)])
    out.fields([("error", EVIL)])
    out.paragraph(EVIL)
    out.error(EVIL)
    out.result(EVIL)
    out.remark(EVIL)
    out.json({"error": EVIL})
    for text in capsys.readouterr():
        assert not set("\x1b\x07\x9b\u202e") & set(text)
