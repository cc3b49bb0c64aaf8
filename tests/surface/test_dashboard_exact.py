"""What a form or a link of the dashboard means: exactly what stands beside it, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from starlette.exceptions import HTTPException

from resilient import Job, Permanent, Resilient, handler, web
from resilient.core.jobs.records import Deleted
from resilient.core.sync.stream import Cursor
from resilient.store import sync as cursors
from resilient.store.gates import controls
from resilient.store.inspect import pages
from resilient.surface.web.dashboard import words
from resilient.surface.web.dashboard.alone import Alone
from resilient.surface.web.dashboard.words import as_word, words_of
from tests.surface.dashboards import OURS, Page, browser, client_of


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    raise Permanent("refused", code=job.payload["code"])


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], providers=[])
    await app.ready()
    yield app
    await app.close()


async def post(one, address, **fields):
    """The answer to a form with these fields, whatever its page offers."""
    page = await one.get("/accounts")
    token = next(value for form in page.forms for name, value in form.fields if name == "token")
    return await one.client.post(address, data={**fields, "token": token}, headers=OURS)


def rows_of(page):
    return len([1 for tag, attrs in page.tags if tag == "tr" and "data-row" in attrs])


# -- dead groups -----------------------------------------------------------------------------------------------------

CODES = [None, "", "none", r"\none", "a", "b", "a,b", r"a\,b", "a\\", "no such, none"]
ENDS = ["a ", " a", "a  ", "a\\ ", "a\\\\ ", " ", "a\n", "\n", " , "]  # with a blank at one


@pytest.mark.parametrize("word", [*filter(None, CODES), None, *ENDS])
def test_a_word_of_a_filter_comes_back(word):
    from resilient.surface.cli.jobs import word_or_none

    assert [word_or_none(one) for one in words_of(f"{as_word(word)}, x")] == [word, "x"]


async def test_a_button_of_a_dead_group_changes_this_group_alone(app):
    for code in CODES:
        await app.enqueue(push, {"code": code}, resource_key="github/acct-1")
    await app.enqueue(push, {"code": None}, resource_key="github")
    await app.worker().drain()
    ann = browser(app)
    remaining = {code or None: 1 for code in CODES} | {None: 3}
    while remaining:
        page = await ann.get("/dead")
        forms = [form for form in page.forms if form.method == "post"]
        assert len(forms) == len(remaining)
        links = [link for link in page.links if link.startswith("/jobs?state=dead")]
        sure = await ann.submit(forms[0], "discard")
        rows = rows_of(await ann.get(links[0]))
        await ann.submit(sure.form("/do/jobs"))
        jobs = await app.jobs.list(state="dead")
        after = {code: sum(job.last_error_code == code for job in jobs) for code in remaining}
        (changed,) = [code for code in remaining if after[code] != remaining[code]]
        assert after[changed] == 0, changed
        assert rows == remaining.pop(changed), "the heading leads to the same jobs"


async def test_a_tag_with_a_comma_leads_to_its_jobs(app):
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1", tags={"name": "Doe, Jane"})
    ann = browser(app)
    page = await ann.get(f"/jobs/{job.id}")
    assert f"/jobs/{job.id}" in (await ann.get(next(link for link in page.links if "tag=" in link))).links


async def test_a_blank_at_an_end_belongs_to_the_word(app):
    keys = {"unique_key": "once ", "ordering_key": " line"}
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1", tags={"name": "Jane "}, **keys)
    ann = browser(app)
    address = f"/jobs/{job.id}"
    page = await ann.get(address)
    for link in (one for one in page.links if "tag=" in one or "ordering_key=" in one):
        page = await ann.get(link)
        assert address in page.links, link
        again = await ann.submit(page.forms[0])  # as it stands in the form
        assert address in again.links
    assert address in (await ann.get("/jobs?unique_key=once%20")).links
    assert "--unique-key 'once '" in (await ann.get("/jobs?unique_key=once%20")).text
    assert "No job fits. The unique key has a blank at an end." in (await ann.get("/jobs?unique_key=once%20%20")).text
    assert "a blank at an end" not in (await ann.get("/jobs?unique_key=once")).text
    assert address in (await ann.get("/jobs?kind=contact.push%20,%20other%20")).links, "none beside a comma does"
    sure = await ann.submit((await ann.get("/jobs?unique_key=once%20")).form("/do/jobs"), verb="cancel")
    assert "Cancel: 1 job?" in sure.text
    await ann.submit(sure.form("/do/jobs"))
    assert (await app.jobs.get(job.id)).state == "cancelled"


# -- accounts --------------------------------------------------------------------------------------------------------


async def test_a_gate_without_a_code_means_any_and_the_link_of_a_cause_its_own(app):
    cool = app.database.transaction
    until = datetime.now(UTC) + timedelta(hours=1)
    for key, code in (("github/a", None), ("github/b", "none"), ("github/c", "429")):
        await cool(controls.cool_down, key, until, code, 0.5)
    await app.resources.open("github/d")
    ann = browser(app)
    assert rows_of(await ann.get("/accounts?gate=cooldown")) == 3
    assert rows_of(await ann.get("/accounts?gate=breaker")) == 1
    assert rows_of(await ann.get("/accounts?gate=breaker&code=")) == 1
    seen = []
    for link in (await ann.get("/accounts")).links:
        if "gate=" in link:
            page = await ann.get(link)
            seen += [one for one in page.links if one.startswith("/account/")]
            assert rows_of(page) == 1, link
    assert sorted(seen) == [f"/account/github/{name}" for name in "abcd"]


async def test_a_stop_of_a_whole_provider_leads_to_it(app):
    await app.resources.pause("github")
    await app.resources.pause("github/acct-1")
    await app.resources.pause("github-eu/acct-1")
    ann = browser(app)
    link = next(one for one in (await ann.get("/accounts")).links if "q=github&" in one)
    page = await ann.get(link)
    assert {one for one in page.links if one.startswith("/account/")} == {"/account/github", "/account/github/acct-1"}
    assert (
        "resilient resources list github --gate pause; resilient resources list 'github/**' --gate pause" in page.text
    )
    sure = await ann.submit(page.form("/do/resources"), None, verb="resume")
    assert "Resume 2 accounts?" in sure.text
    await ann.submit(sure.form("/do/resources"))
    assert [one.key for one in await app.resources.list(gate="pause")] == ["github-eu/acct-1"]
    capped = await ann.submit((await ann.get("/accounts?q=github")).form("/do/resources"), verb="pause", limit="1")
    assert "Pause 1 account?" in capped.text


@pytest.mark.parametrize(("verb", "gate"), [("resume", "breaker"), ("resume", "auth"), ("close", "pause")])
async def test_a_gate_that_a_verb_does_not_know_is_refused(app, verb, gate):
    await app.resources.pause("github/acct-1")
    await app.resources.open("github/acct-1")
    before = await app.audit.list()
    for q in ("github/*", "github", "github/acct-1"):
        for sure in ({}, {"sure": "yes"}):
            answer = await post(browser(app), "/do/resources", q=q, verb=verb, gate=gate, **sure)
            assert answer.status_code == 400
    assert await app.audit.list() == before
    assert len(await app.resources.list(gate="pause")) == len(await app.resources.list(gate="breaker")) == 1


async def test_a_gate_holds_for_a_single_account_too(app):
    await app.resources.pause("github/acct-1")
    answer = await post(browser(app), "/do/resources", q="github/acct-1", verb="reset", gate="breaker", sure="yes")
    assert answer.status_code == 303
    assert len(await app.resources.list(gate="pause")) == 1
    await post(browser(app), "/do/resources", q="github/new", verb="pause", sure="yes")
    assert len(await app.resources.list(gate="pause")) == 2


async def test_jobs_behind_a_cause_are_those_of_its_provider(app):
    for provider in ("github", "github-eu", "github.x"):
        await app.resources.pause(f"{provider}/acct-1")
        await app.resources.pause(f"{provider}/acct-2")
    for _ in range(3):
        await app.enqueue(push, {"code": None}, resource_key="github-eu/acct-1")
    await app.enqueue(push, {"code": None}, resource_key="github/acct-1")
    causes = await app.database.transaction(pages.causes, datetime.now(UTC))
    assert {one.provider: int(one.waiting) for one in causes} == {"github": 1, "github-eu": 3, "github.x": 0}


async def test_a_gate_that_there_is_not_stops_nothing(app):
    await app.resources.pause("github/acct-1")
    read = app.database.transaction
    assert [one.key for one, _ in await read(pages.resource_page, cause=("pause", None))] == ["github/acct-1"]
    assert await read(pages.resource_page, cause=("weather", None)) == []


@pytest.mark.parametrize(("number", "more"), [(3, False), (4, True)])
async def test_what_is_counted_up_to_a_bound_is_more_only_beyond_it(app, monkeypatch, number, more):
    monkeypatch.setattr(pages, "_KINDS_SAMPLE", 3)
    monkeypatch.setattr(pages, "DEAD_SAMPLE", 3)
    read = app.database.transaction
    for n in range(number):
        await app.enqueue(push, {"code": None}, resource_key=f"github/acct-{n}")
    assert (await read(pages.jobs_by_kind, "github"))["contact.push"]["ready"].more is more
    await app.worker().drain()
    ((group,), page) = await read(pages.dead_groups), await browser(app).get("/dead")
    assert group.count.more is more
    assert f"3{'+' if more else ''} dead jobs, 1 cause." in page.text


# -- streams, the outbox, the audit ----------------------------------------------------------------------------------


async def test_read_anew_means_one_part_of_one_resource(app):
    for part in ("", "eu"):
        place = ("github/acct-1", "issues", part)
        cursor = Cursor(pass_id=1, full_pass=1, completed_at=datetime.now(UTC))
        await app.database.transaction(cursors.write_if_unmoved, place, cursor, None, datetime.now(UTC))
    ann = browser(app)
    assert (await post(ann, "/do/stream", key="**", stream="issues", part="")).status_code == 400
    assert (await post(ann, "/do/stream", key="github/*", stream="issues", part="")).status_code == 400
    assert await app.audit.list() == []
    form = next(one for one in (await ann.get("/streams")).forms if ("part", "") in one.fields)
    page = await ann.submit(form)
    assert "1 stream begins anew." in page.text
    assert (await post(ann, "/do/stream", key="github/acct-1", stream="issues")).status_code == 303
    (one,) = {one.part for one in await app.streams.list() if one.cursor.error}
    assert one == ""


async def test_a_destination_says_since_when_its_oldest_event_waits(app, monkeypatch):
    """The job that was enqueued first may be the one that runs last, or wait for another one."""
    monkeypatch.setattr(pages, "DEAD_SAMPLE", 3)
    first = await app.enqueue(push, {"code": None}, resource_key="outbox/late", delay=3600)
    await app.enqueue(push, {"code": None}, resource_key="outbox/late", delay=60)
    await app.enqueue(push, {"code": None}, resource_key="outbox/late")
    await app.worker().drain()
    after = await app.enqueue(push, {"code": None}, resource_key="outbox/behind", after=[first.id])
    for _ in range(4):
        await app.enqueue(push, {"code": None}, resource_key="outbox/full", delay=60)
    rows = await app.database.transaction(pages.destinations, ["late", "behind", "full"])
    by_name = {one.name: one for one in rows}
    assert by_name["late"].oldest == (await app.jobs.get(first.id)).created_at
    assert by_name["behind"].oldest == (await app.jobs.get(after.id)).created_at
    said = {name: (int(one.waiting), one.waiting.more, int(one.dead), one.dead.more) for name, one in by_name.items()}
    assert said == {"late": (2, False, 1, False), "behind": (1, False, 0, False), "full": (3, True, 0, False)}


@pytest.mark.parametrize("is_full", [True, False])
async def test_whether_a_pass_is_full_is_a_truth_on_both_databases(app, is_full):
    cursor = Cursor(pass_id=1, full=is_full, full_pass=1)
    await app.database.transaction(
        cursors.write_if_unmoved, ("github/acct-1", "issues", ""), cursor, None, datetime.now(UTC)
    )
    (row,) = await app.database.transaction(pages.streams)
    assert row.is_full is is_full


async def test_what_cannot_be_meant_is_not_noted(app):
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1")
    ann = browser(app)
    assert (await post(ann, "/do/job", id=str(job.id), verb="sing")).status_code == 400
    assert (await post(ann, "/do/jobs", state="dead", verb="sing", sure="yes")).status_code == 400
    assert (await post(ann, "/do/resource", key="github/acct-1", verb="sing")).status_code == 400
    assert (await post(ann, "/do/resources", q="github/*", verb="sing", sure="yes")).status_code == 400
    assert await app.audit.list() == []


async def test_a_replay_is_noted_with_its_time(app):
    assert (await post(browser(app), "/do/replay", since="2h", sure="yes")).status_code == 303
    assert [one.subject for one in await app.audit.list()] == ["every destination, since 2h"]


@pytest.mark.parametrize("digits", [25, 5_000])
async def test_a_number_of_many_digits_is_refused(app, digits):
    ann, number = browser(app), "9" * digits
    await ann.get(f"/audit?after={number}", 400)
    await ann.get("/audit?after=x", 400)
    await ann.get("/audit?after=999999999999999999")
    assert (await post(ann, "/do/resources", q="github/*", verb="pause", limit=number)).status_code == 400
    fields = {"key": "github/acct-1", "verb": "limit", "concurrency": number}
    assert (await post(ann, "/do/resource", **fields)).status_code == 400
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1")
    for name in ("priority", "max_attempts"):
        assert (await post(ann, "/do/edit", id=str(job.id), **{name: number})).status_code == 422


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_given_up_is_said_in_words(app):
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1")
    await app.worker().drain()
    ann = browser(app)
    page = await ann.get(f"/jobs/{job.id}")
    page = await ann.submit(page.form("/do/job", "discard"), "discard")
    assert "It was given up; error and history stay." in page.text


async def test_only_a_page_with_payloads_is_not_stored(app):
    job = await app.enqueue(push, {"code": None}, resource_key="github/acct-1")
    with_payloads = await browser(app).client.get(f"/jobs/{job.id}")
    without = await browser(app, rights=["read"]).client.get(f"/jobs/{job.id}")
    assert with_payloads.headers["cache-control"] == "no-store"
    assert without.headers["cache-control"] == "private, no-cache"


async def test_a_refusal_of_the_program_keeps_its_headers_and_its_meaning(app):
    async def ask(status, **options):
        def operator(_request):
            raise HTTPException(status, **options)

        answer = await client_of(web.dashboard(app, operator=operator)).get("/")
        assert answer.status_code == status
        return answer.headers, Page(answer.text).text

    headers, text = await ask(401, headers={"WWW-Authenticate": 'Basic realm="ops"'})
    assert headers["www-authenticate"] == 'Basic realm="ops"'
    assert "Sign in first" in text
    assert "no such page" not in text
    _, text = await ask(403, detail="ask the <owner>")
    assert "You may not do this" in text
    assert "Ask the <owner>." in text
    assert "Too Many Requests" in (await ask(429))[1]
    wrong = await browser(app).client.put("/do/job")
    assert "POST" in wrong.headers["allow"]


async def test_alone_at_port_80_it_is_reached_without_the_port(app):
    for port, status in ((80, 303), (8080, 421)):
        alone = Alone(app, port)
        token = alone.address.partition("/enter")[2]
        async with client_of(alone.asgi, "http://127.0.0.1") as owner:
            answer = await owner.get(f"/enter{token}", headers={"Host": "localhost"})
            assert answer.status_code == status, port


# -- what a page says instead of a command -----------------------------------------------------------------------------

_ID = "0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55"


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("until somebody runs `resilient resources resume a/b`.", 'presses <a href="/account/a/b#do">Resume</a>.'),
        (f"or `resilient jobs retry {_ID} --repeat-ambiguous`.", f'or <a href="/jobs/{_ID}#do">Run again</a>.'),
        (f"give it up with `resilient dead discard {_ID}`.", f'with <a href="/jobs/{_ID}#do">Give up</a>.'),
        ("start one with `resilient worker`.", "start one with <code>resilient worker</code>."),
        ("`resilient resources resume ../../evil`", "<code>resilient resources resume ../../evil</code>"),
        ("`resilient jobs retry ../x`", "<code>resilient jobs retry ../x</code>"),
        ("of a/b: it", 'of <a href="/account/a/b">a/<wbr>b</a>: it'),
        ("of a/b-2, a/b/c and x/a/b", "of a/b-2, a/b/c and x/a/b"),
        ("at 11:59:00 UTC (1 min ago)", '<time datetime="2030-01-02T11:59:00Z" title="2030-01-02 11:59:00 UTC">'),
        ("at 2029-12-31 11:59:00 UTC (2 d ago)", '<time datetime="2029-12-31T11:59:00Z"'),
    ],
)  # fmt: skip
def test_a_sentence_names_the_buttons_of_pages_and_leads_there(sentence, shown):
    context = {
        "operator": web.Operator("ann", ["read", "jobs", "resources"]),
        "now": datetime(2030, 1, 2, 12, tzinfo=UTC),
    }
    assert shown in words.prose(context, sentence, str, "a/b")


def test_a_token_that_is_refreshed_is_no_word_of_the_provider():
    assert "refreshing its token" in words.gate("cooldown", "refreshing")
    assert "told to wait" in words.gate("cooldown", "rate_limited")


def test_who_has_no_buttons_reads_the_command():
    context = {"operator": web.Operator("eve", ["read"])}
    shown = words.prose(context, "until somebody runs `resilient resources resume a/b`.", str)
    assert shown == "until somebody runs <code>resilient resources resume a/b</code>."


async def test_the_last_success_is_that_of_the_latest_jobs(app, monkeypatch):
    monkeypatch.setattr(pages, "SUCCESS_SAMPLE", 2)

    def finish(c, d, key, minutes):
        row = {"k": key, "at": d.time(d.now(c) - timedelta(minutes=minutes)), "s": "succeeded"}
        c.execute(text("UPDATE resilient_job SET state = :s, finished_at = :at WHERE resource_key = :k"), row)

    for key, minutes in (("github/acct-1", 30), ("github/acct-1/search", 2), ("github/acct-2", 1)):
        await app.enqueue(push, {"code": None}, resource_key=key)
        await app.database.transaction(finish, key, minutes)
    known = await app.database.transaction(pages.successes, ["github", "github/acct-1", "github/acct-3"])
    now = await app.database.transaction(lambda c, d: d.now(c))
    assert {key: round((now - at).total_seconds() / 60) for key, at in known.at.items()} == {
        "github": 1, "github/acct-1": 2,
    }  # fmt: skip
    assert round((now - known.since).total_seconds() / 60) == 2
    assert known.of("github/acct-3", None) is None
    assert known.of("github/acct-1", now) == now
    monkeypatch.setattr(pages, "SUCCESS_SAMPLE", 9)
    assert (await app.database.transaction(pages.successes, ["github"])).since is None
    await app.resources.pause("github/acct-1")
    assert "2 min ago" in (await browser(app).get("/accounts?all=1")).text


async def test_limits_are_set_on_many_at_once(app):
    for n in (1, 2):
        await app.resources.pause(f"github/acct-{n}")
    ann = browser(app)
    page = await ann.get("/accounts?q=github")
    sure = await ann.submit(page.form("/do/resources"), q="github/*", verb="limit", limits="5/s", concurrency="3")
    assert "Limit 2 accounts?" in sure.text
    assert "limits 5/s, at once 3" in sure.text
    await ann.submit(sure.form("/do/resources"))
    assert (await app.resources.get("github/acct-2")).policy["concurrency"] == 3
    answer = await post(ann, "/do/resources", q="github/*", verb="limit")
    assert answer.status_code == 400
    assert "which limits?" in answer.text.lower()


async def test_what_is_unknown_or_refused_is_no_dead_end(app):
    ann = browser(app)
    assert "Nothing is known of github/nobody" in (await ann.get("/account/github/nobody")).text
    await app.resources.pause("github/acct-1")
    assert "Nothing is known" not in (await ann.get("/account/github/acct-1")).text
    for address, status in (("/accounts?q=%25", 400), ("/nowhere", 404)):
        assert {"/accounts", "/jobs", "/system"} <= set((await ann.get(address, status)).links)
    assert "/accounts" not in (await browser(app, rights=None).get("/", 401)).links


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("/outbox?state=dead&key=a b", "resilient outbox list --state dead --key 'a b'"),
        ("/connections?provider=crm&state=active", "resilient connections list crm --state active"),
        ("/audit?who=ann", "resilient audit --who ann"),
        ("/workflows?state=stuck", "resilient workflows list --state stuck"),
    ],
)  # fmt: skip
async def test_the_equal_command_has_the_filters_of_the_page(app, address, command):
    assert command in (await browser(app).get(address)).text


def test_what_was_left_alone_says_why_as_the_command_line_does():
    assert (
        words.brought(Deleted(deleted=3, in_workflow=2).to_json())
        == "3 deleted, 2 left alone: their workflow is not over"
    )
