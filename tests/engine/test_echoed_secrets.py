"""After a job met a server that echoes its token and tries the terminal: the database, the log and the screen."""

import logging
import sqlite3

import pytest
from starlette.responses import JSONResponse

from resilient import Bearer, Errors, Job, Provider, Resilient, Retry, handler
from resilient.surface.cli.output import Output, Row
from resilient.testing import new_key
from tests.serving import Server

ECHOED = Errors(code=("code",), message=("message",))
CANARY = "canary-7d1e-token"
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b\u202e\nINFO forged line"


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


@pytest.mark.parametrize("work", [plain_status, server_error, graphql, sdk_that_shows_everything, by_call])
async def test_nothing_is_left_of_the_token(work, tmp_path, sqlite_url, caplog):
    caplog.set_level(logging.DEBUG, logger="resilient")
    caplog.set_level(logging.DEBUG, logger="httpx")

    @handler("h", retry=Retry(max_attempts=1))
    async def h(job: Job[None]) -> None:
        await work(job)

    with Server(echo) as url:
        provider = Provider(name="api", base_url=url, auth=(Bearer(),), errors=ECHOED)
        app = Resilient(sqlite_url, handlers=[h], providers=[provider], upgrade=False, secrets=[new_key()])
        await app.connections.add("api/one", token=CANARY)
        done = await app.enqueue(h, resource_key="api/one")
        await app.worker().drain()
        job = await app.jobs.get(done.id)
        assert job.last_error
        await app.close()
    with sqlite3.connect(app.database.file) as database:
        dump = "\n".join(database.iterdump())
    log = "\n".join(record.getMessage() for record in caplog.records)
    for text in (dump, log):
        assert CANARY not in text
        assert "\x1b" not in text
        assert "\x9b" not in text
        assert "\u202e" not in text
    assert "\n" not in (job.last_error_code or "")
    assert not any(line.startswith("INFO forged") for line in log.splitlines())


def test_rows_that_somebody_wrote_by_hand_do_nothing_to_a_terminal(capsys):
    out = Output()
    out.say(f"job {EVIL}")
    out.table(("a", "b"), [Row(EVIL, EVIL, remark=EVIL)])
    out.fields([("error", EVIL)])
    out.paragraph(EVIL)
    out.error(EVIL)
    out.json({"error": EVIL})
    for text in capsys.readouterr():
        assert not set("\x1b\x07\x9b\u202e") & set(text)
