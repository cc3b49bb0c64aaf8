"""Jobs written by hand: forms from the payload's model, errors beside their fields, raw JSON without a model."""

from __future__ import annotations

import html
import json
import re
from datetime import date
from enum import StrEnum

import pytest
from pydantic import BaseModel, Field

from resilient import Job, Kind, Resilient, handler
from resilient.store.accounts.secrets import new_key
from resilient.surface.web.dashboard.enqueue import form_for
from tests.surface.dashboards import ALL, OURS, Page, browser


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str


class Contact(BaseModel):
    name: str = Field(min_length=2, description="As it is <written>")
    age: int | None = None
    is_new: bool = False
    colour: Colour = Colour.RED
    born: date | None = None
    address: Address | None = None
    labels: list[str] = []
    password: str = Field("", json_schema_extra={"format": "password"})


@handler("contact.push")
async def push(job: Job[Contact]) -> None: ...


@handler("contact.sync")
async def sync(job: Job[None]) -> None: ...


@handler("contact.raw")
async def raw(job: Job[dict]) -> None: ...


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push, sync, raw], providers=[])
    await app.ready()
    yield app
    await app.close()


def shape(kind):
    return {one.name: (one.way, one.is_required) for one in form_for(kind).fields}


def test_a_model_becomes_fields():
    assert shape(push) == {
        "p.name": ("text", True), "p.age": ("number", False), "p.is_new": ("choice", False),
        "p.colour": ("choice", False), "p.born": ("text", False), "p.address": ("json", False),
        "p.labels": ("json", False), "p.password": ("secret", False),
    }  # fmt: skip
    fields = {one.name: one for one in form_for(push).fields}
    assert fields["p.colour"].choices == (('"red"', "red"), ('"blue"', "blue"))
    assert fields["p.colour"].hint == 'empty: "red"'
    assert fields["p.born"].hint == "empty: none"


class Recursive(BaseModel):
    children: list[Recursive] = []


@pytest.mark.parametrize("model", [None, dict, list[int], Recursive, str, int | None])
def test_what_is_no_object_with_fields_is_json(model):
    form = form_for(Kind("x", model))
    assert [one.way for one in form.fields] == ["json"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 10_000, '{"a": NaN}', "nul", "\x00", '"\\ud800"'])
def test_what_is_typed_breaks_no_form(text):
    for kind in (push, raw, None):
        for is_raw in (False, True):
            form = form_for(kind, raw=is_raw)
            form.fill({one.name: text for one in form.fields})
            if form.payload() is None:
                assert form.is_refused or kind is None


async def test_a_job_is_enqueued_by_fields(app):
    ann = browser(app)
    page = await ann.get("/enqueue")
    assert {"/enqueue?kind=contact.push", "/enqueue?kind=contact.sync"} <= set(page.links)
    page = await ann.get("/enqueue?kind=contact.push&resource=github/acct-1")
    assert "As it is <written>" in page.text
    typed = {"p.name": "Ada", "p.age": "36", "p.is_new": "true", "p.colour": '"blue"', "p.address": '{"street": "X"}',
             "priority": "7", "tags": "user=42, team=a", "unique_key": "u-1"}  # fmt: skip
    page = await ann.submit(page.form("/do/enqueue"), None, **typed)
    assert "Enqueued." in page.text
    (info,) = await app.jobs.list()
    assert (info.kind, info.resource_key, info.priority) == ("contact.push", "github/acct-1", 7)
    assert (info.unique_key, info.tags) == ("u-1", {"user": "42", "team": "a"})
    assert info.payload == {
        "name": "Ada", "age": 36, "is_new": True, "colour": "blue", "born": None, "address": {"street": "X"},
        "labels": [], "password": "",
    }  # fmt: skip
    (row,) = await app.audit.list()
    assert (row.action, row.subject, row.outcome) == (
        "jobs enqueue", "contact.push on github/acct-1", {"job": str(info.id)},
    )  # fmt: skip
    page = await ann.get("/enqueue?kind=contact.push&resource=github/acct-1")
    page = await ann.submit(page.form("/do/enqueue"), None, **typed)
    assert "Nothing new" in page.text


async def refused(app, **typed):
    ann = browser(app)
    form = (await ann.get("/enqueue?kind=contact.push&resource=github/acct-1")).form("/do/enqueue")
    answer = await ann.client.post(form.action, data=dict(form.fields) | typed, headers=OURS)
    assert answer.status_code == 422
    assert answer.headers["cache-control"] == "no-store"
    assert await app.jobs.count() == 0
    page = Page(answer.text)
    wrong = {a["name"]: a["aria-describedby"].split()[-1] for _, a in page.tags if a.get("aria-invalid") == "true"}
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert set(wrong.values()) <= set(ids)
    return set(wrong), page


async def test_an_error_stands_beside_its_field_and_what_was_typed_stays(app):
    wrong, page = await refused(
        app, **{"p.name": "A", "p.age": "old", "p.address": '{"street": 5}', "p.born": "2020-13-01"}
    )
    assert wrong == {"p.age"}
    wrong, page = await refused(
        app, **{"p.name": "A", "p.age": "5", "p.address": '{"street": 5}', "p.born": "2020-13-01"}
    )
    assert wrong == {"p.name", "p.address", "p.born"}
    assert "street: Input should be a valid string" in page.text
    assert [a["value"] for _, a in page.tags if a.get("name") == "p.name"] == ["A"]
    assert (await refused(app))[0] == {"p.name"}
    assert (await refused(app, **{"p.name": "Ada"}, resource="a//b"))[0] == {"resource"}
    options = {"priority": "1000", "run_at": "soon", "max_attempts": "many", "tags": "x"}
    wrong = (await refused(app, **{"p.name": "Ada"}, **options))[0]
    assert wrong == {"run_at", "max_attempts", "tags"}
    assert (await refused(app, **{"p.name": "Ada"}, priority="1000"))[0] == {"priority"}


async def test_payloads_are_written_by_those_who_may_read_them(app):
    one = browser(app, rights=["read", "jobs"])
    form = (await one.get("/enqueue?kind=contact.sync&resource=github/acct-1")).form("/do/enqueue")
    assert "payload" not in dict(form.fields)
    answer = await one.client.post(form.action, data=dict(form.fields) | {"payload": "{}"}, headers=OURS)
    assert answer.status_code == 403
    await one.submit(form)
    assert await app.jobs.count(kind="contact.sync") == 1
    job = await app.enqueue(raw, {"canary": 1}, resource_key="github/acct-1")
    for address in (f"/enqueue?from={job.id}", f"/jobs/{job.id}/edit"):
        assert "canary" not in (await one.client.get(address)).text
        assert "canary" in (await browser(app).client.get(address)).text
        await browser(app, rights=set(ALL) - {"jobs"}).get(address, 403)


async def test_without_the_program_a_kind_is_typed_and_nothing_is_checked(app):
    bare = Resilient(app.database)
    ann = browser(bare)
    page = await ann.get("/enqueue")
    assert "runs without the program's code" in page.text
    await ann.submit(page.form("/do/enqueue"), None, kind="contact.raw", resource="github/a", payload='{"a": [1]}')
    (info,) = await app.jobs.list()
    assert (info.kind, info.payload) == ("contact.raw", {"a": [1]})
    form = page.form("/do/enqueue")
    answer = await ann.client.post(form.action, data=dict(form.fields) | {"kind": "a b", "resource": "x"}, headers=OURS)
    assert answer.status_code == 422
    assert "is not a handler kind" in answer.text
    unknown = await browser(app).get("/enqueue?kind=contact.none")
    assert "This program has no kind contact.none." in unknown.text


async def test_a_waiting_job_is_edited_by_fields(app):
    job = await app.enqueue(push, Contact(name="Ada", age=3), resource_key="github/acct-1")
    ann = browser(app)
    page = await ann.get(f"/jobs/{job.id}/edit")
    assert [a["value"] for _, a in page.tags if a.get("name") == "p.name"] == ["Ada"]
    await ann.submit(page.form("/do/edit"), None, **{"p.age": "4"})
    assert (await app.jobs.get(job.id)).payload["age"] == 4
    form = (await ann.get(f"/jobs/{job.id}/edit")).form("/do/edit")
    answer = await ann.client.post(form.action, data=dict(form.fields) | {"p.name": "A"}, headers=OURS)
    assert answer.status_code == 422
    assert 'id="f-p-2e-name-error"' in answer.text
    await app.worker().drain()
    page = await ann.client.get(f"/jobs/{job.id}/edit", follow_redirects=True)
    assert "It cannot be edited: it is over." in Page(page.text).text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_number_that_is_none_is_refused_in_its_field(app, number):
    wrong, page = await refused(app, **{"p.name": "Ada", "p.age": number})
    assert set(wrong) == {"p.age"}
    assert f"'{number}' is not a number" in page.text
    form = (await browser(app).get("/enqueue?kind=contact.raw&resource=github/acct-1")).form("/do/enqueue")
    answer = await browser(app).client.post(form.action, data={"payload": f'{{"n": {number}}}'}, headers=OURS)
    assert answer.status_code in (403, 422)
    assert await app.jobs.count() == 0


@pytest.mark.parametrize("name", ["two\nlines", "a\u200bb", "a\U000e0041b", "a\x9bb"])
async def test_what_a_field_would_lose_is_edited_as_json(app, name):
    """A field is a line of characters that one sees: saved unchanged, it must not change the rest."""
    job = await app.enqueue(push, Contact(name=name, age=3), resource_key="github/acct-1")
    answer = await browser(app).client.get(f"/jobs/{job.id}/edit")
    (typed,) = re.findall(r"<textarea[^>]*>(.*?)</textarea>", answer.text, re.DOTALL)
    payload = json.loads(html.unescape(typed))
    assert payload == (await app.jobs.get(job.id)).payload
    ann = browser(app)
    form = (await ann.get(f"/jobs/{job.id}/edit")).form("/do/edit")
    await ann.submit(form, None, payload=json.dumps(payload | {"age": 4}))
    assert (await app.jobs.get(job.id)).payload == payload | {"age": 4}


@handler("card.charge", redact=["password", "address.street"])
async def charge(job: Job[Contact]) -> None: ...


@handler("card.store", sealed=True)
async def store(job: Job[Contact]) -> None: ...


async def test_hidden_values_are_on_no_page_and_not_written_back(database):
    app = Resilient(database, handlers=[charge, store], secrets=[new_key()])
    contact = Contact(name="Ada", password="hush", address=Address(street="Elm"))
    for kind in (charge, store):
        job = await app.enqueue(kind, contact, resource_key="crm/1", delay=9)
        user = browser(app)
        page = await user.get(f"/jobs/{job.id}")
        assert ("Ada" in page.text) is (kind is charge)
        assert "hush" not in page.text
        assert "Elm" not in page.text
        edit = await user.get(f"/jobs/{job.id}/edit")
        form = edit.form("/do/edit")
        assert "Ada" not in str(form.fields)
        assert "Ada" not in str((await user.get(f"/enqueue?from={job.id}")).forms)
        assert "Edited." in (await user.submit(form, priority="7")).text
        before = await app.jobs.get(job.id)
        assert before.priority == 7
        assert "hush" in str(before.payload) or kind is store
    await app.close()
