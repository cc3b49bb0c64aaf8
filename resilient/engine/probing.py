"""Probes that requests elect: for circuits off their job's own path, which no claim ever looks at.

A request may go to an endpoint below its job's key, through another resource altogether, or (a token's refresh) have no
job. When a circuit there is due, the request that comes first becomes its probe, in a short transaction of its own; the
others are refused as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.admission import refusal, stop_of
from resilient.core.resource_key import is_below, path
from resilient.store import circuits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from resilient.core.admission import ResourceFacts
    from resilient.core.policy import Policies
    from resilient.engine.reporter import Reporter
    from resilient.engine.snapshot import Snapshot
    from resilient.store.database import Database

Elected = tuple[tuple[str, int], ...]  # keys, and the generations of their circuits


class Probing:
    """The elections of one worker; ``is_probe`` says whether facts and probes of a job belong together."""

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        owner: str | None,
        snapshot: Snapshot,
        reporter: Reporter,
        is_probe: Callable[[ResourceFacts, Collection[str]], bool],
    ) -> None:
        self._database, self._policies, self._owner = database, policies, owner or "?"
        self._snapshot, self._reporter, self._is_probe = snapshot, reporter, is_probe

    def due(self, key: str, own: str, probes: Collection[str]) -> bool:
        """Whether every gate of the path lets a probe through, and some circuit off the job's own path wants one."""
        now, due = self._snapshot.now(), False
        for level in path(key):
            facts = self._snapshot.known.get(level)
            if facts is None or facts.calm:
                continue
            if is_below(own, level):
                if refusal(facts, now, probing=self._is_probe(facts, probes)) is not None:
                    return False
            elif stop_of(facts, now) is not None:
                return False
            else:
                due = due or facts.breaker.state != "closed"
        return due

    async def elect(self, key: str, own: str) -> Elected:
        """Become the probe of the circuits off the job's own path; nothing if somebody else was faster."""
        levels = [level for level in path(key) if not is_below(own, level)]
        found, mine = await self._database.transaction(circuits.elect_for_request, levels, self._owner, self._policies)
        for facts in found:
            self._snapshot.put(facts)
        return tuple((facts.key, facts.breaker.generation) for facts in found if facts.key in mine)

    def give_back(self, key: str, generation: int) -> None:
        """Its request or its job is over; if it has decided nothing, somebody else may try."""
        facts = self._snapshot.known.get(key)
        if facts is not None and facts.breaker.state == "half_open" and facts.breaker.generation == generation:
            self._reporter.tally.probe(key, generation, "neutral", None, None)
            self._reporter.wake(0.0)
