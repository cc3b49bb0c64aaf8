"""What is drawn: bars of two days, ticks, graphs of workflows; each with its words."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from resilient import Job, Permanent, Provider, Resilient, handler
from resilient.store.inspect.throughput import Series, add
from resilient.surface.web.dashboard import charts, graph, words
from tests.surface.dashboards import browser

NOW = datetime(2030, 1, 1, 12, 10, tzinfo=UTC)


def row(minutes_ago, outcome, count, kind="contact.push"):
    return SimpleNamespace(
        at=NOW - timedelta(minutes=minutes_ago), outcome=outcome, count=count, kind=kind, provider="crm"
    )


def step(name, after=(), state="succeeded", undo=None, undo_state=None):
    return SimpleNamespace(
        name=name, after=list(after), state=state, job_id=name, undo=undo, undo_state=undo_state,
        undo_job_id=undo_state and f"{name}-undo",
    )  # fmt: skip


def test_bars_have_what_ended_in_their_half_hour():
    rows = [row(5, "succeeded", 7), row(15, "retry", 2), row(15, "dead", 1), row(3000, "succeeded", 99)]
    data = charts.sums([*rows, row(-60, "succeeded", 99)], NOW).bars()
    assert len(data.counts) == 96
    assert data.counts[-2:] == [[0, 2, 1], [7, 0, 0]]
    assert (data.totals, data.most) == ([7, 2, 1], 7)
    assert charts.sentence(data) == "7 succeeded, 2 to go on later, 1 dead."
    table = data.table(8)
    assert len(table) == 12
    assert table[0] == (datetime(2030, 1, 1, 8, 30, tzinfo=UTC), datetime(2030, 1, 1, 12, 30, tzinfo=UTC), [7, 2, 1])
    assert table[-1][2] == [0, 0, 0]


def test_a_chart_says_in_words_what_it_shows():
    text = str(
        charts.chart(charts.sums([row(35, "succeeded", 10), row(35, "dead", 1)], NOW).bars(), "<All>", NOW, name="all")
    )
    assert '<title id="all-title">&lt;All&gt;</title>' in text
    assert "10 succeeded, 0 to go on later, 1 dead. Most in 30 min: 11, 40 min ago." in text
    high = [float(one) for one in re.findall(r'height="([\d.]+)"', text)]
    assert high == [90.9, 9.1]
    assert "style" not in text
    assert "No execution ended." in str(charts.chart(charts.sums([], NOW).bars(), "All", NOW, name="all"))


def test_the_busiest_kinds_have_lines_of_their_own():
    rows = [row(1, "succeeded", n, f"kind.{n:02}") for n in range(1, 15)]
    kinds = [kind for kind, _ in charts.sums(rows, NOW).by_kind()]
    assert kinds == [f"kind.{n:02}" for n in range(14, 4, -1)]


def test_layers_follow_the_longest_way():
    steps = [step("a"), step("b", ["a"]), step("c", ["a", "gone"]), step("d", ["b", "c"]), step("e", ["a", "d"])]
    assert [[one.name for one in layer] for layer in graph.layers(steps)] == [["a"], ["b", "c"], ["d"], ["e"]]


def test_a_layer_is_ordered_so_that_edges_do_not_cross():
    steps = [step("a"), step("b"), step("x", ["b"]), step("y", ["a"])]
    assert [[one.name for one in layer] for layer in graph.layers(steps)] == [["a", "b"], ["y", "x"]]


def test_a_drawing_has_each_step_each_edge_and_each_undo():
    steps = [
        step("charge", undo="refund", undo_state="succeeded"),
        step("<ship>", ["charge"], "blocked", undo="unship"),
    ]
    text = str(graph.draw(steps, lambda path: f"/ops{path}"))
    assert text.count('class="edge') == 1
    assert re.findall(r'<a href="([^"]+)">', text) == [
        "/ops/jobs/charge",
        "/ops/jobs/charge-undo",
        "/ops/jobs/&lt;ship&gt;",
    ]
    assert re.findall(r'class="node ([^"]+)"', text) == [
        "n-succeeded", "n-undo n-succeeded", "n-blocked", "n-undo n-not-begun",
    ]  # fmt: skip
    assert "<ship>" not in text
    assert "2 steps in 2 layers" in text


def test_what_is_too_large_or_too_small_is_not_drawn():
    assert graph.draw([step("a")], str) == ""
    assert graph.draw([step(f"s{n}") for n in range(graph.MOST + 1)], str) == ""
    assert graph.draw([step(f"s{n}") for n in range(graph.MOST)], str) != ""


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    if job.payload.get("fails"):
        raise Permanent("no")


@handler("contact.sync")
async def sync(job: Job[dict]) -> None: ...


async def test_what_workers_did_is_on_the_page(database):
    app = Resilient(database, handlers=[push, sync], providers=[Provider(name="crm", base_url="https://crm.example")])
    await app.ready()
    ann = browser(app)
    assert "Nothing that ended within 48 hours has been added up." in (await ann.get("/")).text
    for payload in ({}, {}, {"fails": True}):
        await app.enqueue(push, payload, resource_key="crm/acct-1")
    await app.enqueue(sync, {}, resource_key="crm/acct-1")
    await app.worker().drain()
    charts.RECENT.clear()
    page = await ann.get("/")
    assert "3 succeeded 0 to go on later 1 dead most in 30 min: 4" in page.text
    assert [a["aria-labelledby"].split()[0] for t, a in page.tags if t == "svg"] == [
        "throughput-title", "throughput-0-title", "throughput-1-title",
    ]  # fmt: skip
    assert "contact.push 2 0 1 contact.sync 1 0 0" in re.sub(
        r"contact\.(push|sync) contact\.\1 .*?ago\. ", r"contact.\1 ", page.text
    )
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert "2 succeeded 0 to go on later 1 dead" in (await ann.get("/jobs?kind=contact.push")).text
    assert "3 succeeded 0 to go on later 1 dead" in (await ann.get("/account/crm")).text
    assert "Throughput" not in (await ann.get("/account/crm/acct-1")).text
    await app.close()


async def test_what_is_older_than_an_hour_is_read_once_and_counts_all_the_same(database, clock, monkeypatch):
    reads, read = [], charts.throughput

    def counted(c, d, since=None, **options):
        reads.append(since)
        return read(c, d, since, **options)

    monkeypatch.setattr(charts, "throughput", counted)
    app = Resilient(database, handlers=[push], clock=clock.now)
    await app.ready()
    ann = browser(app)
    for hours in (20, 1, 0):
        await app.database.transaction(
            add, "w", {Series("contact.push", "crm", "succeeded"): 5}, clock.now() - timedelta(hours=hours)
        )
    assert "15 succeeded" in (await ann.get("/")).text
    await app.database.transaction(add, "w", {Series("contact.push", "crm", "dead"): 7}, clock.now())
    assert "0 dead" in (await ann.get("/")).text, "it is ten seconds old at most"
    charts.RECENT[app.database].read_at = -charts.FRESH
    pages = await asyncio.gather(ann.get("/"), ann.get("/account/crm"))
    assert ["15 succeeded 0 to go on later 7 dead" in page.text for page in pages] == [True, True]
    assert reads[0] is None
    assert [clock.now() - one <= timedelta(hours=1.5) for one in reads[1:]] == [True], "one reading for both pages"
    clock.advance(hours=40)
    charts.RECENT[app.database].read_at = -charts.FRESH
    assert "10 succeeded 0 to go on later 7 dead" in (await ann.get("/")).text, "what is two days old is gone"
    await app.close()


def test_what_is_ahead_is_not_called_an_hour_less():
    def ahead(**far):
        return re.sub("<[^>]*>", "", words.ago(NOW + timedelta(**far), NOW))

    assert ahead(hours=5, minutes=58) == "in 6 h"
    assert ahead(hours=2, seconds=-1) == "in 2 h"
    assert [ahead(minutes=n) for n in (1, 59, 60, 89, 90)] == ["in 1 min", "in 59 min", "in 1 h", "in 1 h", "in 2 h"]
    assert [ahead(seconds=n) for n in (59, 89, 3_599)] == ["in 59 s", "in 1 min", "in 1 h"]
    assert [ahead(hours=n) for n in (23, 35, 36)] == ["in 23 h", "in 1 d", "in 2 d"]
    assert ahead(hours=-5, minutes=-58) == "5 h ago"


def test_short_times_and_what_a_change_brought_in_words():
    assert [words.took(one) for one in (0.0004, 0.25, 1.44, 125)] == ["0 ms", "250 ms", "1.4 s", "2 min 5 s"]
    outcome = {
        "changed": 3,
        "too_late": 0,
        "created": True,
        "version": 2,
        "fields": ["priority", "tags"],
        "error": "no",
    }
    assert words.brought(outcome) == "3 changed, created, version 2, fields: priority tags, error: no"
    assert words.brought({"changed": 0}) == "nothing"


def test_a_life_is_drawn_with_its_runs():
    at = [NOW + timedelta(seconds=n) for n in range(0, 101, 10)]
    info = SimpleNamespace(
        created_at=at[0], started_at=at[8], finished_at=at[10], state=SimpleNamespace(value="succeeded")
    )
    attempts = [SimpleNamespace(started_at=at[1], finished_at=at[2], decision="retry")]
    text = str(charts.lifeline(info, attempts, NOW))
    assert re.findall(r'class="c-(\w+)" x="([\d.]+)" y="2" width="([\d.]+)"', text) == [
        ("again", "100.0", "100.0"), ("well", "800.0", "200.0"),
    ]  # fmt: skip
    assert "2 runs in 1 min 40 s, 30 s of them running" in text
    new = SimpleNamespace(created_at=NOW, started_at=None, finished_at=None, state=SimpleNamespace(value="ready"))
    assert charts.lifeline(new, [], NOW) == ""


def test_ids_in_a_sentence_lead_to_their_jobs():
    one = "0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55"
    assert words.prose({}, f"<waits> for {one}.", lambda path: f"/ops{path}") == (
        f'&lt;waits&gt; for <a href="/ops/jobs/{one}">{one}</a>.'
    )
    assert words.prose({}, "x" * 50, str) == "x" * 50


async def test_no_page_waits_for_two_days_to_be_added_up(database, monkeypatch):
    app = Resilient(database, handlers=[push])
    await app.ready()
    await app.database.transaction(add, "w", {Series("contact.push", "crm", "succeeded"): 5}, datetime.now(UTC))
    ann = browser(app)
    monkeypatch.setattr(charts, "WAIT", 0.0)
    assert "Two days are being added up" in (await ann.get("/")).text
    await charts.RECENT[app.database]._task
    assert "5 succeeded" in (await ann.get("/")).text
    await app.close()
