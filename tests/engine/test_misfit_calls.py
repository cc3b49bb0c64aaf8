"""Calls with an argument of a wrong but likely type: an error that says what to pass, and nothing is written."""

from __future__ import annotations

import pytest

from resilient import InvalidInput, Job, Resilient, handler


@handler("contact.push")
async def push(job: Job[dict]) -> None: ...


@pytest.fixture
async def app(tmp_path):
    async with Resilient(f"sqlite:///{tmp_path}/app.db", handlers=[push]) as app:
        yield app


async def test_a_step_says_what_it_takes(app):
    for words, text in (
        ({"undo": "contact.push"}, "wf.step(undo=...) takes Kind or None, not text"),
        ({"after": "first"}, "wf.step(after=...) takes Step or a list of Step, not text"),
        ({"after": ["first"]}, "wf.step(after=...) takes at [0] Step, not text"),
        ({"name": 7}, "wf.step(name=...) takes text or None, not an int"),
    ):
        with pytest.raises(InvalidInput) as error:
            async with app.workflow("copy", resource_key="crm/acct-7") as wf:
                wf.step(push, {}, **words)
        assert str(error.value) == text
    assert await app.workflows.list() == []


CALLS = [
    (lambda app: app.enqueue(push, {}, resource_key=["crm/a"]), "enqueue(resource_key=...) takes text, not a list"),
    (lambda app: app.enqueue_many(push, None, resource_key="crm/a"),
     "enqueue_many(payloads=...) takes a list, not None"),
    (lambda app: app.schedules.pause(["daily"]), "app.schedules.pause(name=...) takes text, not a list"),
    (lambda app: app.connections.list(limit=[10]), "app.connections.list(limit=...) takes a whole number, not a list"),
    (lambda app: app.streams.reset(["issues"], "crm/*"),
     "app.streams.reset(stream=...) takes Stream or text, not a list"),
    (lambda app: app.resources.pause("crm/a", reason=["x"]),
     "app.resources.pause(reason=...) takes text or None, not a list"),
    (lambda app: app.credentials({"a": 1}), "credentials(key=...) takes text, not a dict"),
    (lambda app: app.jobs.cancel(5), "which takes a job's id, several ids or a filter, not int"),
    (lambda app: app.connections.list(state="activ"),
     "state='activ': say one of active, refreshing, unknown, needs_reauth, suspect, revoked; did you mean 'active'?"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), CALLS, ids=[text.partition("(")[0] for _, text in CALLS])
async def test_a_call_says_what_it_takes(app, call, text):
    with pytest.raises(InvalidInput) as error:
        await call(app)
    assert str(error.value) == text
    assert await app.jobs.count() == 0
