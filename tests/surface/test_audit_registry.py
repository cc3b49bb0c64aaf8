"""Every change leaves its row: each method of the app and each command that changes something is called here once.

A new one fails these tests until it is listed: as one that changes (and then its row is looked for), or as one that
does not.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from datetime import timedelta

import pytest
import typer
from sqlalchemy.orm import Session

from resilient import ApiKey, Event, InvalidInput, Job, Permanent, Provider, Resilient, Schedule, handler
from resilient.engine.ground import audited
from resilient.store.accounts.secrets import new_key
from resilient.store.schedules import ticks
from resilient.surface.cli import main
from resilient.surface.cli.root import cli
from tests.helpers import drain

# Looks, what the engine itself calls, and ordinary work: enqueueing, publishing, a customer's own consent.
NO_CHANGE = {
    "accounts": "export",
    "jobs": "wait attempts count get list why",
    "resources": "get list summary why",
    "workflows": "get list",
    "streams": "list",
    "inbox": "arrived first",
    "outbox": "get list publish",
    "schedules": "accounts declare list step tick",
    "connections": "account_of authorize_url complete consent get granted list oauth_of restored",
    "webhooks": "count receive say",
    "alerts": "add close flush keep_house list note_breaker noticed repaired soon",
    "audit": "begin change list settle",
}
NO_CHANGE_OF_APP = (
    "acting close credentials enqueue enqueue_many enqueue_many_sync enqueue_sync keep_house lifespan now poke ready"
    " ready_sync worker workflow workflow_sync"
)


class Placed(Event, type="order.placed"):
    number: int


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    raise Permanent("no such contact")


async def sink(message):
    pass


@pytest.fixture
async def app(database):
    app = Resilient(
        database, handlers=[push], secrets=[new_key()],
        providers=[Provider(name="api", base_url="https://api.example.com", auth=(ApiKey(),))],
        schedules=[Schedule(push, {}, every="1h", name="hourly", resource_key="api/a")],
        destinations={"crm": sink}, routes={Placed: ["crm"]},
    )  # fmt: skip
    await app.ready()
    await app.schedules.declare()
    await app.database.transaction(ticks.declare, {"left": ("report", app.schedules._specs["hourly"][1])}, ())
    yield app
    await app.close()


def changing(app):
    """The methods that are not known to change nothing, as ``jobs.cancel``."""
    features = {name for name, one in vars(app).items() if isinstance(getattr(type(one), "sync", None), property)}
    assert features == set(NO_CHANGE), "a new feature: say above what of it changes nothing"
    for name, others in NO_CHANGE.items():
        feature = getattr(app, name)
        for method, _ in inspect.getmembers(type(feature), inspect.isfunction):
            if not method.startswith("_") and method not in others.split():
                yield f"{name}.{method}"
    for method, _ in inspect.getmembers(type(app), inspect.isfunction):
        if not method.startswith("_") and method not in NO_CHANGE_OF_APP.split():
            yield method


async def calls(app):
    job = await app.enqueue("contact.push", {"secret": "canary"}, resource_key="smtp/a")
    async with app.workflow("order", resource_key="smtp/a") as flow:
        flow.step("contact.push", {})
    hour = timedelta(hours=1)
    return {
        "jobs.cancel": lambda: app.jobs.cancel(kind="contact.push", limit=1),
        "jobs.edit": lambda: app.jobs.edit(job.id, payload={"secret": "canary"}, new_operation=True),
        "jobs.retry": lambda: app.jobs.retry(state="dead"),
        "jobs.discard": lambda: app.jobs.discard(everything=True),
        "jobs.delete": lambda: app.jobs.delete(state="dead"),
        "resources.pause": lambda: app.resources.pause("api/*", reason="they asked"),
        "resources.resume": lambda: app.resources.resume("api/a"),
        "resources.open": lambda: app.resources.open("api/a"),
        "resources.close": lambda: app.resources.close("api/a"),
        "resources.reset": lambda: app.resources.reset("api/a"),
        "resources.limit": lambda: app.resources.limit("api/a", concurrency=3),
        "resources.test": lambda: app.resources.test("api/a"),
        "workflows.cancel": lambda: app.workflows.cancel(flow.id),
        "streams.reset": lambda: app.streams.reset("contacts"),
        "streams.forget": lambda: app.streams.forget("contacts"),
        "outbox.replay": lambda: app.outbox.replay(since=hour),
        "schedules.pause": lambda: app.schedules.pause("hourly"),
        "schedules.resume": lambda: app.schedules.resume("hourly"),
        "schedules.run": lambda: app.schedules.run("hourly"),
        "schedules.remove": lambda: app.schedules.remove("left"),
        "connections.add": lambda: app.connections.add("api/a", api_key="canary"),
        "connections.import_": lambda: app.connections.import_("api/b", access_token="canary", refresh_token="canary"),
        "connections.revoke": lambda: app.connections.revoke("api/a"),
        "connections.disconnect": lambda: app.connections.disconnect("api/a"),
        "connections.release": lambda: app.connections.release("api"),
        "connections.confirm": lambda: app.connections.confirm("api"),
        "connections.rotate_secrets": app.connections.rotate_secrets,
        "accounts.erase": lambda: app.accounts.erase("api/a"),
        "prune": lambda: app.prune(state="dead", older_than="1d"),
        "prune_sync": lambda: app.prune(state="dead", older_than="1d"),
    }  # fmt: skip


async def test_each_method_that_changes_something_leaves_one_row(app):
    known = await calls(app)
    assert sorted(changing(app)) == sorted(known), "a new method: list it above, and let it be `@audited` if it changes"
    rows, wrong = await app.audit.list(limit=1000), []
    assert rows == [], "ordinary work leaves none"
    for name, call in known.items():
        with app.acting("ann", "the test"):
            try:
                await call()
            except (InvalidInput, LookupError) as error:
                wrong.append((name, error))
        new = (await app.audit.list(limit=1000))[: -len(rows) or None]
        action = name.removesuffix("_sync").rstrip("_").replace(".", " ").replace("streams", "sync")
        action = action.removeprefix("accounts ")
        found = [(one.who, one.via, one.action, one.why) for one in new]
        assert found == [("ann", "program", action, "the test")], name
        assert new[0].outcome is not None
        rows = new + rows
    assert {name for name, _ in wrong} <= {"connections.import_", "resources.test"}, wrong
    assert "canary" not in str(rows)
    subjects = {one.action: one.subject for one in rows}
    assert subjects["resources pause"] == "api/*"
    assert subjects["jobs cancel"] == "kind contact.push, limit 1"
    assert subjects["connections revoke"] == "api/a"
    assert {one.outcome["cancelled"] for one in rows if one.action == "jobs cancel"} == {1}


async def test_who_it_is_where_nobody_says_it(app):
    @handler("contact.pause")
    async def pause(job: Job[None]) -> None:
        await job.app.resources.pause("smtp/b", reason="bounced")

    other = Resilient(app.database, handlers=[pause])
    await other.enqueue("contact.pause", resource_key="smtp/a")
    await drain(other)
    await app.resources.resume("smtp/b")
    app.sync.resources.pause("smtp/c")
    with app.acting("outer"), app.acting("inner"):
        await app.resources.resume("smtp/c")
    rows = [(one.who, one.action, one.subject, one.why) for one in await app.audit.list()]
    assert rows[::-1] == [
        ("handler contact.pause", "resources pause", "smtp/b", "bounced"),
        ("program", "resources resume", "smtp/b", None),
        ("program", "resources pause", "smtp/c", None),
        ("inner", "resources resume", "smtp/c", None),
    ]
    with pytest.raises(InvalidInput, match="say who it is"), app.acting(""):
        pass


async def test_a_dry_run_and_a_look_leave_none_and_an_error_is_kept(app):
    await app.resources.pause("smtp/*", dry_run=True)
    await app.jobs.cancel(kind="contact.push", dry_run=True)
    with pytest.raises(InvalidInput):
        await app.resources.limit("smtp/a")
    (row,) = await app.audit.list()
    assert (row.action, row.outcome["error"][:12]) == ("resources limit", "InvalidInput")


async def test_in_the_callers_transaction_the_row_comes_and_goes_with_it(app):
    await app.enqueue("contact.push", {}, resource_key="smtp/a")
    with Session(app.database.sync_engine) as session, session.begin():
        app.sync.jobs.cancel(kind="contact.push", session=session)
        session.rollback()
    assert await app.audit.list() == []
    with Session(app.database.sync_engine) as session, session.begin():
        app.sync.jobs.cancel(kind="contact.push", session=session)
    (row,) = await app.audit.list()
    assert (row.action, row.outcome["cancelled"]) == ("jobs cancel", 1)


async def test_what_is_noted_as_one_change_is_one_row(app):
    async with app.audit.change("bo", "customer deleted", "smtp/a"):
        await app.resources.pause("smtp/a")
        app.sync.resources.resume("smtp/a")
    assert [one.action for one in await app.audit.list()] == ["customer deleted"]


def test_meanings_are_of_a_bounded_length():
    assert audited.meaning({"which": [str(n) for n in range(50)]}).endswith("18 19 and 30 more")


# -- commands ---------------------------------------------------------------------------------------------------------

PROGRAM = """
    from resilient import Event, Job, Permanent, Provider, Resilient, Schedule, handler
    from resilient.core.provider.auth import ApiKey

    @handler("contact.push")
    async def push(job: Job[dict]) -> None:
        raise Permanent("no")

    class Placed(Event, type="order.placed"):
        number: int

    async def sink(message):
        pass

    app = Resilient({url!r}, handlers=[push], secrets=[{key!r}],
        destinations={{"crm": sink}}, routes={{Placed: ["crm"]}},
        providers=[Provider(name="api", base_url="https://api.example.com", auth=(ApiKey(),))],
        schedules=[Schedule(push, {{}}, every="1h", name="hourly", resource_key="api/a")])
"""
DEAD = (
    "UPDATE {job} SET state = 'dead', finished_at = '2026-01-01 00:00:00.000000', version = version + 1"
    " WHERE id IN (SELECT value FROM json_each(:id))"
)
PUBLISHED = (
    "UPDATE {job} SET state = 'succeeded', version = version + 1,"
    " finished_at = strftime('%Y-%m-%d %H:%M:%f000', 'now') WHERE kind LIKE 'outbox%'"
)
LOOKS = """status|export
worker|audit|dashboard|doctor|bench|demo|jobs list|jobs count|jobs show|jobs why|dead list|dead show
resources list|resources show|resources why|schedules list|schedules show|workflows list|workflows show|outbox list
outbox show|sync status|connections list|connections show|connections test|secrets new|providers list|providers show
providers new|db check""".replace("\n", "|").split("|")
ELSEWHERE = ("connect",)  # asks in a browser, or for a secret


def commands():
    found = []

    def walk(command, path):
        for name, one in getattr(command, "commands", {}).items():
            walk(one, [*path, name])
        if not hasattr(command, "commands"):
            found.append(" ".join(path))

    walk(typer.main.get_command(cli), [])
    return found


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    text = PROGRAM.format(url=f"sqlite:///{tmp_path}/app.db", key=new_key())
    (tmp_path / "audited_shop.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("RESILIENT_APP", "audited_shop:app")

    def call(*words):
        sys.modules.pop("audited_shop", None)
        status = main(list(words))
        return status, capsys.readouterr()

    yield call
    sys.modules.pop("audited_shop", None)


def test_each_command_that_changes_something_leaves_a_row(run, monkeypatch):
    def rows():
        status, shown = run("audit", "--json", "--limit", "1000")
        assert status == 0, shown.err
        return json.loads(shown.out)["changes"]

    monkeypatch.setattr("resilient.surface.cli.connections.secret", lambda _: "canary")
    status, shown = run("db", "upgrade")
    assert status == 0, shown.err
    job = run("enqueue", "contact.push", '{"x": "canary"}', "--resource", "api/a")[1].out.strip()
    from audited_shop import Placed, app

    with app.workflow_sync("order", resource_key="api/a") as flow:
        flow.step("contact.push", {})
    dead = [str(app.enqueue_sync("contact.push", {}, resource_key="api/a").id) for _ in range(3)]
    ids = json.dumps([one.replace("-", "") for one in dead])
    app.database.transaction_sync(lambda c, d: d.run(c, DEAD, {"id": ids}))
    app.database.transaction_sync(ticks.declare, {"left": ("report", app.schedules._specs["hourly"][1])}, ())
    with Session(app.database.sync_engine) as session, session.begin():
        app.outbox.publish(session, Placed(number=1))
    app.database.transaction_sync(lambda c, d: d.run(c, PUBLISHED))
    app.database.close_sync()
    lines = {
        "enqueue": ["contact.push", "{}", "--resource", "api/a"],
        "prune": ["--state", "dead", "--older-than", "1d"],
        "jobs cancel": [job],
        "jobs retry": [job],
        "jobs edit": [job, "--priority", "3"],
        "jobs delete": [job],
        "dead replay": [dead[0]],
        "dead discard": [dead[1]],
        "resources pause": ["api/a"],
        "resources resume": ["api/a"],
        "resources open": ["api/a"],
        "resources close": ["api/a"],
        "resources reset": ["api/a"],
        "resources limit": ["api/a", "--concurrency", "3"],
        "resources test": ["api/a"],
        "schedules pause": ["hourly"],
        "schedules resume": ["hourly"],
        "schedules run": ["hourly"],
        "schedules remove": ["left"],
        "workflows cancel": [str(flow.id)],
        "outbox replay": ["--since", "1h"],
        "sync reset": ["contacts"],
        "sync forget": ["contacts"],
        "connections add": ["api/b", "--kind", "api-key"],
        "connections revoke": ["api/b"],
        "connections release": ["api"],
        "connections confirm": ["api"],
        "secrets rotate": [],
        "erase": ["api/b"],
        "db upgrade": [],
    }
    assert sorted(commands()) == sorted([*LOOKS, *ELSEWHERE, *lines]), "a new command: list it above"
    before, none = rows(), []
    assert {one["action"] for one in before} == {"db upgrade", "enqueue"}
    for name, words in lines.items():
        status, shown = run(*name.split(), *words, "--as", "ann", "--because", "the test")
        if "--yes" in shown.err + shown.out:
            status, shown = run(*name.split(), *words, "--yes", "--as", "ann", "--because", "the test")
        assert status in (0, 1, 3) or name == "resources test", (name, shown.err)
        after = rows()
        new = [(one["who"], one["via"], one["why"]) for one in after[: len(after) - len(before)]]
        if new != [("ann", "command line", "the test")]:
            none.append((name, new, status, shown.out, shown.err))
        before = after
    nothing_to_do = {"db upgrade"}
    assert [one for one in none if one[0] not in nothing_to_do] == []
    assert "canary" not in json.dumps(before)
