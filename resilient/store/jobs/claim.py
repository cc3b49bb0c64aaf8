"""The claim: from turns to running jobs, in one transaction.

`take_snapshot` takes turns, locks their resources (the leaves), reads them and everything above them, and the best jobs
of those that nothing stops. `_Claim` drops the leaves that a gate stops, locks ancestors where that is needed, lets
`core.gates.admission` (pure) decide how many jobs may start, and starts these. A rescued job is claimed alone.

Locks, in this order:

- Turns and leaves with SKIP LOCKED: the claim never waits for them.
- Ancestors, waiting, deepest first, and only those with a cap, a job limit or a breaker that is not closed: locking the
  provider row in every claim cost 5/6 of the throughput. One that sorts before a locked leaf is not waited for, or two
  claims could wait for each other: if it is locked, what is below it keeps its turn. Whatever was read before such a
  lock is read again in a statement after it.
- Jobs with SKIP LOCKED. Everybody else locks jobs before resources, so a claim that waited for a job with its leaves
  locked would close a circle (a finish waits for the leaf, a program for the finish, the claim for a job of the
  program's).

Correctness is the update's match of id, state and version; the locks only save lost races. The snapshot is one
statement on PostgreSQL, because an idle worker's time until it starts a job is round trips. It is older than the locks
on the leaves: what changed in between only costs a lost candidate (the claim matches versions) or an extra turn
(whatever makes a job ready inserts one, which the snapshot does not contain and the claim does not delete).

The claim accounts for every turn it took before it commits: a key with more claimable work gets a new turn at the back,
a stopped one parks, a leaf that another transaction has locked keeps its turn. So does a key whose ready jobs are all
of kinds this worker does not run; the worker passes over it for a while (`Claimed.unknown`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from resilient.core.base.instants import FAR
from resilient.core.base.resource_key import account, ancestors, depth, path
from resilient.core.gates import admission
from resilient.core.gates.admission import Admission, Level, ResourceFacts, Stop, admit
from resilient.store.db.dialect import ID, Dialect
from resilient.store.db.direct import direct, operation
from resilient.store.db.types import Rows
from resilient.store.gates import limits, resources, turns
from resilient.store.jobs import finishing, leases
from resilient.store.jobs.claim_snapshot import ClaimedJob, Snapshot, best_ready, is_calm, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.gates.breaker import Probes
    from resilient.core.gates.policy import Policy
    from resilient.core.gates.rate_limit import Limit

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
    resources: Sequence[str] = ()  # patterns of what it serves; none: everything
    batches: Mapping[str, int] = field(default_factory=dict)  # kinds whose jobs share a slot, and how many of them
    rooms: Callable[[set[str]], dict[str, int]] | None = None  # accounts to the slots each may have; None: all
    stated: Mapping[str, tuple[Limit, ...]] = field(default_factory=dict)  # limits in answers, by key; see `Level`
    budgets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # key to kind to budget
    limited: bool = True  # whether keys probably have limits, so that they are read with the first look
    careful: bool = False  # wait for nobody who holds an ancestor (in an open transaction): see `db/dialect.py`


@dataclass(slots=True)
class Claimed:
    """The outcome of a claim."""

    now: datetime
    since: float  # by `leases.clock`, before its first statement: from here the leases of its jobs count
    jobs: list[ClaimedJob] = field(default_factory=list)  # in the order to start
    turns: list[turns.Turn] = field(default_factory=list)
    turn_count: int = 0  # turns that were taken, each of a key's counted
    missing: list[str] = field(default_factory=list)  # keys that may have no resource row: `resources.ensure` them
    unknown: list[str] = field(default_factory=list)  # keys that only hold kinds this worker does not run
    conflicts: list[str] = field(default_factory=list)  # keys with a job, or (if careful) below a key, that is locked
    full: list[str] = field(default_factory=list)  # keys whose account may have no more slots
    stops: dict[str, Stop] = field(default_factory=dict)  # leaf to what stops it
    facts: dict[str, ResourceFacts] = field(default_factory=dict)
    probes: dict[UUID, Probes] = field(default_factory=dict)  # job to the breakers it probes
    lost_count: int = 0  # candidates that another transaction changed or locked
    continued: int = 0  # keys that got a new turn, or kept theirs
    unserved: int = 0  # keys that got no slot: the worker's, or their account's, were promised
    slots: int = 0  # how many of the worker's free slots are used
    limited: bool = False  # some of the keys have limits


@direct
@operation("claim")
def claim(c: Connection, d: Dialect, ask: Ask) -> Claimed:
    """Take turns and claim what their resources admit; see the top of this file."""
    selection = turns.Selection(ask.take, ask.priority, ask.low, ask.oldest_first, ask.skip, ask.resources)
    since = leases.clock()
    snapshot = take_snapshot(c, d, selection, ask.per_key + 1, limited=ask.limited)
    if snapshot is None:
        return Claimed(d.now(c) if d.clock else datetime.min, since)  # noqa: DTZ901 - nobody reads it without jobs
    return _Claim(c, d, ask, snapshot).run(since)


class _Claim:
    """One claim transaction: its steps share what they have read."""

    def __init__(self, c: Connection, d: Dialect, ask: Ask, snapshot: Snapshot) -> None:
        self.c, self.d, self.ask, self.snapshot = c, d, ask, snapshot
        self.turns, self.now, self.facts, self.locked = snapshot.turns, snapshot.now, snapshot.facts, snapshot.locked
        self.missing: list[str] = []
        self.again: dict[str, int] = {}  # keys that get an ordinary turn, with its priority
        self.turned: set[str] = set()  # keys that got a turn from the UPDATE, which lost a candidate
        self.parkings: list[turns.Parking] = []
        self.before: dict[str, Level] = {}  # each key of the paths as it was read
        self.levels: dict[str, Level] = {}  # and with the jobs that were admitted
        self.kinds = frozenset(ask.kinds)
        self.mixed: set[str] = set()  # keys with more ready jobs: of kinds not run here, or of a used-up budget
        self.used_up: dict[str, Stop] = {}  # keys whose jobs all wait for budgets
        self.limits = snapshot.limits  # None: not read yet, or before the last lock

    def run(self, since: float) -> Claimed:
        leaves = self._locked_leaves()
        out = Claimed(
            self.now, since, turns=self.turns, turn_count=self.snapshot.turn_count, missing=self.missing,
            facts=self.facts,
        )  # fmt: skip
        open_leaves = self._drop_stopped(leaves, out)
        candidates = self._candidates(open_leaves)
        open_leaves = self._drop_idle(open_leaves, candidates, out)
        open_leaves = self._lock_ancestors(open_leaves, out)
        if open_leaves:
            self._build_levels(open_leaves, out)
            chosen = self._admit(open_leaves, candidates, out)
            self._start(chosen, out)
        else:
            self._settle(out)
        return out

    # -- reading --------------------------------------------------------------------------------------------------

    def _locked_leaves(self) -> list[turns.Turn]:
        """The keys whose rows were locked; others, and those with no row or none above, keep their turns."""
        above = {a for t in self.turns for a in ancestors(t.resource_key)}
        absent = {a for a in above if a not in self.facts}
        self.missing, leaves = sorted(absent), []
        for t in self.turns:
            if t.resource_key not in self.locked:  # another worker's, or without a row yet: `ensure` is right for both
                self.missing.append(t.resource_key)
            elif absent.isdisjoint(ancestors(t.resource_key)):
                leaves.append(t)
                continue
            self.again[t.resource_key] = t.priority
        return leaves

    def _policy(self, key: str) -> Policy:
        facts = self.facts[key]
        policy = self.ask.policy(key, facts.policy_override)
        if (stated := self.ask.stated.get(key)) is not None:
            policy = admission.paced(policy, stated)
        return policy if facts.calm else admission.in_force(policy, facts.learnt, self.now)

    def _drop_stopped(self, leaves: list[turns.Turn], out: Claimed) -> list[turns.Turn]:
        """Park what a gate stops already, before any job row is read."""
        passed, judged = [], dict[str, Stop | None]()
        for t in leaves:
            stop = None
            for key in path(t.resource_key):
                if key not in judged:
                    judged[key] = admission.stop_of(self.facts[key], self.now)
                if (stop := judged[key]) is not None:
                    break
            if stop is None:
                passed.append(t)
            else:
                out.stops[t.resource_key] = stop
                self._park(t.resource_key, t.priority, stop)
        return passed

    def _candidates(self, leaves: Sequence[turns.Turn]) -> dict[str, list[ClaimedJob]]:
        """The best ready jobs of each key, of kinds this worker runs, one more than may start, best first.

        Looked up without regard to kinds, because a key that also holds others must keep a turn (`self.mixed`).
        """
        facts = self.snapshot.facts
        jobs = {t.resource_key: self.snapshot.jobs.get(t.resource_key, []) for t in leaves}
        jobs |= self._best([t for t in leaves if not is_calm(t.resource_key, facts)], runnable_only=False)
        if self.ask.batches:
            jobs |= self._read_deeper(leaves, jobs)
        for key, rows in jobs.items():
            runnable = [row for row in rows if row.kind in self.kinds]
            if len(runnable) < len(rows):
                self.mixed.add(key)
                jobs[key] = runnable
        hidden = [t for t in leaves if t.resource_key in self.mixed and not jobs[t.resource_key]]
        jobs |= self._best(hidden, runnable_only=True) if hidden else {}
        for key in jobs.keys() & self.ask.budgets.keys():
            jobs[key] = self._within_budgets(key, jobs[key])
        return jobs

    def _within_budgets(self, key: str, rows: list[ClaimedJob]) -> list[ClaimedJob]:
        """The candidates of a key without those of kinds that count for a budget with no room for them."""
        budget_of = self.ask.budgets[key]
        rooms, stops = dict[str, int](), dict[str, Stop]()
        for budget in sorted(set(budget_of.values())):
            rooms[budget], stop = self._room_of(key, budget)
            if stop is not None:
                stops[budget] = stop
        within = _within(rows, budget_of, rooms)
        if len(within) == len(rows):
            return within
        if not within:  # jobs of other kinds may come after them
            kinds = [kind for kind in self.ask.kinds if budget_of.get(kind) not in stops]
            more = best_ready(self.c, self.d, [key], self.ask.per_key + 1, kinds).get(key, []) if kinds else []
            within = _within(more, budget_of, rooms)
        if within:
            self.mixed.add(key)
        else:  # park on the budget that has room first
            self.used_up[key] = min(stops.values(), key=_end)
        return within

    def _room_of(self, key: str, budget: str) -> tuple[int, Stop | None]:
        """How many jobs of a key may start for one of its account's budgets, and if none may, what stops them.

        Its row is deeper than the leaf that is locked already, so it is not waited for: see `_drop_idle`.
        """
        most = self.ask.per_key + BATCH_ROWS
        _, locked, rows = resources.lock_leaves(self.c, self.d, [budget], [budget])
        self.locked.update(locked)
        if budget not in rows or rows[budget].calm:
            return most, None
        facts = self.facts[budget] = rows[budget]
        policy, running = self._policy(budget), 0
        if admission.needs_count(facts, policy, self.now):
            kinds = [kind for kind, name in self.ask.budgets[key].items() if name == budget]
            running = resources.count_running_kinds(self.c, self.d, key, kinds)
        states = limits.read(self.c, self.d, [budget]).get(budget, _NO_LIMITS)
        verdict = admit([Level(facts, policy, states, running)], most, self.now, self.ask.worker_id)
        return verdict.count, None if verdict.count else verdict.stop

    def _read_deeper(
        self, leaves: Sequence[turns.Turn], jobs: Mapping[str, list[ClaimedJob]]
    ) -> dict[str, list[ClaimedJob]]:
        """Read as many jobs as fill a batch, where the first is of a batch kind and more may be waiting."""
        sizes: dict[str, int] = {}
        room = BATCH_ROWS
        for key, rows in jobs.items():
            size = self.ask.batches.get(rows[0].kind, 0) if len(rows) > self.ask.per_key else 0
            if self.ask.per_key < size <= room:
                sizes[key] = size
                room -= size
        keys = [t for t in leaves if t.resource_key in sizes]
        return self._best(keys, runnable_only=False, limit=max(sizes.values(), default=0) + 1)

    def _best(
        self, leaves: Sequence[turns.Turn], *, runnable_only: bool, limit: int = 0
    ) -> dict[str, list[ClaimedJob]]:
        kinds = self.ask.kinds if runnable_only else None
        return best_ready(self.c, self.d, [t.resource_key for t in leaves], limit or self.ask.per_key + 1, kinds)

    def _drop_idle(self, leaves: Sequence[turns.Turn], candidates: Mapping[str, Any], out: Claimed) -> list[turns.Turn]:
        """Drop keys without a candidate; those that only have kinds this worker does not run keep their turn."""
        active = []
        for t in leaves:
            if candidates.get(t.resource_key):
                active.append(t)
            elif t.resource_key in self.used_up:
                stop = out.stops[t.resource_key] = self.used_up[t.resource_key]
                if stop.resource in self.locked:
                    self._park(t.resource_key, t.priority, stop)
                else:  # somebody changes it just now
                    self.again[t.resource_key] = t.priority
                    out.conflicts.append(t.resource_key)
            elif t.resource_key in self.mixed:
                self.again[t.resource_key] = t.priority
                out.unknown.append(t.resource_key)
        return active

    def _lock_ancestors(self, leaves: list[turns.Turn], out: Claimed) -> list[turns.Turn]:
        """Lock the ancestors that need it and read them again; returns the leaves whose ancestors were locked."""
        above = {a for t in leaves for a in ancestors(t.resource_key)} - self.locked
        shared = sorted(
            (a for a in above if admission.needs_lock(self.facts[a], self._policy(a), self.now)), key=_lock_order
        )
        if not shared:
            return leaves
        self.limits = None
        last = max(map(_lock_order, self.locked))
        ahead = [a for a in shared if self.ask.careful or _lock_order(a) < last]
        if ahead:
            _, locked, fresh = resources.lock_leaves(self.c, self.d, ahead)
            self.facts.update(fresh)
            self.locked.update(locked)
        if behind := [a for a in shared if a not in ahead]:
            fresh = resources.lock_waiting(self.c, self.d, behind)
            self.facts.update(fresh)
            self.locked.update(fresh)
        self.now = self.d.now(self.c)
        busy = set(ahead) - self.locked
        below = {t.resource_key: t.priority for t in leaves if not busy.isdisjoint(ancestors(t.resource_key))}
        self.again |= below
        if self.ask.careful:
            out.conflicts += below
        return [t for t in leaves if t.resource_key not in self.again]

    def _build_levels(self, leaves: Sequence[turns.Turn], out: Claimed) -> None:
        """Read limits and counts, in a statement after the locks."""
        keys = {k for t in leaves for k in path(t.resource_key)}
        policies = {k: self._policy(k) for k in keys}
        stated = {k: self.ask.stated[k] for k in keys if k in self.ask.stated} if self.ask.stated else {}
        limited = sorted(k for k in keys if policies[k].limits or k in stated)
        out.limited = bool(limited)
        states = self.limits
        if states is None:
            states = limits.read(self.c, self.d, limited) if limited else {}
        capped = sorted(k for k in keys if k in stated or admission.needs_count(self.facts[k], policies[k], self.now))
        running = resources.count_running(self.c, self.d, capped) if capped else {}
        for k in keys:
            limits_of, spent = states.get(k, _NO_LIMITS), running.get(k, 0)
            level = Level(self.facts[k], policies[k], limits_of, spent, stated.get(k, ()))
            self.levels[k] = self.before[k] = level

    # -- deciding -------------------------------------------------------------------------------------------------

    def _admit(
        self, leaves: Sequence[turns.Turn], candidates: Mapping[str, list[ClaimedJob]], out: Claimed
    ) -> list[tuple[turns.Turn, list[ClaimedJob], tuple[str, ...]]]:
        """Decide how many jobs of each key may start; keys that have more are continued or parked.

        A job that was rescued before is claimed alone and first: it runs alone, and if it kills its process again,
        no other may be lost with it just because it waited there.
        """
        slots, chosen, rooms = self.ask.slots, [], dict[str, int]()
        if self.ask.rooms is not None:
            rooms = self.ask.rooms({account(t.resource_key) for t in self.turns if t.resource_key not in out.stops})
        for t in sorted(leaves, key=lambda t: not candidates[t.resource_key][0].rescues):
            key, rows = t.resource_key, candidates[t.resource_key]
            batch = self.ask.batches.get(rows[0].kind)
            name = account(key)
            room = rooms.get(name, slots)
            free = min(slots, room)
            most = min(self.ask.per_key, free) if batch is None else min(batch, _alike(rows)) * (free > 0)
            number = min(_beside_each_other(rows), most)
            if number <= 0:
                self.again[key] = rows[0].priority
                if room <= 0 < slots:
                    out.full.append(key)
                out.unserved += 1
                continue
            verdict = self._judge(key, rows, number)
            if verdict.count:
                chosen.append((t, rows[: verdict.count], verdict.probes))
                used = verdict.count if batch is None else 1
                out.slots += used
                rooms[name] = room - used
                slots = 0 if rows[0].rescues else slots - used
            if verdict.stop is not None and verdict.count < len(rows):
                out.stops[key] = verdict.stop
                self._park(key, rows[verdict.count].priority, verdict.stop)
            elif verdict.count < len(rows):
                self.again[key] = rows[verdict.count].priority
            elif key in self.mixed:
                self.again[key] = t.priority
        return chosen

    def _judge(self, key: str, rows: Sequence[ClaimedJob], most: int) -> Admission:
        """How many of a key's best jobs may start; if a part is kept for urgent ones, of the first's priority only."""
        levels = [self.levels[k] for k in path(key)]
        if any(level.policy.reserve for level in levels):
            most = min(most, sum(row.priority == rows[0].priority for row in rows))
        verdict = admit(levels, most, self.now, self.ask.worker_id, rows[0].priority)
        for level in verdict.levels:
            self.levels[level.facts.key] = level
        return verdict

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
        """Claim by optimistic lock, and account for every turn; a lost candidate gives its key another one.

        Mostly nothing that is written depends on who was lost: then all of it and the commit are one round trip.
        """
        rows = [row for _, picked, _ in chosen for row in picked]
        turn_of = {row.id: t for t, picked, _ in chosen for row in picked if t.resource_key not in self.again}
        lost = start_if_ready(
            self.c, self.d, rows, self.ask.worker_id, self.now, self.now + self.ask.lease, turn_of=turn_of,
        ) if rows else Rows()  # fmt: skip
        out.jobs = rows
        # A parked turn or a probe depends on who was lost, which must then be read before they are written.
        is_bound = bool(self.parkings) or any(probes for _, _, probes in chosen)
        if is_bound:
            self.d.send(self.c)
            self._take_in(chosen, lost, out)
        changed = [k for k, level in self.levels.items() if level is not self.before[k]]
        if changed:
            self.facts.update((k, self.levels[k].facts) for k in changed)  # elected probes, for the worker's snapshot
            resources.write_levels(
                self.c, self.d, [self.before[k] for k in changed], [self.levels[k] for k in changed], self.now
            )
        self._settle(out)
        if not is_bound:
            self._take_in(chosen, lost, out)

    def _take_in(
        self,
        chosen: Sequence[tuple[turns.Turn, list[ClaimedJob], tuple[str, ...]]],
        lost: Rows,
        out: Claimed,
    ) -> None:
        """Note which candidates were lost, and what the others probe. The keys of lost ones have turns already."""
        gone = {row.id: row.is_locked for row in lost.all()}
        if gone:
            out.jobs = [row for row in out.jobs if row.id not in gone]
            out.lost_count = len(gone)
        for t, picked, probes in chosen:
            if gone and any(row.id in gone for row in picked):
                if t.resource_key not in self.again:
                    self.turned.add(t.resource_key)
                if any(gone.get(row.id) for row in picked):
                    out.conflicts.append(t.resource_key)
            if probes and picked[0].id not in gone:
                out.probes[picked[0].id] = tuple((k, self.levels[k].facts.breaker.generation) for k in probes)
            elif probes:
                self._take_back(probes)
        out.continued = len(self.again.keys() | self.turned)

    def _take_back(self, probes: Sequence[str]) -> None:
        """Undo the election of a probe whose job was lost: its breakers are due as before."""
        self.levels |= {key: self.before[key] for key in probes}
        self.again |= {p.resource_key: p.priority for p in self.parkings if p.parked_on in probes}

    def _settle(self, out: Claimed) -> None:
        """Account for every taken turn."""
        ordinary = self.again.keys() | self.turned
        # A lost race on a stopped key: the ordinary turn is enough.
        self.parkings = [p for p in self.parkings if p.resource_key not in ordinary]
        served = {row.resource_key for row in out.jobs}
        # Who got nothing stands before who got jobs: else an account's room would go to the same key every time.
        turns.insert(self.c, self.d, sorted(self.again.items(), key=lambda turn: turn[0] in served))
        judged = {
            p.parked_on: self.facts[p.parked_on].revision for p in self.parkings if p.parked_on not in self.locked
        }
        turns.park(self.c, self.d, self.parkings, judged)
        out.continued = len(ordinary)
        out.now = self.now
        self.d.commit(self.c)


_NO_LIMITS: Final[Mapping[str, Any]] = {}


def _beside_each_other(rows: Sequence[ClaimedJob]) -> int:
    """How many of these jobs, from the first on, may be claimed together: one that was rescued before only alone."""
    return next((n or 1 for n, row in enumerate(rows) if row.rescues), len(rows))


def _alike(rows: Sequence[ClaimedJob]) -> int:
    """How many of these jobs, from the first on, are of one kind."""
    return next((n for n, row in enumerate(rows) if row.kind != rows[0].kind), len(rows))


def _within(rows: Sequence[ClaimedJob], budget_of: Mapping[str, str], rooms: dict[str, int]) -> list[ClaimedJob]:
    """The jobs that count for no budget, and those whose budget has room; lowers ``rooms`` by these."""
    within = []
    for row in rows:
        budget = budget_of.get(row.kind)
        if budget is None or rooms[budget] > 0:
            within.append(row)
            if budget is not None:
                rooms[budget] -= 1
    return within


def _end(stop: Stop) -> datetime:
    """When a stop is over; the end of time if nobody knows."""
    return stop.until or FAR


def _lock_order(key: str) -> tuple[int, str]:
    """The order in which resources are locked by every transaction that waits."""
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
    turn_of: Mapping[UUID, turns.Turn] | None = None,
) -> Rows:
    """Start ready jobs that are not locked and still have their version, under a lease.

    Returns the lost ones (id, is_locked), to be read after the next round trip. Their keys get the turns of
    ``turn_of``, on PostgreSQL in the same statement: a crash after it must not leave a key without one.
    """
    turn_of = turn_of or {}
    ordered = sorted(rows, key=_by_id)  # as everybody who locks several jobs
    source, params = finishing.fences(d, [(r.id, r.version, None) for r in ordered], with_result=False)
    params |= {"worker_id": worker_id, "lease_until": lease_until, "now": now}
    if not d.is_postgresql:
        won = {r[0] for r in d.run(c, f"{_START}{source}{_IF_READY} RETURNING {{job}}.id", params, id=ID)}
        lost = Rows(_Lost(row.id, is_locked=False) for row in ordered if row.id not in won)
        again = {turn_of[row.id].resource_key: turn_of[row.id].priority for row in lost if row.id in turn_of}
        turns.insert(c, d, again)
        return lost
    picked = [turn_of.get(row.id) for row in ordered]
    params["number"] = len(ordered)
    params["keys"] = d.pack_keys(["" if t is None else t.resource_key for t in picked])
    params["priorities"] = d.pack_ints([0 if t is None else t.priority for t in picked])
    return cast("Rows", d.later(c, _start_free(source), params, id=ID))


class _Lost(NamedTuple):
    """A candidate that was not started; on PostgreSQL a row of the statement."""

    id: UUID
    is_locked: bool


_START: Final = (
    "UPDATE {job} SET state = 'running', version = {job}.version + 1, executions = {job}.executions + 1,"
    " locked_by = :worker_id, lease_until = :lease_until, started_at = :now, updated_at = :now, waiting_for = NULL,"
    " unique_lock = CASE WHEN {job}.unique_until = 'finish' THEN {job}.unique_lock END"
)
_IF_READY: Final = " WHERE {job}.id = p.id AND {job}.version = p.version AND {is_ready}"


@lru_cache(maxsize=4)
def _start_free(source: str) -> str:
    # The lost are looked for only if there are any, and in hashed lists: a join would grow with the square.
    return (
        "WITH free AS MATERIALIZED (SELECT id FROM {job} WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id {leaf_lock}),"
        f" started AS ({_START}{source}{_IF_READY} AND {{job}}.id = ANY(ARRAY(SELECT id FROM free))"
        " RETURNING {job}.id),"
        " lost AS MATERIALIZED (SELECT u.id, u.key, u.priority"
        " FROM unnest(CAST(:ids AS uuid[]), CAST(:keys AS text[]), CAST(:priorities AS int[])) AS u(id, key, priority)"
        " WHERE (SELECT count(*) FROM started) < CAST(:number AS int) AND u.id NOT IN (SELECT id FROM started)),"
        " turned AS (INSERT INTO {turn} (resource_key, priority)"
        " SELECT key, max(priority) FROM lost WHERE key <> '' GROUP BY key)"
        " SELECT id, id NOT IN (SELECT id FROM free)"
        " AND EXISTS (SELECT 1 FROM {job} WHERE {job}.id = lost.id) AS is_locked FROM lost"
    )
