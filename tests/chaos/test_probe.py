"""At most one probe for each half-open circuit, over all processes."""

from __future__ import annotations

import time

import history
from harness import new, put, unfinished, wait

OPTIONS = ("--lease", "5", "--first-open", "1", "--concurrency", "8")


def outage(database, crew, provider, *options, seconds=5.0):
    """Three workers, three accounts, a provider that is down for a while; the ids of the jobs."""
    for _ in range(3):
        crew.start(database, "--provider", provider.url, *OPTIONS, *options)
    warm = put(database, *(new(key=f"p/{n % 3}", payload={"n": n}) for n in range(30)))
    wait(lambda: not unfinished(database), about=crew.said)
    provider.down(seconds)
    began = time.monotonic()
    ids = put(database, *(new(key=f"p/{n % 3}", payload={"n": n}, max_attempts=None) for n in range(100, 190)))
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return warm + ids


def test_a_half_open_circuit_has_one_probe(postgres, crew, provider):
    ids = outage(postgres, crew, provider)
    wait(lambda: not unfinished(postgres), 30, about=crew.said)
    crew.stop()
    arrivals = provider.arrivals()
    changes = history.rows(postgres, "SELECT key, new FROM circuits")
    assert ("p", "half_open") in {tuple(row) for row in changes}
    assert sum(row.new == "half_open" for row in changes) >= 3
    broken = history.check(postgres, crew.log, committed=ids) + history.circuits(postgres, arrivals)
    assert broken + history.delivered(postgres, arrivals) + crew.stranded() == []


def test_the_checker_catches_an_engine_that_elects_nobody(postgres, crew, provider):
    outage(postgres, crew, provider, "--mutant", "no_election", seconds=4.0)
    crew.close()
    broken = history.circuits(postgres, provider.arrivals())
    assert any("requests in generation" in line for line in broken), broken
