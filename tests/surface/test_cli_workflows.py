"""``resilient workflows``, and what enqueue, list and why say about jobs that wait for others."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import textwrap

import pytest

from resilient.surface.cli import main
from tests.helpers import LIMIT

PROGRAM = """
    from resilient import Job, Resilient, handler
    from resilient.core.base.errors import Permanent

    @handler("charge")
    async def charge(job: Job[int]) -> str:
        return "paid"

    @handler("ship")
    async def ship(job: Job[int]) -> None:
        raise Permanent("no such street")

    @handler("refund")
    async def refund(job: Job[int]) -> None:
        if job.payload == 13:
            raise Permanent("refused")

    app = Resilient({url!r}, handlers=[charge, ship, refund])
"""


@pytest.fixture
def program(tmp_path, monkeypatch, database_url):
    (tmp_path / "chain.py").write_text(textwrap.dedent(PROGRAM).format(url=database_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("RESILIENT_APP", "chain:app")
    monkeypatch.delenv("RESILIENT_DATABASE", raising=False)
    yield
    sys.modules.pop("chain", None)


@pytest.fixture
def run(capsys, program):
    def call(*arguments, status=0):
        sys.modules.pop("chain", None)
        assert main(list(map(str, arguments))) == status
        return capsys.readouterr().out

    return call


def begin(*payloads, drain=True):
    """Begin workflows in a process of their own, so to speak; their ids."""
    sys.modules.pop("chain", None)
    chain = importlib.import_module("chain")

    async def go():
        ids = []
        for payload in payloads:
            async with chain.app.workflow("order", resource_key="shop/1") as wf:
                wf.step(chain.ship, payload, after=wf.step(chain.charge, payload, undo=chain.refund))
            ids.append(wf.id)
        if drain:
            await chain.app.worker().drain(timeout=LIMIT)
        await chain.app.close()
        return ids

    return asyncio.run(go())


def test_workflows(run):
    assert run("workflows", "list") == "There are no workflows.\n"
    id_, other = begin(7, 13)
    listed = run("workflows", "list")
    assert str(id_) in listed
    assert "undone" in listed
    assert "step ship is dead" in listed
    shown = run("workflows", "show", id_)
    for words in ("reason", "charge", "succeeded", "dead", "no such street", "refund"):
        assert words in shown
    document = json.loads(run("workflows", "show", other, "--json"))
    assert (document["state"], document["steps"][0]["undo_state"]) == ("stuck", "dead")
    assert "refused" in run("workflows", "show", other)
    stuck = json.loads(run("workflows", "list", "--state", "stuck", "--json"))
    assert [w["id"] for w in stuck["workflows"]] == [str(other)]
    assert run("workflows", "list", "--name", "other") == "No workflow fits.\n"
    assert "1 left alone: their workflow turned around" in run(
        "jobs", "retry", document["steps"][1]["job_id"], status=1
    )
    assert "There may be more" in run("workflows", "list", "--limit", "1")


def test_cancel(run):
    (id_,) = begin(7, drain=False)
    assert run("workflows", "cancel", id_, "--yes") == f"Workflow {id_} is undoing.\n"
    (done,) = begin(7)
    assert run("workflows", "cancel", done, "--yes", status=1) == f"Workflow {done} is undone already.\n"
    run("workflows", "show", "0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55", status=3)


def test_enqueue_behind_others(run):
    first = run("enqueue", "charge", "1", "-r", "shop/1", "--ordering-key", "k").strip()
    second = run("enqueue", "charge", "2", "-r", "shop/1", "--ordering-key", "k").strip()
    third = run(
        "enqueue", "ship", "3", "-r", "shop/1", "--after", first, "--after", second, "--on-dead", "wait"
    ).strip()
    assert f"after job {first}" in run("jobs", "why", second)
    shown = run("jobs", "show", third)
    assert f"It waits for job {first}" in shown
    assert "k (number 2)" in run("jobs", "show", second)
    listed = json.loads(run("jobs", "list", "--ordering-key", "k", "--json"))
    assert {job["id"] for job in listed["jobs"]} == {first, second}
