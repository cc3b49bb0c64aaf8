"""At most one probe for each half-open circuit, over all processes."""

from __future__ import annotations

import history
import pytest
from harness import new, put, unfinished, wait

pytestmark = pytest.mark.proof("the probes of the simulation")

OPTIONS = ("--lease", "5", "--first-open", "1", "--concurrency", "8")
LONG = 300.0  # seconds: it is ended before
PROBES = 3


def outage(database, crew, provider, *options, enough):
    """Three workers, three accounts, a provider that is down until it was enough; the ids of the jobs."""
    for _ in range(3):
        crew.start(database, "--provider", provider.url, *OPTIONS, *options)
    warm = put(database, *(new(key=f"p/{n % 3}", payload={"n": n}) for n in range(30)))
    wait(lambda: not unfinished(database), about=crew.said)
    provider.down(LONG)
    ids = put(database, *(new(key=f"p/{n % 3}", payload={"n": n}, max_attempts=None) for n in range(100, 190)))
    wait(enough, about=crew.said)
    provider.down(0)
    return warm + ids


def test_a_half_open_circuit_has_one_probe(postgres, crew, provider):
    def probes():
        """The provider's own circuit among them."""
        keys = [row.key for row in history.rows(postgres, "SELECT key FROM circuits WHERE new = 'half_open'")]
        return len(keys) >= PROBES and "p" in keys

    ids = outage(postgres, crew, provider, enough=probes)
    wait(lambda: not unfinished(postgres), about=crew.said)
    crew.stop()
    arrivals = provider.arrivals()
    broken = history.check(postgres, crew.log, committed=ids) + history.circuits(postgres, arrivals)
    assert broken + history.delivered(postgres, arrivals) + crew.stranded() == []


def test_the_checker_catches_an_engine_that_elects_nobody(postgres, crew, provider):
    def caught():
        return any("requests in generation" in line for line in history.circuits(postgres, provider.arrivals()))

    outage(postgres, crew, provider, "--mutant", "no_election", enough=caught)
    crew.close()
    assert caught()
