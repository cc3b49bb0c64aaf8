"""The claim: from turns to running jobs, in one transaction.

Order of locks: turns and leaves SKIP LOCKED (never waits), then ancestors, waiting, deepest first, and only those with
a cap, a job limit or a breaker that is not closed: locking the provider row for everybody cost 5/6 of the throughput.
An ancestor that sorts before a held leaf is not waited for, or two claims could wait for each other: if it is locked,
what is below it keeps its turn. What was read before such a lock is read again in a statement after it. How many jobs
may start is decided by `core.admission` (pure). Correctness is the update's match of id, state and version; the locks
only save lost races.

A job that was rescued before is claimed alone. Every taken turn is accounted for before the commit: a key with more
claimable work gets a new turn at the back, a stopped one parks, a leaf that somebody else has locked keeps its turn. So
does a key whose ready jobs are all of kinds this worker does not know; the worker passes over it for a while
(`Claimed.unknown`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.admission import Level, ResourceFacts, Stop, admit, needs_count, needs_lock, stop_of
from resilient.core.resource_key import ancestors, depth, path
from resilient.store import finishing, limits, resources, turns
from resilient.store.candidates import ClaimedJob, best_ready
from resilient.store.dialect import ID, Dialect
from resilient.store.direct import direct
from resilient.store.look import Look, is_calm, look

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.policy import Policy

MIN_RECHECK: Final = timedelta(seconds=0.05)
BATCH_ROWS: Final = 4_000  # candidates beyond ``per_key`` that a claim reads for batches


@dataclass(frozen=True, slots=True)
class Ask:
    """What a worker with free slots asks for."""

    worker_id: str
    slots: int
    kinds: Sequence[str]
    lease: timedelta
    policy: Callable[[str, Any], Policy]  # (key, override) -> policy
    roll: Callable[[], float]
    take: int = 32  # how many turns
    per_key: int = 8  # how many jobs of one key before the next key's turn
    priority: int | None = None
    low: int = 0
    oldest_first: bool = False
    skip: Sequence[str] = ()
    batches: Mapping[str, int] = field(default_factory=dict)  # kinds whose jobs share a slot, and how many of them
    careful: bool = False  # wait for nobody who holds a job or an ancestor (in an open transaction): see `patience.py`


@dataclass(slots=True)
class Claimed:
    """What a claim brought."""

    now: datetime
    jobs: list[ClaimedJob] = field(default_factory=list)  # in the order to start
    turns: list[turns.Turn] = field(default_factory=list)
    taken: int = 0  # several of one key counted
    missing: list[str] = field(default_factory=list)  # keys without a resource row: `resources.ensure` them
    unknown: list[str] = field(default_factory=list)  # keys that only hold kinds this worker does not know
    held: list[str] = field(default_factory=list)  # keys with a job or below a key that somebody holds, if careful
    stops: dict[str, Stop] = field(default_factory=dict)  # leaf to what stops it
    facts: dict[str, ResourceFacts] = field(default_factory=dict)
    probes: dict[UUID, tuple[str, ...]] = field(default_factory=dict)  # job to the keys it probes
    lost: int = 0  # candidates that somebody else got
    continued: int = 0
    unserved: int = 0  # keys whose turn came when all slots were promised
    slots: int = 0  # how many of those asked for are used


@direct
def claim(c: Connection, d: Dialect, ask: Ask) -> Claimed:
    """Take turns and claim what their resources admit; see the top of this file."""
    wanted = turns.Wanted(ask.take, ask.priority, ask.low, ask.oldest_first, ask.skip)
    seen = look(c, d, wanted, ask.per_key + 1)
    if seen is None:
        return Claimed(now=d.now(c) if d.clock else datetime.min)  # noqa: DTZ901 - nobody reads it without jobs
    return _Claim(c, d, ask, seen).run()


class _Claim:
    """One claim transaction: its steps share what they have read."""

    def __init__(self, c: Connection, d: Dialect, ask: Ask, seen: Look) -> None:
        self.c, self.d, self.ask, self.seen = c, d, ask, seen
        self.taken, self.now, self.facts, self.locked = seen.turns, seen.now, seen.facts, seen.locked
        self.missing: list[str] = []
        self.again: dict[str, int] = {}  # keys that get an ordinary turn
        self.parkings: list[turns.Parking] = []
        self.levels: dict[str, Level] = {}
        self.before: dict[str, Level] = {}
        self.kinds = frozenset(ask.kinds)
        self.mixed: set[str] = set()  # keys that also hold kinds this worker does not know

    def run(self) -> Claimed:
        leaves = self._held_leaves()
        out = Claimed(self.now, turns=self.taken, taken=self.seen.taken, missing=self.missing, facts=self.facts)
        open_leaves = self._drop_stopped(leaves, out)
        candidates = self._candidates(open_leaves)
        open_leaves = self._drop_idle(open_leaves, candidates, out)
        open_leaves = self._lock_ancestors(open_leaves, out)
        if open_leaves:
            self._build_levels(open_leaves)
            chosen = self._admit(open_leaves, candidates, out)
            self._start(chosen, out)
        self._settle(out)
        return out

    # -- reading --------------------------------------------------------------------------------------------------

    def _held_leaves(self) -> list[turns.Turn]:
        """The taken keys whose rows are locked; the others, and those with no row or none above, keep their turns."""
        above = {a for t in self.taken for a in ancestors(t.resource_key)}
        absent = {a for a in above if a not in self.facts}
        self.missing, held = sorted(absent), []
        for t in self.taken:
            if t.resource_key not in self.locked:  # another worker's, or without a row yet: `ensure` suits both
                self.missing.append(t.resource_key)
            elif absent.isdisjoint(ancestors(t.resource_key)):
                held.append(t)
                continue
            self.again[t.resource_key] = t.priority
        return held

    def _policy(self, key: str) -> Policy:
        return self.ask.policy(key, self.facts[key].policy_override)

    def _drop_stopped(self, leaves: list[turns.Turn], out: Claimed) -> list[turns.Turn]:
        """Park what a gate stops already, before any job row is read."""
        passed, judged = [], dict[str, Stop | None]()
        for t in leaves:
            stop = None
            for key in path(t.resource_key):
                if key not in judged:
                    judged[key] = stop_of(self.facts[key], self.now)
                if (stop := judged[key]) is not None:
                    break
            if stop is None:
                passed.append(t)
            else:
                out.stops[t.resource_key] = stop
                self._park(t.resource_key, t.priority, stop)
        return passed

    def _candidates(self, leaves: Sequence[turns.Turn]) -> dict[str, list[ClaimedJob]]:
        """The best ready jobs of each key, of kinds this worker knows, one more than may be asked for, best first.

        Looked up without regard to kinds, because a key that also holds others must keep a turn (`self.mixed`).
        """
        facts = self.seen.facts
        found = {t.resource_key: self.seen.jobs.get(t.resource_key, []) for t in leaves}
        found |= self._look([t for t in leaves if not is_calm(t.resource_key, facts)], known_only=False)
        if self.ask.batches:
            found |= self._look_deeper(leaves, found)
        for key, rows in found.items():
            known = [row for row in rows if row.kind in self.kinds]
            if len(known) < len(rows):
                self.mixed.add(key)
                found[key] = known
        hidden = [t for t in leaves if t.resource_key in self.mixed and not found[t.resource_key]]
        return found | (self._look(hidden, known_only=True) if hidden else {})

    def _look_deeper(
        self, leaves: Sequence[turns.Turn], found: Mapping[str, list[ClaimedJob]]
    ) -> dict[str, list[ClaimedJob]]:
        """Where the first job is one of a batch that may be larger than what was read: as many as fill it."""
        sizes: dict[str, int] = {}
        room = BATCH_ROWS
        for key, rows in found.items():
            size = self.ask.batches.get(rows[0].kind, 0) if len(rows) > self.ask.per_key else 0
            if self.ask.per_key < size <= room:
                sizes[key] = size
                room -= size
        keys = [t for t in leaves if t.resource_key in sizes]
        return self._look(keys, known_only=False, limit=max(sizes.values(), default=0) + 1)

    def _look(self, leaves: Sequence[turns.Turn], *, known_only: bool, limit: int = 0) -> dict[str, list[ClaimedJob]]:
        kinds = self.ask.kinds if known_only else None
        return best_ready(self.c, self.d, [t.resource_key for t in leaves], limit or self.ask.per_key + 1, kinds)

    def _drop_idle(self, leaves: Sequence[turns.Turn], candidates: Mapping[str, Any], out: Claimed) -> list[turns.Turn]:
        """Keys without a candidate: drained, or only kinds this worker does not know (those keep their turn)."""
        left = []
        for t in leaves:
            if candidates.get(t.resource_key):
                left.append(t)
            elif t.resource_key in self.mixed:
                self.again[t.resource_key] = t.priority
                out.unknown.append(t.resource_key)
        return left

    def _lock_ancestors(self, leaves: list[turns.Turn], out: Claimed) -> list[turns.Turn]:
        """Lock the ancestors that need it and read them again; returns the leaves whose ancestors were locked."""
        above = {a for t in leaves for a in ancestors(t.resource_key)} - self.locked
        shared = sorted((a for a in above if needs_lock(self.facts[a], self._policy(a), self.now)), key=_lock_order)
        if not shared:
            return leaves
        last = max(map(_lock_order, self.locked))
        ahead = [a for a in shared if self.ask.careful or _lock_order(a) < last]
        if ahead:
            _, got, fresh = resources.lock_leaves(self.c, self.d, ahead)
            self.facts.update(fresh)
            self.locked.update(got)
        if behind := [a for a in shared if a not in ahead]:
            fresh = resources.lock_waiting(self.c, self.d, behind)
            self.facts.update(fresh)
            self.locked.update(fresh)
        self.now = self.d.now(self.c)
        busy = set(ahead) - self.locked
        below = {t.resource_key: t.priority for t in leaves if not busy.isdisjoint(ancestors(t.resource_key))}
        self.again |= below
        if self.ask.careful:
            out.held += below
        return [t for t in leaves if t.resource_key not in self.again]

    def _build_levels(self, leaves: Sequence[turns.Turn]) -> None:
        """Read limits and counts, in a statement after the locks."""
        keys = {k for t in leaves for k in path(t.resource_key)}
        policies = {k: self._policy(k) for k in keys}
        limited = sorted(k for k in keys if policies[k].limits)
        states = limits.read(self.c, self.d, limited) if limited else {}
        capped = sorted(k for k in keys if needs_count(self.facts[k], policies[k], self.now))
        running = resources.count_running(self.c, self.d, capped) if capped else {}
        for k in keys:
            level = Level(self.facts[k], policies[k], states.get(k, _NO_LIMITS), running.get(k, 0))
            self.levels[k] = self.before[k] = level

    # -- deciding -------------------------------------------------------------------------------------------------

    def _admit(
        self, leaves: Sequence[turns.Turn], candidates: Mapping[str, list[ClaimedJob]], out: Claimed
    ) -> list[tuple[turns.Turn, list[ClaimedJob], tuple[str, ...]]]:
        """How many jobs of each key may start; keys that have more are continued or parked.

        A job that was rescued before is claimed alone and first: it runs alone, and if it kills its process again,
        no other may be lost with it just because it waited there.
        """
        left, chosen = self.ask.slots, []
        for t in sorted(leaves, key=lambda t: not candidates[t.resource_key][0].rescues):
            key, rows = t.resource_key, candidates[t.resource_key]
            batch = self.ask.batches.get(rows[0].kind)
            most = min(self.ask.per_key, left) if batch is None else min(batch, _alike(rows)) * (left > 0)
            wanted = min(_beside_each_other(rows), most)
            if wanted <= 0:
                self.again[key] = rows[0].priority
                out.unserved += 1
                continue
            levels = [self.levels[k] for k in path(key)]
            verdict = admit(levels, wanted, self.now, self.ask.worker_id)
            for level in verdict.levels:
                self.levels[level.facts.key] = level
            if verdict.count:
                chosen.append((t, rows[: verdict.count], verdict.probes))
                used = verdict.count if batch is None else 1
                out.slots += used
                left = 0 if rows[0].rescues else left - used
            if verdict.stop is not None and verdict.count < len(rows):
                out.stops[key] = verdict.stop
                self._park(key, rows[verdict.count].priority, verdict.stop)
            elif verdict.count < len(rows):
                self.again[key] = rows[verdict.count].priority
            elif key in self.mixed:
                self.again[key] = t.priority
        return chosen

    def _park(self, key: str, priority: int, stop: Stop) -> None:
        first = spread = self.now + turns.recheck_in(self.ask.roll())
        if stop.until is not None:
            first = min(first, max(stop.until, self.now + MIN_RECHECK))
        self.parkings.append(turns.Parking(key, priority, stop.resource, first, spread))

    # -- writing --------------------------------------------------------------------------------------------------

    def _start(
        self,
        chosen: Sequence[tuple[turns.Turn, list[ClaimedJob], tuple[str, ...]]],
        out: Claimed,
    ) -> None:
        """Claim by optimistic lock; a lost candidate gives its key another turn."""
        rows = [row for _, picked, _ in chosen for row in picked]
        if rows:
            until, careful = self.now + self.ask.lease, self.ask.careful
            won = start_if_ready(self.c, self.d, rows, self.ask.worker_id, self.now, until, careful=careful)
            all_won = len(won) == len(rows)
            out.jobs = rows if all_won else [row for row in rows if row.id in won]
            out.lost = len(rows) - len(won)
            for t, picked, probes in chosen:
                if not all_won and any(row.id not in won for row in picked):
                    self.again.setdefault(t.resource_key, t.priority)
                    if careful:
                        out.held.append(t.resource_key)
                if probes and picked[0].id in won:
                    out.probes[picked[0].id] = probes
                elif probes:
                    self._take_back(probes)
        changed = [k for k, level in self.levels.items() if level is not self.before[k]]
        if changed:
            self.facts.update((k, self.levels[k].facts) for k in changed)  # elected probes, for the worker's snapshot
            resources.write_levels(
                self.c, self.d, [self.before[k] for k in changed], [self.levels[k] for k in changed], self.now
            )

    def _take_back(self, probes: Sequence[str]) -> None:
        """The job that was to try these circuits is lost: they are due as before, and nobody waits for its verdict."""
        self.levels |= {key: self.before[key] for key in probes}
        self.again |= {p.resource_key: p.priority for p in self.parkings if p.parked_on in probes}

    def _settle(self, out: Claimed) -> None:
        """Account for every taken turn."""
        parked = {p.resource_key for p in self.parkings}
        for key in parked & self.again.keys():  # a lost race on a stopped key: the ordinary turn is enough
            self.parkings = [p for p in self.parkings if p.resource_key != key]
        turns.insert(self.c, self.d, self.again)
        judged = {
            p.parked_on: self.facts[p.parked_on].revision for p in self.parkings if p.parked_on not in self.locked
        }
        turns.park(self.c, self.d, self.parkings, judged)
        out.continued = len(self.again)
        out.now = self.now


_NO_LIMITS: Final[Mapping[str, Any]] = {}


def _beside_each_other(rows: Sequence[ClaimedJob]) -> int:
    """How many of these jobs, from the first on, may be claimed together: one that was rescued before only alone."""
    return next((n or 1 for n, row in enumerate(rows) if row.rescues), len(rows))


def _alike(rows: Sequence[ClaimedJob]) -> int:
    """How many of these jobs, from the first on, are of one kind."""
    return next((n for n, row in enumerate(rows) if row.kind != rows[0].kind), len(rows))


def _lock_order(key: str) -> tuple[int, str]:
    """Resources are locked in this order by everybody who waits."""
    return -depth(key), key


def _by_id(row: ClaimedJob) -> int:
    return row.id.int  # comparing the ids themselves is Python code


def start_if_ready(
    c: Connection,
    d: Dialect,
    rows: Sequence[ClaimedJob],
    worker_id: str,
    now: datetime,
    lease_until: datetime,
    *,
    careful: bool = False,
) -> set[UUID]:
    """Ready jobs whose version still matches become running under a lease; returns those ids.

    ``careful`` waits for nobody, for half as much time again.
    """
    ordered = sorted(rows, key=_by_id)  # as everybody who locks several jobs
    if careful and d.is_postgresql:
        ids = {"ids": d.pack_ids([r.id for r in ordered])}
        free = d.run(c, "SELECT id FROM {job} WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id {leaf_lock}", ids)
        mine = {r[0] for r in free}
        ordered = [r for r in ordered if r.id in mine]
    source, params = finishing.fences(d, [(r.id, r.version, None) for r in ordered], with_result=False)
    won = d.run(
        c,
        "UPDATE {job} SET state = 'running', version = {job}.version + 1, executions = {job}.executions + 1,"
        " locked_by = :worker_id, lease_until = :lease_until, started_at = :now, updated_at = :now, waiting_for = NULL,"
        " unique_lock = CASE WHEN {job}.unique_until = 'finish' THEN {job}.unique_lock END"
        + source
        + " WHERE {job}.id = p.id AND {job}.version = p.version AND {is_ready} RETURNING {job}.id",
        {**params, "worker_id": worker_id, "lease_until": lease_until, "now": now},
        id=ID,
    )
    return {r[0] for r in won}
