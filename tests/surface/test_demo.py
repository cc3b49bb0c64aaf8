"""The whole demo, smaller: real processes, both databases, a worker killed, and an audit that can fail."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psycopg
import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from resilient.surface.demo import accounts, command
from resilient.surface.demo import run as demo_run
from resilient.surface.demo.accounts import Contact
from resilient.surface.demo.run import Options, run
from tests import nursery
from tests.helpers import LIMIT

pytestmark = pytest.mark.slow
TROUBLE = {
    "burst": 5, "endpoint_burst": 5, "wait": 0.5, "down_after": 4, "unavailable": 0.5, "refused": 0.8, "latency": 0.05,
    "people": 20, "sink_away": 1.0, "consent_after": 0.5, "outage": 1.0,
}  # fmt: skip
SHARES = (
    (accounts.HEALTHY, "contacts", 40),
    (accounts.THROTTLED, "contacts", 14),
    (accounts.DOWN, "contacts", 20),
    (accounts.LIMITED, "contacts", 10),
    (accounts.LIMITED, "leads", 9),
    (accounts.REVOKED, "contacts", 12),
    (accounts.UNDECLARED, "contacts", 12),
)


@pytest.fixture
def small(tmp_path):
    """117 contacts, of which one address is impossible and one line is no contact."""
    people = [
        Contact(id=f"{account}-{endpoint}-{n}", account=account, endpoint=endpoint, name="Ann", email=f"a{n}@b.example")
        for n in range(40)
        for account, endpoint, count in SHARES
        if n < count
    ]  # fmt: skip
    people[7].email = "nobody"
    path = accounts.write(tmp_path / "small.csv", people)
    with path.open("a") as file:
        file.write("x1,acme,contacts,,no-name@b.example\n")
    return path


@pytest.fixture
def forked(monkeypatch):
    """Its processes come from one that has imported the engine; `test_an_interrupted_demo_...` starts them as it is."""

    def start(name, *arguments, **streams):
        return nursery.module(f"resilient.surface.demo.{name}", *arguments, stdin=subprocess.PIPE, **streams)

    monkeypatch.setattr(demo_run, "_start", start)


def schemas(url):
    with psycopg.connect(url) as c:
        return {row[0] for row in c.execute("SELECT nspname FROM pg_namespace")}


def test_everything_promised_is_true(small, database_url, backend, forked):
    before = schemas(database_url) if backend == "postgresql" else None
    text = io.StringIO()
    options = Options(csv=small, database=database_url, plain=True, limit=90, on_the_wire=2.0, trouble=TROUBLE)
    assert run(options, Console(file=text)), text.getvalue()
    output = text.getvalue()
    assert "left out: small.csv, line 119: no name" in output
    for line in (
        "was killed with SIGKILL",
        "jobs of a dead worker rescued",
        "circuit opened",
        "is well again",
        "crm/hooli: its access was taken back",
        "the owner of crm/hooli connected it again",
        "Records read in from the accounts, once each: 100 of 100",
        "1 revoked and connected again",
        "one for each contact that was pushed: 116 for 116 contacts",
        "Events at the webhook, one for each row: 116 for 116 rows",
        "Events out of order within an account: 0",
        "crm/globex said: come back later",
        "crm/umbrella/leads said: come back later",
        "Every valid contact was delivered, once each: 116 of 116",
        "Duplicates at the provider: 0",
        "Requests sent during a cooldown: 0",
        "1 dead, 1 refused",
        "Requests refused by crm/vandelay, whose limit nobody declared: at most 10: ",
        "'nobody' is not an e-mail address",
        "Everything that was promised is true",
    ):
        assert line in output, output
    assert re.search(r"[1-9]\d* requests repeated one whose answer was lost; their keys were recognised", output), (
        output
    )
    assert re.search(r"[1-9]\d* answers were 503, then the port was closed", output), output
    assert re.search(r"the webhook was away for [1-9]\d*\.\d s", output), output
    assert "crm/umbrella said" not in output  # one endpoint is limited, the account flows
    assert "FALSE" not in output
    if backend == "postgresql":
        assert schemas(database_url) == before
    else:
        assert [p.name for p in small.parent.iterdir() if "demo" in p.name] == []


def deliver_twice(log):
    """The provider's log as it would be if a contact had been stored under two keys."""
    stored = next(e for line in log.read_text().splitlines() if (e := json.loads(line))["decision"] == "stored")
    with log.open("a") as file:
        file.write(json.dumps(stored | {"key": "another"}) + "\n")


@pytest.mark.proof("test_everything_promised_is_true")
def test_a_false_claim_makes_the_exit_status_1(small, monkeypatch, forked):
    monkeypatch.setattr(demo_run, "Options", partial(Options, trouble=TROUBLE, tamper=deliver_twice, limit=60))
    app = Typer()
    app.command()(command.demo)
    result = CliRunner().invoke(app, ["--csv", str(small), "--plain"])
    assert result.exit_code == 1, result.output
    assert "FALSE  Duplicates at the provider: 1; stored twice: " in result.output
    assert "claims are FALSE" in result.output


def test_a_demo_that_cannot_run_says_why_with_status_2(tmp_path):
    app = Typer()
    app.command()(command.demo)
    result = CliRunner().invoke(app, ["--csv", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "none.csv: No such file" in result.output


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(one, marks=pytest.mark.proof("SIGINT")) for one in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_an_interrupted_demo_leaves_no_process_behind(small, number):
    demo = subprocess.Popen(
        [sys.executable, "-m", "resilient.surface.cli", "demo", "--csv", str(small), "--plain"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(small.parent)},
    )  # fmt: skip
    with demo:
        for line in demo.stdout:
            if b"of 1" in line:
                break
        own = children(demo.pid)
        assert len(own) == 3
        demo.send_signal(number)
        assert demo.wait(LIMIT) != 0
    deadline = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in own) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in own if Path(f"/proc/{pid}").exists()] == []
    assert number == signal.SIGKILL or list(small.parent.glob("resilient-demo-*")) == []
