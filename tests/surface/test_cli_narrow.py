"""What people read on a terminal of 80 columns, and what the shell completes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Kind, Resilient, handler
from resilient.core.sync.stream import Cursor
from resilient.store import sync as cursors
from resilient.store.inspect import workers
from resilient.surface.cli.exits import shortened
from tests import nursery
from tests.helpers import LIMIT


@pytest.fixture
def terminal(database_url):
    """The text of a command on a terminal of 80 columns, as a person has it."""

    def read(*arguments):
        near, far = pty.openpty()
        environ = {**os.environ, "RESILIENT_DATABASE": database_url, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
        environ.pop("RESILIENT_APP", None)
        process = nursery.module("resilient.surface.cli", *arguments, stdout=far, stderr=far, env=environ)
        os.close(far)
        text = b""
        while True:
            try:
                piece = os.read(near, 65536)
            except OSError:  # Linux says the end so
                break
            if not piece:
                break
            text += piece
        os.close(near)
        assert process.wait(LIMIT) == 0, text
        return text.decode().replace("\r\n", "\n").replace("\x1b[0m", "").replace("\x1b[1m", "").replace("\x1b[2m", "")

    return read


def test_sync_status_names_the_whole_account(terminal, database):
    account, part = "salesforce/customer-of-the-northern-branch-0001", "object=Opportunity, since=2030-01-01"
    cursor = Cursor(pass_id=1, full_pass=1, completed_at=datetime.now(UTC) - timedelta(minutes=3), pages=4, records=7)
    database.transaction_sync(
        cursors.write_if_unmoved, (account, "salesforce.opportunities", part), cursor, None, datetime.now(UTC)
    )
    out = terminal("sync", "status")
    sentence = " ".join(out.split())
    assert account in sentence
    assert part in sentence
    assert max(map(len, out.splitlines())) <= 81


async def test_a_job_is_shown_with_its_own_frames(terminal, database_url):
    def body_of(answer):
        return answer.json()

    @handler("a.run")
    async def run(job) -> None:
        import httpx

        body_of(httpx.Response(200, content=b"{"))

    async with Resilient(database_url, handlers=[run]) as app:
        job = await app.enqueue(run, {"text": "word " * 60}, resource_key="a/b", max_attempts=1)
        await app.worker().drain()
    out = terminal("jobs", "show", str(job.id))
    traceback = out.partition("Traceback of execution 1\n")[2]
    assert "in body_of" in traceback
    assert "return answer.json()" in traceback
    assert "frames of " in traceback
    assert "JSONDecodeError" in traceback
    assert "decoder.py" not in traceback
    assert "resilient/engine" not in traceback
    assert len(traceback.splitlines()) < 14
    assert max(map(len, out.partition("Traceback")[0].splitlines())) <= 81


def test_a_traceback_that_is_all_libraries_says_where():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/httpcore/a.py", line 1, in a\n    a()\n    ^^^\n'
        '  File "/venv/lib/python3.11/site-packages/httpx/b.py", line 2, in b\n    raise Error\n'
        "httpx.Error: no\n\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/resilient/engine/calls.py", line 3, in c\n    c()\n'
        '  File "/usr/lib/python3.11/asyncio/tasks.py", line 3, in d\n    d()\n'
        '  File "/srv/shop/jobs.py", line 4, in push\n    await client.get("/x")\n          ^^^^\n'
        "ValueError: no\n"
    )
    assert list(shortened(text)) == [
        "Traceback (most recent call last):",
        "  ... 1 frame of httpcore",
        '  File "/venv/lib/python3.11/site-packages/httpx/b.py", line 2, in b',
        "    raise Error",
        "httpx.Error: no",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "  ... 2 frames of resilient, Python",
        '  File "/srv/shop/jobs.py", line 4, in push',
        '    await client.get("/x")',
        "          ^^^^",
        "ValueError: no",
    ]
    assert list(shortened("")) == []


def test_status_tells_of_kinds_that_no_worker_has(terminal, database, database_url):
    app = Resilient(database_url, upgrade=False)
    for kind in ("mail.send", "mail.send", "page.fetch"):
        app.sync.enqueue(Kind(kind), None, resource_key="a/b")

    def beat(c, d, *, kind):
        workers.beat(c, d, workers.Beat(f"w-{kind}", "h", 1, [kind], 50, 3, "1", stopping=False), d.now(c))

    assert "none is running" in terminal("status")
    database.transaction_sync(beat, kind="page.fetch")
    out = " ".join(terminal("status").split())
    assert "No worker: ready jobs of kinds that no running worker has: 2 mail.send. Start one with" in out
    assert "page.fetch" not in out
    database.transaction_sync(beat, kind="mail.send")
    assert "No worker" not in terminal("status")


def test_status_tells_of_accounts_that_no_worker_serves(terminal, database, database_url):
    app = Resilient(database_url, upgrade=False)
    for key in ("crm/1", "crm/1/search", "github/1"):
        job = app.sync.enqueue(Kind("mail.send"), None, resource_key=key)
    crm = app.sync.enqueue(Kind("mail.send"), None, resource_key="crm/2")

    def beat(c, d, *patterns):
        row = workers.Beat(" ".join(patterns), "h", 1, ["mail.send"], 50, 3, "1", stopping=False, resources=[*patterns])
        workers.beat(c, d, row, d.now(c))

    database.transaction_sync(beat, "github/*", "hubspot")
    out = " ".join(terminal("status").split())
    assert "ready jobs of resources that no running worker serves: 2 of crm/1, 1 of crm/2. Start one" in out
    assert "No running worker that has its kind serves crm/2" in " ".join(terminal("jobs", "why", str(crm.id)).split())
    assert "No running worker" not in terminal("jobs", "why", str(job.id))
    assert "crm/1, crm/2 are waiting" in " ".join(terminal("doctor").split())
    database.transaction_sync(beat)
    assert "No worker" not in terminal("status")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("resilient jo", {"jobs"}),
        ("resilient jobs re", {"retry"}),
        ("resilient jobs list --sta", {"--state"}),
        ("resilient connections ", {"add", "list", "revoke", "show"}),
    ],
)
def test_the_shell_completes(line, expected):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_RESILIENT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", "from resilient.surface.cli import main; main()"], env={**os.environ, **words},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert expected <= set(done.stdout.split()), done.stderr
