"""Handlers that misbehave: what they do ends their own job, and nothing else."""

from __future__ import annotations

import signal
import time

import history
import pytest
from harness import new, put, states, unfinished, wait

from tests.helpers import LIMIT

NOTHING = {"seconds": 0}


def of(crew, ids, event="start"):
    return [line for line in crew.runs(event) if line["job"] in ids]


def test_a_handler_that_blocks_the_loop_is_named_and_costs_nobody_a_lease(postgres, crew):
    """It blocks for longer than the lease; the heartbeat goes on beside it."""
    neighbours = put(postgres, *(new("work") for _ in range(3)))
    child = crew.start(postgres, "--lease", "1", "--slow", "0.5")
    wait(lambda: len(of(crew, neighbours)) == 3)
    blocking = put(postgres, new("blocks", payload={"seconds": 2.5}))
    wait(lambda: unfinished(postgres) == 0, about=crew.said)
    crew.stop(child)
    assert "blocked" in crew.said()
    assert "time.sleep" in crew.said()
    assert all(row.rescues == 0 and row.executions == 1 for row in states(postgres, neighbours + blocking))
    assert history.check(postgres, crew.log, committed=neighbours + blocking) == []


@pytest.mark.parametrize("kind", ["hangs", "stubborn", "hangs_thread"])
def test_a_handler_that_never_returns_ends_by_its_timeout_and_the_worker_stops(postgres, crew, kind):
    """Also one that swallows its cancellation, and a thread, which cannot be interrupted."""
    bad, good = put(postgres, *(new(kind, max_attempts=1) for _ in range(2))), put(postgres, new("work"), new("thread"))
    child = crew.start(postgres, "--concurrency", "4", "--grace", "1")
    wait(lambda: unfinished(postgres) == 0, 60, about=crew.said)
    assert [(row.state, row.last_error_kind) for row in states(postgres, bad)] == [("dead", "timeout")] * 2
    more = put(postgres, new("work"), new("thread"))
    wait(lambda: unfinished(postgres) == 0, 60, about=crew.said)
    child.terminate()
    assert child.wait(LIMIT) == 0, crew.said()
    assert history.check(postgres, crew.log, committed=bad + good + more) == []


def test_stuck_threads_burn_no_other_job(postgres, crew):
    """More jobs of a resource whose handlers hang wait for another worker, instead of hanging beside them."""
    stuck = put(postgres, *(new("hangs_thread", max_attempts=1) for _ in range(2)))
    child = crew.start(postgres, "--concurrency", "2", "--grace", "0.5")
    wait(lambda: all(row.state == "dead" for row in states(postgres, stuck)), 60)
    waiting = put(postgres, *(new("hangs_thread", max_attempts=1) for _ in range(2)), new("thread"))
    time.sleep(2.0)
    assert all(row.attempts == 0 for row in states(postgres, waiting)), crew.said()
    other = crew.start(postgres, "--concurrency", "4", "--grace", "0.5")
    wait(lambda: unfinished(postgres) == 0, 60, about=crew.said)
    assert len(of(crew, waiting)) == 3
    crew.stop(child, other)
    assert history.check(postgres, crew.log, committed=stuck + waiting) == []


def test_what_a_handler_raises_ends_its_job_only(postgres, crew):
    """SystemExit, KeyboardInterrupt and everything else that is not an Exception."""
    words = [("raises", w) for w in ("unheard", "exit", "interrupt", "close")]
    words += [("raises_thread", w) for w in ("unheard", "exit", "interrupt")]
    bad = put(postgres, *(new(kind, payload={"what": w}, max_attempts=1) for kind, w in words))
    good = put(postgres, *(new("work") for _ in range(5)))
    child = crew.start(postgres)
    wait(lambda: unfinished(postgres) == 0, about=crew.said)
    assert child.poll() is None
    assert {(row.state, row.last_error_kind) for row in states(postgres, bad)} == {("dead", "bug")}
    crew.stop(child)
    assert history.check(postgres, crew.log, committed=bad + good) == []


def test_a_job_that_kills_its_process_dies_alone(postgres, crew):
    """After its third lost worker it is dead; those beside it were lost once with it and then run apart from it."""
    killer = put(postgres, new("kills", key="p/1"))
    neighbours = put(postgres, *(new("neighbour", key=f"p/{n % 3}") for n in range(9)))
    deaths, began = 0, time.monotonic()
    while unfinished(postgres):
        child = crew.start(postgres, "--lease", "3", "--concurrency", "6", "--until-idle")
        code = child.wait(LIMIT)
        deaths += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), crew.said(child)
        assert time.monotonic() - began < 150, crew.said()
    assert deaths == 3
    (row,) = states(postgres, killer)
    assert (row.state, row.last_error_kind, row.rescues) == ("dead", "lost_worker", 3)
    assert all(row.state == "succeeded" and row.rescues <= 1 for row in states(postgres, neighbours))
    assert history.check(postgres, crew.log, committed=killer + neighbours) == []


def test_a_leak_of_some_megabytes_is_the_handlers_own(postgres, crew):
    """The worker goes on with a heap that grows by 200 MB."""
    leaks = put(postgres, *(new("leaks", payload={"bytes": 5_000_000}) for _ in range(40)))
    crew.finish(postgres)
    assert {row.state for row in states(postgres, leaks)} == {"succeeded"}
    assert history.check(postgres, crew.log, committed=leaks) == []


@pytest.mark.parametrize("pool", [1, 2])
def test_an_exhausted_pool_slows_and_does_not_lock(postgres, crew, pool):
    """Fifty jobs at once want a connection each for their progress, five times."""
    busy = put(postgres, *(new(("progress", "progress_thread")[n % 2]) for n in range(50)))
    crew.finish(postgres, "--pool-size", str(pool), "--concurrency", "50", "--lease", "5", timeout=120)
    assert {row.state for row in states(postgres, busy)} == {"succeeded"}
    assert all(row.executions == 1 for row in states(postgres, busy))
    assert history.check(postgres, crew.log, committed=busy) == []
