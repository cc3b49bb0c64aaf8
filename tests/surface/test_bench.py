"""The benches measure what they say, on both databases, and leave nothing behind."""

import json
import os
import time
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from resilient.core.errors import DatabaseUnreachable, SetupError
from resilient.surface.bench.command import app
from resilient.surface.bench.cpu import postmaster, server_cpu
from resilient.surface.bench.crew import BenchFailed, run_crew
from resilient.surface.bench.figures import milliseconds, percentile, rate
from resilient.surface.scratch import scratch

# -- figures -------------------------------------------------------------------------------------------------


def test_a_percentile_is_a_measured_value():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


def test_figures_have_their_units():
    assert milliseconds([0.0012, 0.0034], "x_") == {"x_p50_ms": 1.2, "x_p99_ms": 3.4}
    assert rate(1000, 0.3) == 3333.3


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


def test_a_crew_starts_together_and_answers_with_its_cpu():
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
        found = c.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", (place.schema,)).fetchone()
    assert found == (0,)


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
    found = bench("floor", "--database", empty_url, "--jobs", 20_000, "--workers", 2, "--json")
    assert found["jobs_per_second"] > 100
    assert found["enqueue_many_per_second"] > 100
    assert 0 < found["pickup_p50_ms"] <= found["pickup_p99_ms"]
    assert found["cpu_seconds"] > 0


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


def assert_share(found):
    """It is what it says. How large it is, is the machine's word: the two were measured one after the other."""
    share = found["jobs_per_second"] / found["floor_per_second"]
    assert found["share_of_floor"] == pytest.approx(share, abs=0.002)
    assert share > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_drain(empty_url, workers):
    options = ["--jobs", 600, "--resources", 30, "--workers", workers, "--concurrency", 20, "--limits"]
    found = bench("drain", "--database", empty_url, *options, "--with-floor", "--json")
    assert found["jobs_per_second"] == pytest.approx(600 / found["seconds"], rel=0.01)
    assert_share(found)
    assert found["useless_executions"] == 0
    assert found["cpu_seconds"] >= found["worker_cpu_seconds"] > 0


@pytest.mark.slow
def test_drain_past_an_account_that_is_down(empty_url):
    found = bench("drain", "--database", empty_url, "--jobs", 500, "--resources", 10, "--blocked", 2000, "--json")
    assert found["useless_executions"] <= 1


@pytest.mark.slow
def test_enqueue(empty_url):
    found = bench("enqueue", "--database", empty_url, "--jobs", 300, "--with-floor", "--json")
    assert found["jobs_per_second"] > 0
    assert found["single_p50_ms"] <= found["single_p99_ms"]
    assert_share(found)


@pytest.mark.slow
def test_pickup(empty_url):
    found = bench("pickup", "--database", empty_url, "--jobs", 20, "--with-floor", "--json")
    assert 0 <= found["p50_ms"] <= found["p99_ms"]
    assert found["p50_ms"] <= found["from_call_p50_ms"]
    assert 0 <= found["new_account_p50_ms"] <= found["new_account_p99_ms"]
    assert found["idle_cpu_percent"] < 20
    assert found["useless_executions"] == 0


@pytest.mark.slow
def test_http(empty_url):
    found = bench("http", "--database", empty_url, "--jobs", 60, "--concurrency", 10, "--json")
    assert 0 < found["share_of_bare"] < 3
    assert found["bare_per_second"] <= 10 / 0.05 * 1.01
    assert found["useless_executions"] == 0
