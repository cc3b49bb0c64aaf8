"""Programs of what people and programs do to jobs, in any order, and what must be true of them at each moment.

One feature changes what another has hung on a job: a retry, an edit, a newer enqueue, a prune. `run` carries out a
list of operations on real tables, under a clock that is moved by hand, and keeps its own account (`Account`) of what
each word promised. `test_features.py` draws the programs.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from resilient import (
    Cancel,
    DuplicateJob,
    Fixed,
    InvalidInput,
    Job,
    JobNotFound,
    Permanent,
    Resilient,
    Retry,
    Transient,
    handler,
)
from resilient.core.gates.policy import Policies
from resilient.store.db.database import Database
from resilient.store.gates import resources
from resilient.store.jobs import leases
from resilient.store.jobs.claim import Ask, claim
from tests.conftest import FakeClock
from tests.helpers import LIMIT
from tests.invariants import broken, keep_house

KEYS = ("p/1", "p/2")
OPEN = ("scheduled", "ready", "running", "blocked")
WAITING = ("scheduled", "ready", "blocked")
RUNS_AGAIN = Retry(max_attempts=3, delay=Fixed(10))
EFFECTS = {"done": True, "not done": False, "unknown": None}  # of such a request
LEASE = timedelta(seconds=30)
MARKS = {"no key": None, "a key for a while": 60, "a key": 1e6}  # requests without an answer; seconds of the key's life


@dataclass(eq=False)
class Account:
    """What was said about one job, and what it did."""

    payload: Any  # of its next operation
    after: dict[UUID, str] = field(default_factory=dict)  # blockers, with what is to be done if they die
    lane: str | None = None
    wish: Any = None  # the payload of the operation that follows the one that runs
    expires: bool = False  # that operation has an expiry of its own
    may_begin_anew: bool = False  # its next call may be a new operation though no run was promised
    promises: int = 0  # runs promised while it ran, beyond the operation that ran
    keys: list[str] = field(default_factory=list)  # of its operations, in their order
    successes: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    safe_until: dict[str, datetime] = field(default_factory=dict)  # of operations with a request without an answer
    effects: dict[str, bool | None] = field(default_factory=dict)  # whether that was done; None: nobody can tell
    ended: bool = False  # cancelled, expired or deleted: what was promised before is over
    script: list[str] = field(default_factory=list)  # how its calls end
    inside: tuple[Any, ...] = ()  # what its first call does


class World:
    """An app, its clock and the accounts of its jobs."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.database = Database(url, clock=self.clock.now)
        self.app = Resilient(self.database, handlers=[WORK, LOOKED_UP, UNDO], deps=self, upgrade=False)
        self.jobs: list[UUID] = []
        self.accounts: dict[UUID, Account] = {}
        self.flows: dict[UUID, list[UUID]] = {}
        self.undone: list[Any] = []
        self.faults: list[str] = []
        self.is_calm = False  # from then on every call succeeds
        self._n = 0

    def number(self) -> int:
        """A payload nobody else has."""
        self._n += 1
        return self._n

    def job(self, index: int) -> UUID | None:
        """The job an operation means."""
        return self.jobs[index % len(self.jobs)] if self.jobs else None

    async def state(self, id_: UUID) -> str | None:
        """Its state; None if it was deleted."""
        rows = await self.app.jobs.list(ids=[id_])
        return str(rows[0].state) if rows else None

    async def close(self) -> None:
        """Close the app."""
        await self.app.close()
        await self.database.close()

    # -- operations ------------------------------------------------------------------------------------------

    async def enqueue(self, options: dict[str, Any]) -> None:
        """A job, or a word to the one with its unique key."""
        n, words = self.number(), dict(options)
        key, script = KEYS[words.pop("key", 0)], words.pop("script", ())
        first, kind = words.pop("inside", ()), LOOKED_UP if words.pop("looked up", False) else WORK
        after = [self.job(i) for i in words.pop("after", ())]
        after = [one for one in after if one is not None]
        on_dead = words.get("on_dead", "cancel")
        if after:
            words["after"] = after
        if words.get("unique_key"):
            words["unique_key"] += f"-{kind.kind}" + ("-lane" if words.get("ordering_key") else "")
        else:  # the engine refuses them
            words = {name: word for name, word in words.items() if name not in ("on_conflict", "while_running")}
        try:
            done = await self.app.enqueue(kind, n, resource_key=key, **words)
        except DuplicateJob:
            return
        if done.created:
            self.jobs.append(done.id)
            self.accounts[done.id] = Account(
                n, dict.fromkeys(after, on_dead), words.get("ordering_key"), script=list(script), inside=tuple(first)
            )
            return
        account, rows = self.accounts[done.id], await self.app.jobs.list(ids=[done.id])
        replaces = words.get("on_conflict") == "replace"
        if rows and replaces and rows[0].payload == n:
            account.payload, account.promises, account.wish = n, 0, None
            account.script, account.may_begin_anew = list(script), bool(account.keys)
            account.after |= dict.fromkeys(after, on_dead)
        elif words.get("while_running") == "once_more":
            if rows and str(rows[0].state) == "running":
                account.promises, account.expires = 1, "expires_in" in words
                account.wish = n if replaces else account.wish
            else:  # it ran when it was told, or waits: nobody knows here
                account.may_begin_anew = True
        elif replaces and rows and str(rows[0].state) in WAITING:
            self.faults.append(f"{done.id} was to be replaced by {n}, and is {rows[0].payload}")

    async def workflow(self, scripts: list[list[str]]) -> None:
        """Three steps, one after the other, the first two with undos."""
        async with self.app.workflow("flow", resource_key=KEYS[0]) as wf:
            steps: list[Any] = []
            for place, script in enumerate(scripts):
                n = self.number()
                step = wf.step(WORK, n, after=steps[-1:], undo=UNDO if place < 2 else None, name=f"s{place}")
                steps.append(step)
                self.accounts[step.id] = Account(n, script=list(script))
        self.jobs += [step.id for step in steps]
        self.flows[wf.id] = [step.id for step in steps]

    async def change(self, verb: str, index: int, options: dict[str, Any]) -> None:
        """Cancel, retry, discard, delete or edit a job."""
        id_ = self.job(index)
        if id_ is None:
            return
        account = self.accounts[id_]
        if verb == "edit":
            n = self.number()
            try:
                done = await self.app.jobs.edit([id_], payload=n, **options)
            except (InvalidInput, JobNotFound):  # it was deleted
                return
            if done.edited:
                account.payload = n
                account.may_begin_anew = account.may_begin_anew or bool(options)
            return
        blockers = {one: await self.state(one) for one in account.after}
        done = await getattr(self.app.jobs, verb)([id_], **options)
        if verb == "retry" and done.retried:
            account.retried += 1
            account.ended, account.promises, account.wish = False, 0, None
            account.may_begin_anew = account.may_begin_anew or bool(options)
            for one, state in blockers.items():
                if state not in OPEN:
                    account.after.pop(one)
        elif verb != "retry" and sum(list(done.to_json().values())[: 1 + (verb == "cancel")]):  # some were changed
            account.ended, account.promises, account.wish = True, 0, None

    async def retry_all(self) -> None:
        """Everything that died or was cancelled, at once."""
        over = {id_: await self.state(id_) for id_ in self.jobs}
        which = [id_ for id_, state in over.items() if state in ("dead", "cancelled")]
        if not which:
            return
        await self.app.jobs.retry(which)
        retried = [id_ for id_ in which if await self.state(id_) in OPEN]
        for id_ in retried:
            account = self.accounts[id_]
            account.retried += 1
            account.ended, account.promises, account.wish = False, 0, None
            account.after = {
                one: on_dead for one, on_dead in account.after.items() if over.get(one) in OPEN or one in retried
            }

    async def drain(self) -> None:
        """Run everything that is due."""
        await self.app.worker(concurrency=1).drain(timeout=LIMIT)

    async def lose(self, mark: str | None, effect: str = "unknown") -> None:
        """A worker claims what is due and is killed: before it sends anything, or (``mark``) before the answer.

        ``effect``: whether that request was done.
        """
        ask = Ask("lost", 10, [WORK.kind, LOOKED_UP.kind], LEASE, Policies().for_key, lambda: 0.5)
        await self.database.transaction(resources.ensure, [*KEYS, "p"])
        for row in (await self.database.transaction(claim, ask)).jobs:
            (info,) = await self.app.jobs.list(ids=[row.id])
            key = row.idempotency_key or str(row.id)
            await self.begin(replace(info, idempotency_key=key))
            if mark is not None:
                account = self.accounts[row.id]
                account.safe_until[key] = self.clock.now() + timedelta(seconds=MARKS[mark] or 0)
                account.effects[key] = EFFECTS[effect]
                fence = row.version + 1
                assert await self.database.transaction(
                    leases.mark_sent_if_held, row.id, fence, self._mark(mark, key), self.clock.now()
                )

    def _mark(self, mark: str, key: str) -> str:
        now, life = self.clock.now(), MARKS[mark]
        request = {"hash": "-", "at": now.isoformat()}
        if life is not None:
            request |= {"key": key, "until": (now + timedelta(seconds=life)).isoformat()}
        return json.dumps({"POST /": request})

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)

    async def house(self) -> None:
        """What housekeeping does beside staging."""
        worker = self.app.worker()
        await worker.sweeper.rescue()
        await worker.sweeper._expire()
        for id_ in self.jobs:
            account = self.accounts[id_]
            rows = await self.app.jobs.list(ids=[id_])
            if rows and rows[0].last_error_kind == "expired" and str(rows[0].state) == "dead":
                is_in_doubt = bool(account.keys) and account.keys[-1] in account.safe_until  # that is never repeated
                if account.promises and not account.expires and not is_in_doubt:
                    self.faults.append(f"{id_} was to run once more, and the expiry of the run before ended it")
                account.ended, account.promises, account.wish = True, 0, None

    # -- what must be true -----------------------------------------------------------------------------------

    async def begin(self, job: Any) -> None:
        """A call of a handler: what it was told, and what it had to wait for."""
        account = self.accounts[job.id]
        key = str(job.idempotency_key)
        if key not in account.keys:
            account.keys.append(key)
            if len(account.keys) > 1 and not account.promises and not account.may_begin_anew:
                self.faults.append(f"{job.id} begins an operation that nobody asked for")
            if len(account.keys) > 1 and account.promises:
                account.promises = 0
                account.payload, account.wish = (account.payload if account.wish is None else account.wish), None
            account.may_begin_anew = False
        if account.safe_until.get(key, self.clock.now() + LEASE) <= self.clock.now():
            self.faults.append(f"{job.id} is called again, and its provider may do what it has done")
        if job.payload != account.payload:
            self.faults.append(f"{job.id} was called with {job.payload} and not with {account.payload}")
        for blocker, on_dead in account.after.items():
            state = await self.state(blocker)
            is_done = state == "succeeded" or (on_dead == "run" and state not in OPEN)
            was_done = blocker in self.accounts and self.accounts[blocker].successes
            if not is_done and not was_done and not account.keys[1:]:
                self.faults.append(f"{job.id} was called while {blocker}, for which it waits, is {state}")
        if account.lane is not None and not account.retried:
            await self._check_lane(job)

    async def _check_lane(self, job: Job[Any]) -> None:
        for other in await self.app.jobs.list(limit=200, resource=job.resource_key):
            if other.ordering_key != job.ordering_key or other.order_no >= job.order_no or other.id == job.id:
                continue
            if str(other.state) in OPEN and not self.accounts[other.id].retried:
                self.faults.append(
                    f"{job.id} (number {job.order_no}) passes {other.id} ({other.order_no}, {other.state})"
                )

    async def check(self) -> None:
        """At each moment."""
        self.faults += broken(self.database)
        if self.faults:
            return
        self.faults += keep_house(self.database)
        waiting: Counter[str] = Counter()
        for one in await self.app.jobs.list(limit=500):
            account = self.accounts.get(one.id)
            fresh = account is not None and not account.keys and not account.retried
            if fresh and one.unique_key and str(one.state) in OPEN:
                waiting[one.unique_key] += 1
        self.faults += [
            f"{n} jobs that never ran wait under the unique key {key!r}" for key, n in waiting.items() if n > 1
        ]

    async def check_end(self) -> None:
        """When everything has had its time."""
        for id_ in self.jobs:
            account, rows = self.accounts[id_], await self.app.jobs.list(ids=[id_])
            if not rows:
                continue
            job = rows[0]
            if str(job.state) in OPEN and not await self._may_wait(job, account):
                self.faults.append(f"{id_} is left {job.state}")
            if account.promises and not account.ended and str(job.state) == "succeeded":
                self.faults.append(f"{id_} was to run once more, and did not")
            if account.successes and max(account.successes.values()) > 1 + account.retried:
                self.faults.append(f"{id_} did one operation {max(account.successes.values())} times")
        for flow, steps in self.flows.items():
            await self._check_flow(flow, steps)

    async def _may_wait(self, job: Any, account: Account) -> bool:
        if str(job.state) != "blocked":
            return False
        for blocker, on_dead in account.after.items():
            if on_dead == "wait" and await self.state(blocker) in ("dead", "cancelled", "blocked"):
                return True
            if await self.state(blocker) == "blocked":
                return True
        others = [one for one in await self.app.jobs.list(limit=200) if one.ordering_key == job.ordering_key]
        return job.ordering_key is not None and any(str(one.state) in ("dead", "blocked") for one in others)

    async def _check_flow(self, flow: UUID, steps: list[UUID]) -> None:
        info = await self.app.workflows.get(flow)
        if str(info.state) not in ("succeeded", "undone", "failed", "stuck"):
            self.faults.append(f"workflow {flow} is left {info.state}")
        did = [id_ for id_ in steps[:2] if self.accounts[id_].successes]
        for id_ in did:
            is_undone = self.accounts[id_].payload in self.undone
            if str(info.state) == "undone" and not is_undone:
                self.faults.append(f"step {id_} of {flow} has succeeded and was not undone: {self.undone}")
            if str(info.state) == "failed":
                self.faults.append(
                    f"step {id_} of {flow} has succeeded, and the workflow says that nothing was to undo"
                )
        if str(info.state) == "succeeded" and any(self.accounts[id_].payload in self.undone for id_ in steps):
            self.faults.append(f"a step of {flow} was undone, and the workflow has succeeded")


@handler("work", retry=RUNS_AGAIN)
async def work(job: Job[int]) -> None:
    """Does what its account says."""
    world: World = job.deps
    account = world.accounts[job.id]
    await world.begin(job)
    inside, account.inside = account.inside, ()
    for operation in inside:
        await carry_out(world, operation)
    how = "ok" if world.is_calm or not account.script else account.script.pop(0)
    if how == "later":
        raise Transient("later")
    if how == "never":
        raise Permanent("never")
    if how == "gone":
        raise Cancel("gone")
    account.successes[str(job.idempotency_key)] += 1


async def look_up(job: Job[int]) -> bool | None:
    """Says what became of the request that has no answer."""
    world: World = job.deps
    account, key = world.accounts[job.id], str(job.idempotency_key)
    safe_until, effect = account.safe_until.pop(key, None), account.effects.pop(key, None)
    if safe_until is None or safe_until > world.clock.now():
        world.faults.append(f"{job.id} looks up a request that is not in doubt")
    account.successes[key] += effect is True
    return effect


looked_up = handler("looked_up", retry=RUNS_AGAIN, reconcile=look_up)(work.fn)


@handler("undo")
async def undo(job: Job[int]) -> None:
    """Notes what was undone."""
    job.deps.undone.append(job.payload)


WORK, LOOKED_UP, UNDO = work, looked_up, undo


CHANGES = ("cancel", "retry", "discard", "delete", "edit")


async def carry_out(world: World, operation: tuple[Any, ...]) -> None:
    """One operation."""
    name, *words = operation
    if name in CHANGES:
        return await world.change(name, *words)
    resources, prune = world.app.resources, world.app.prune
    operations: dict[str, Any] = {
        "enqueue": world.enqueue,
        "workflow": world.workflow,
        "retry all": world.retry_all,
        "drain": world.drain,
        "house": world.house,
        "lose": world.lose,
        "advance": world.advance,
        "pause": lambda place: resources.pause(KEYS[place]),
        "resume": lambda place: resources.resume(KEYS[place]),
        "prune": lambda seconds: prune(older_than=timedelta(seconds=seconds)),
    }
    return await operations[name](*words)


def run(url: str, operations: list[tuple[Any, ...]]) -> list[str]:
    """Carry them out; returns what was not true."""

    async def all_of_them() -> list[str]:
        world = World(url)
        try:
            for operation in operations:
                await carry_out(world, operation)
                await world.check()
                if world.faults:
                    return [f"after {operation}:", *world.faults]
            world.is_calm = True
            for key in KEYS:
                await world.app.resources.resume(key)
            for _ in range(8):
                world.clock.advance(minutes=2)
                await world.house()
                await world.drain()
            await world.check()
            await world.check_end()
            return world.faults
        finally:
            await world.close()

    return asyncio.run(all_of_them())
