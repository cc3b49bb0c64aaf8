"""The benches measure what they say, on both databases, and leave nothing behind."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from xml.dom import minidom

import psycopg
import pytest
from typer.testing import CliRunner

from resilient import DatabaseUnreachable, SetupError
from resilient.surface.bench import table as table_of
from resilient.surface.bench.command import app
from resilient.surface.bench.crew import BenchFailed, milliseconds, percentile, postmaster, rate, run_crew, server_cpu
from resilient.surface.bench.growth import grown
from resilient.surface.bench.metered import METERS
from resilient.surface.bench.throttle import markdown
from resilient.surface.scratch import scratch
from tests.benchmarks.bench_throttle import TARGETS, misses

_get_context = multiprocessing.get_context
_IMPORTED = (
    "resilient.surface.bench.command", "resilient.surface.bench.floor_postgresql", "resilient.surface.bench.growth",
    "resilient.surface.bench.floor_sqlite", "resilient.surface.bench.http", "resilient.surface.bench.jobs",
    "resilient.surface.bench.throttle", "resilient.engine.run.worker", "resilient.engine.gates.gate",
    "resilient.wire.requests.transport", "sqlalchemy.dialects.postgresql.psycopg", "alembic.command",
    "opentelemetry.sdk.trace", "tests.surface.test_bench",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _crews_of_one_import(monkeypatch):
    """Processes of a bench are forked from one that has imported the engine: each would need a second of CPU for it."""
    server = _get_context("forkserver")
    server.set_forkserver_preload([*_IMPORTED])
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: server if method == "spawn" else _get_context(method)
    )


@pytest.fixture
def spawned(_crews_of_one_import, monkeypatch):
    """As they are elsewhere."""
    monkeypatch.setattr(multiprocessing, "get_context", _get_context)


# -- figures -------------------------------------------------------------------------------------------------


def test_a_percentile_is_a_measured_value():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


def test_figures_have_their_units():
    assert milliseconds([0.0012, 0.0034], "x_") == {"x_p50_ms": 1.2, "x_p99_ms": 3.4}
    assert rate(1000, 0.3) == 3333.3


FREE = {"jobs_per_second": 1000.0, "share_of_floor": 0.4, "floor_per_second": 2500.0}
SINGLE = {"p50_ms": 0.5, "cpu_us": 100.0}
CANNED = {
    "drain": FREE | {"useless_executions": 1},
    "enqueue": FREE
    | {f"single_{k}": v for k, v in SINGLE.items()}
    | {f"single_sync_{k}": v for k, v in SINGLE.items()}
    | {"single_floor_cpu_us": 50.0},
    "pickup": {"p50_ms": 1.5, "p99_ms": 3.0, "floor_p50_ms": 1.0, "floor_p99_ms": 1.5, "idle_cpu_percent": 0.5},
    "http": {"jobs_per_second": 1000.0, "share_of_bare": 0.9, "cpu_ms_a_request": 0.3, "bare_cpu_ms_a_request": 0.2},
}


def test_the_table_has_each_figure_of_each_run_beside_what_is_asked_of_it(monkeypatch):
    asked = []

    def run(bench, url):
        name = bench.split()[0]
        asked.append((bench, url))
        return CANNED[name]

    monkeypatch.setattr(table_of, "_run", run)
    first, dashes, *lines = table_of.table("postgresql://x", scale=0.01, rounds=2)
    assert first == "| | run 1 | run 2 | wanted | |"
    assert len(dashes.split("|")) == len(first.split("|"))
    assert len(lines) == len(table_of.LINES)
    once = "0.0 % slower, 1 useless"
    assert lines[4] == f"| drain behind 100,000 blocked | {once} | {once} | 4 % slower, 1 useless | met |"
    assert lines[-1].endswith("| **missed** |")  # 0.9 of bare
    assert ("drain --jobs 200 --with-floor", None) in asked  # SQLite, in files of its own
    assert sum(bench.startswith("enqueue") for bench, _ in asked) == 2  # once a run, for three lines


def test_what_is_reached_in_one_run_only_is_said_so():
    line = table_of.Line("x", "drain", str, "0.35", lambda f: f["share_of_floor"] >= 0.35)
    runs = [{"share_of_floor": share} for share in (0.4, 0.3)]
    verdicts = [table_of.verdict(line, some) for some in (runs, runs[:1], runs[1:])]
    assert verdicts == ["met 1 of 2 times", "met", "**missed**"]


def test_the_statement_that_grows_is_the_one_that_takes_most_time_more():
    before, after = {"a": 1.0, "b": 0.1}, {"a": 1.5, "b": 0.3}
    assert grown(before, after) == "a (1.5 times)"
    assert grown({"b": 0.1}, after) == "a (not there before)"
    assert grown(before, {}) == "no statement was seen"


# -- processes -----------------------------------------------------------------------------------------------


def counting(start, number, base):
    ready = time.perf_counter()  # processes of a machine share it
    start()
    return {"number": number, "value": base + number, "ready": ready, "finished_at": time.perf_counter()}


def failing(start):
    start()
    raise ValueError("no good")


def dying(start):
    start()
    os._exit(3)


def test_a_crew_starts_together_and_answers_with_its_cpu(spawned):
    fed = []
    crew = run_crew(counting, 2, 10, numbered=True, meanwhile=lambda: fed.append(time.perf_counter()))
    assert [a["value"] for a in crew.answers] == [10, 11]
    assert (len(fed), crew.total("number")) == (1, 1)
    assert 0 <= crew.cpu < 1
    end, ready = (max(a[name] for a in crew.answers) for name in ("finished_at", "ready"))
    assert max(0.0, end - fed[0]) <= crew.seconds < end - ready  # from the start that all share, not from their imports
    assert crew.memory > 1


def one_dies(start, number):
    start()
    if number:
        os._exit(3)
    time.sleep(60)


def test_a_crew_does_not_wait_for_the_rest_when_one_fails():
    with pytest.raises(BenchFailed, match="died"):
        run_crew(one_dies, 2, numbered=True)


def test_a_process_that_cannot_be_started_is_what_the_error_says(monkeypatch):
    process, crew = multiprocessing.get_context("spawn").Process, []
    real = process.start

    def start(self):
        if crew:
            raise BlockingIOError("no more processes")
        crew.append(self)
        real(self)

    monkeypatch.setattr(process, "start", start)
    with pytest.raises(BlockingIOError, match="no more processes"):
        run_crew(one_dies, 3, numbered=True)
    assert crew[0].exitcode is not None


@pytest.mark.parametrize(("task", "message"), [(failing, "no good"), (dying, "died")])
def test_a_crew_that_fails_says_so(task, message):
    with pytest.raises(BenchFailed, match=message):
        run_crew(task, 1)


LEAST = 0.02  # seconds of CPU that such a sum takes anywhere


def test_the_servers_cpu_counts_what_ended_connections_used(postgres_server):
    with postgres_server.connect() as c:
        pid = postmaster(c)
        before = server_cpu(pid)
        with postgres_server.connect() as other:
            other.execute("SELECT sum(i) FROM generate_series(1, 2000000) i")
        ended = time.monotonic() + 30  # the process ends a moment after its connection
        while (used := server_cpu(pid) - before) <= LEAST and time.monotonic() < ended:
            time.sleep(0.01)
    assert LEAST < used < 10
    assert server_cpu(None) is None


# -- places --------------------------------------------------------------------------------------------------


def test_a_scratch_file_lies_beside_the_named_one_and_goes(tmp_path):
    with scratch(f"sqlite:///{tmp_path}/app.db", "bench") as place:
        assert place.is_sqlite
        assert place.path.parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_schema_goes_with_all_it_holds(postgres_url):
    with scratch(postgres_url, "bench") as place, psycopg.connect(place.conninfo, autocommit=True) as c:
        c.execute(f"CREATE TABLE {place.schema}.t (i int)")
    with psycopg.connect(place.conninfo) as c:
        figures = c.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", (place.schema,)).fetchone()
    assert figures == (0,)


@pytest.mark.parametrize(
    "write", [lambda url: url + "&prepare_threshold=none", lambda url: url.replace("ql://", "://")]
)
def test_a_place_takes_every_address_that_an_app_takes(postgres_url, write):
    with scratch(write(postgres_url), "bench") as place, psycopg.connect(place.conninfo) as c:
        assert c.execute("SELECT to_regnamespace(%s) IS NULL", [place.schema]).fetchone() == (False,)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("what", SetupError, "not a database address"),
        ("mysql://host/db", SetupError, "not supported"),
        ("sqlite:////nowhere/at/all/app.db", SetupError, "/nowhere/at/all does not exist"),
        ("postgresql://user:secret@127.0.0.1:1/x", DatabaseUnreachable, "127.0.0.1:1/x does not answer"),
        ("postgresql://127.0.0.1:1/x?password=secret", DatabaseUnreachable, "127.0.0.1:1/x.* does not answer"),
    ],
)
def test_an_impossible_place_is_explained_without_its_password(url, error, message):
    with pytest.raises(error, match=message) as raised, scratch(url, "bench"):
        pass
    assert "secret" not in str(raised.value)


# -- the command ---------------------------------------------------------------------------------------------


def bench(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_floor(empty_url, backend):
    figures = bench("floor", "--database", empty_url, "--jobs", 2_000, "--workers", 2, "--json")
    assert figures["jobs_per_second"] > 100
    assert figures["enqueue_many_per_second"] > 100
    assert 0 < figures["pickup_p50_ms"] <= figures["pickup_p99_ms"]
    assert figures["cpu_seconds"] > 0


def test_figures_for_people(sqlite_url):
    result = CliRunner().invoke(app, ["floor", "--database", sqlite_url, "--jobs", "50"])
    assert "jobs per second" in result.stdout


def test_a_bench_that_cannot_run_says_why_with_status_2(tmp_path):
    result = CliRunner().invoke(app, ["floor", "--database", f"sqlite:///{tmp_path}/no/app.db"])
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_no_bench_leaves_a_trace(sqlite_url):
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    bench("floor", "--database", sqlite_url, "--jobs", 50, "--json")
    assert [p.name for p in path.parent.iterdir()] == ["app.db"]


# -- with the engine -----------------------------------------------------------------------------------------


def assert_share(figures):
    """It is what it says. How large it is, is the machine's word: the two were measured one after the other."""
    share = figures["jobs_per_second"] / figures["floor_per_second"]
    assert figures["share_of_floor"] == pytest.approx(share, abs=0.002)
    assert share > 0


# Each process that a bench starts costs a second of CPU before it begins, and most benches are the same on both
# databases but for the address: so the dearest run on one, and `make proof` measures on the other, too.


@pytest.mark.slow
def test_drain(postgres_url):
    options = ["--jobs", 600, "--resources", 30, "--workers", 2, "--concurrency", 20, "--limits"]
    figures = bench("drain", "--database", postgres_url, *options, "--with-floor", "--json")
    assert figures["jobs_per_second"] == pytest.approx(600 / figures["seconds"], rel=0.01)
    assert_share(figures)
    assert figures["useless_executions"] == 0
    assert figures["cpu_seconds"] >= figures["worker_cpu_seconds"] > 0


@pytest.mark.slow
def test_overhead(sqlite_url):
    figures = bench("overhead", "--database", sqlite_url, "--jobs", 300, "--resources", 10, "--rounds", 1, "--json")
    for name in ("metrics", "all_on", "every_trace"):
        rates = figures[f"jobs_per_second_with_{name}"], figures["jobs_per_second_without"]
        assert figures[f"share_with_{name}"] == pytest.approx(rates[0] / rates[1], abs=0.002)
        assert figures[f"share_by_cpu_with_{name}"] > 0
    assert 0 < figures["counting_nanoseconds_a_job"] < 1e6


@pytest.mark.slow
def test_drain_past_an_account_that_is_down(empty_url):
    figures = bench("drain", "--database", empty_url, "--jobs", 500, "--resources", 10, "--blocked", 2000, "--json")
    assert figures["useless_executions"] <= 1


@pytest.mark.slow
def test_enqueue(empty_url):
    figures = bench("enqueue", "--database", empty_url, "--jobs", 300, "--with-floor", "--json")
    assert figures["jobs_per_second"] > 0
    assert figures["single_p50_ms"] <= figures["single_p99_ms"]
    assert_share(figures)


@pytest.mark.proof("test_drain and the other benchmarks")
@pytest.mark.slow
def test_pickup(empty_url):
    figures = bench("pickup", "--database", empty_url, "--jobs", 20, "--with-floor", "--json")
    assert 0 <= figures["p50_ms"] <= figures["p99_ms"]
    assert figures["p50_ms"] <= figures["from_call_p50_ms"]
    assert 0 <= figures["new_account_p50_ms"] <= figures["new_account_p99_ms"]
    assert figures["idle_cpu_percent"] < 20
    assert figures["useless_executions"] == 0


@pytest.mark.slow
def test_http(sqlite_url):
    figures = bench("http", "--database", sqlite_url, "--jobs", 60, "--concurrency", 10, "--json")
    assert 0 < figures["share_of_bare"] < 3
    assert figures["bare_per_second"] <= 10 / 0.05 * 1.01
    assert figures["useless_executions"] == 0


@pytest.mark.proof("test_throttle_prints_one_table")
def test_throttle_counts_what_a_provider_refuses_of_each_side_and_draws_it(sqlite_url, tmp_path):
    picture = tmp_path / "throttle.svg"
    figures = bench(
        "throttle", "--database", sqlite_url, "--provider", "bucket", "--scale", 20, "--svg", picture, "--json"
    )
    for side in ("engine", "tenacity", "adaptive"):
        assert figures[side]["sent"] == figures[side]["accepted"] + figures[side]["refused"]
        assert figures[side]["accepted"] > 0
        assert sum(figures[side]["each_second"]["accepted"]) == figures[side]["accepted"]
    assert figures["engine"]["refused"] < figures["tenacity"]["refused"]
    assert minidom.parse(str(picture)).documentElement.tagName == "svg"  # noqa: S318 - ours


def test_the_targets_of_throttle_are_of_its_meters():
    assert TARGETS.keys() <= METERS.keys()
    good = {"cold": 3, "later_share": 0.003, "goodput": 0.92, "executions_later": 1.02, "fairness": 1.0}
    assert misses(good, TARGETS["sliding"]) == []
    assert misses(good | {"cold": 11, "goodput": 0.5}, TARGETS["sliding"]) == ["cold", "goodput"]


def test_throttle_prints_one_table():
    numbers = {"cold": 3, "later_share": 0.0036, "goodput": 0.912, "executions": 1.07, "sent": 1234}
    row = {"provider": "5/s", "seconds": 120.0, "load": 0.4, "engine": numbers | {"executions_later": None}}
    head, line, cells = markdown([row]).splitlines()
    assert head.count("|") == line.count("|") == cells.count("|")
    assert cells == "| 5/s | engine | 3 | 0.36% | 0.91 |  | 1.07 |  | 1,234 | 0.4 |"


def test_throttle_knows_its_providers():
    result = CliRunner().invoke(app, ["throttle", "--provider", "nobody"])
    assert result.exit_code == 2
    assert "sliding" in result.output
