"""The figures about many accounts and many processes, in small, counted by a provider."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


async def figures(script, *arguments, patience=200):
    """What a benchmark prints."""
    command = [sys.executable, BENCHMARKS / script, *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(child.communicate(), patience)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0, err.decode()[-2000:]
    return json.loads(out)


@pytest.mark.parametrize(("url", "how"), [("sqlite_url", "503"), ("postgres_url", "reset")])
async def test_an_outage_of_a_hundred_accounts(request, url, how):
    found = await figures(
        "bench_outage.py", "--database", request.getfixturevalue(url), "--how", how, "--accounts", 100, "--down", 4,
        "--concurrency", 10, "--first-open", 1, "--ramp", 2, "--patience", 80,
    )  # fmt: skip
    assert (found["lost"], found["repeated"], found["clean_exits"]) == (0, 0, 2)
    assert found["until_stopped"] + found["probes"] <= 60  # of two processes with 20 slots, and 200 jobs that wait
    assert all(many <= max(3, 2 << (tenth + 1)) for tenth, many in enumerate(found["peak"])), found  # no herd


async def test_a_limit_shared_by_processes(sqlite_url):
    limit = ("--rate", 40, "--per", 2, "--seconds", 4, "--workers", 3)  # the benchmark's own default is eight
    found = await figures("bench_limits.py", "--database", sqlite_url, *limit)
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert found["most"] <= 44  # a busy machine may hold up what was sent; each of them alone may send 40
