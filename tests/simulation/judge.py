"""What must be true of a run, whatever happened in it.

Rules J1 to J10 are those of the chaos tests' history checker.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import sqlalchemy as sa

from tests import invariants
from tests.chaos import history
from tests.simulation.world import ALL, CAP, MOST, PER, ROAD

STAY = 2.0  # seconds in a slot: a second for somebody else's refresh, or one of its own, and the request
LATE = 1.3  # seconds for which another process may not have heard of a cooldown: its facts are at most a second old
IN_FLIGHT = 1.3  # the same for a circuit that opened
REPLACED = 0.25  # the same for a probe whose lease ended as it was about to send: it has looked a tenth before


def judge(world):
    """The broken rules, each as one line."""
    database = world.database
    log = world.path.with_suffix(".log")
    log.write_text("".join(json.dumps(line) + "\n" for line in world.log))
    broken = list(world.errors)
    broken += history.check(database, log, committed=world.committed, rolled_back=world.rolled_back)
    broken += history.capped(database, "p/0", CAP)
    broken += (
        accounts(world)
        + fenced(world)
        + stored_once(world)
        + effects(world)
        + limited(world)
        + cooled(world)
        + in_order(world)
    )
    broken += workflows(world) + published(world) + circuits(world) + repaired(world)
    return broken


def accounts(world):
    """Tokens are refreshed by one process at a time, the grant lives; no job is charged for it or keeps its slot."""
    jobs = history.rows(
        world.database, "SELECT id, state, attempts, last_error FROM resilient_job WHERE kind = 'fetched'"
    )
    broken = [
        f"T {job.id}: {job.state}, {job.attempts} attempts, {job.last_error}"
        for job in jobs
        if job.state != "succeeded" or (job.attempts and not world.frozen)  # a frozen process uses up its timeouts
    ]
    lost = sum("crash" in note or "worker" in note for note in world.system.notes) + world.frozen
    if world.accounts.most_open > 1 + lost:
        broken.append(f"T {world.accounts.most_open} refreshes at once")
    if world.accounts.refused:
        broken.append(f"T {world.accounts.refused} refreshes with a token that was used")
    if not world.frozen and (longest := max(world.stays, default=0.0)) > STAY:
        broken.append(f"T a job was in its slot for {longest:.1f} s, waiting for its token")
    return broken


def fenced(world):
    """A job succeeds only after the execution that holds it has ended, and once."""
    ended = {(line["job"], line["execution"]): line["t"] for line in reversed(world.log) if line["event"] == "end"}
    broken, jobs = [], Counter()
    for row in history.rows(world.database, "SELECT * FROM ends ORDER BY n"):
        job = row.job.replace("-", "")
        jobs[job] += 1
        if job in world.committed and not ended.get((job, row.executions), float("inf")) <= row.at:
            broken.append(f"J5 {job}: succeeded at {row.at:.3f} in execution {row.executions}, which had not ended")
    return broken + [f"J4 {job}: succeeded {count} times" for job, count in jobs.items() if count > 1]


def stored_once(world):
    """J10: the provider does what a job asks once."""
    counts = Counter((line["n"], line["action"]) for line in world.arrivals if line["new"])
    return [f"J10 {action} {n}: done {count} times" for (n, action), count in counts.items() if count > 1]


def effects(world):
    """What a handler writes with its job's end is there once if the job succeeded, else not at all."""
    found = Counter(row.n for row in history.rows(world.database, "SELECT n FROM effect"))
    jobs = history.rows(world.database, "SELECT state, payload FROM resilient_job WHERE kind IN ('written', 'plain')")
    states = {json.loads(row.payload)["n"]: row.state for row in jobs}
    return [
        f"E {n}: {state}, {found[n]} rows"
        for n, state in states.items()
        if found[n] != (1 if state == "succeeded" else 0)
    ]


def limited(world):
    """J7, as the provider counts; requests that a frozen worker had on the way come late, all at once."""
    broken, times = [], defaultdict(list)
    for line in world.arrivals:
        for key in ("p", f"p/{line['account']}"):
            times[key].append(line["t"])
    for key, ts in times.items():
        ts.sort()
        most = ALL if key == "p" else MOST
        most += 6 * world.frozen + most * world.clock_steps  # a clock that is set forward lets more through
        for i in range(most, len(ts)):
            if ts[i] - ts[i - most] < PER - ROAD:
                broken.append(f"J7 {key}: {most + 1} requests in {ts[i] - ts[i - most]:.3f} s of {PER}")
                break
    return broken


def cooled(world):
    """No request of an account arrives before the time it was told, but for those that were on their way.

    What only a process knew that crashed before it could write it, nobody knows.
    """
    crashes = [float(note.split()[0]) for note in world.system.notes if note.endswith(": crash before cool_down")]
    broken = []
    for line in world.arrivals:
        if line["status"] == 429 and not any(line["t"] <= crash < line["t"] + 2 * ROAD for crash in crashes):
            begin, end = line["t"] + LATE, line["t"] + line["wait"]
            late = [
                other for other in world.arrivals
                if other["account"] == line["account"] and begin < other["t"] < end and begin < end
            ]  # fmt: skip
            if len(late) > 6 * world.frozen:
                broken.append(f"C p/{line['account']}: {len(late)} requests in the cooldown told at {line['t']:.3f}")
    return broken


def in_order(world):
    """Jobs of one ordering key of one resource run one after the other, in the order of their numbers."""
    rows = history.rows(
        world.database,
        "SELECT id, resource_key, order_no FROM resilient_job WHERE ordering_key IS NOT NULL AND kind = 'ordered'",
    )
    place = {str(row.id).replace("-", ""): (row.resource_key, row.order_no) for row in rows}
    ended = defaultdict(list)
    for line in world.log:
        if line["event"] == "end" and line["job"] in place:
            key, no = place[line["job"]]
            ended[key].append(no)
    broken = []
    for key, numbers in ended.items():
        first = list(dict.fromkeys(numbers))
        broken += [f"O {key}: {b} ended after {a}" for a, b in pairwise(first) if b < a]
    return broken


def workflows(world):
    """Each is over: done, or everything that was done is undone."""
    broken = []
    for id_, fails in world.flows_committed:
        (row,) = history.rows(world.database, f"SELECT * FROM resilient_workflow WHERE id = '{id_.hex}'") or [None]
        if row is None or row.finished_at is None:
            broken.append(f"W {id_}: {row and row.state}")
            continue
        steps = history.rows(
            world.database,
            "SELECT s.name, j.state, u.state AS undone FROM resilient_step s"
            " LEFT JOIN resilient_job j ON j.id = s.job_id"
            f" LEFT JOIN resilient_job u ON u.id = s.undo_job_id WHERE s.workflow_id = '{id_.hex}'",
        )
        states = {s.name: (s.state, s.undone) for s in steps}
        if not fails and row.state == "succeeded" and any(s != "succeeded" for s, _ in states.values()):
            broken.append(f"W {id_}: succeeded with {states}")
        if row.state != "succeeded":
            broken += [
                f"W {id_}: {row.state}, {name} was done and not undone"
                for name, (state, undone) in states.items()
                if name != "c" and state == "succeeded" and undone != "succeeded"
            ]
        if fails and row.state == "succeeded":
            broken.append(f"W {id_}: succeeded although its last step fails")
    return broken


def published(world):
    """Every committed event arrived, none that was not; first arrivals of a key in the order of the commits."""
    broken, arrived = [], list(dict.fromkeys(world.arrived_events))
    broken += [f"P {event}: committed and never arrived" for event in world.events if event not in arrived]
    broken += [f"P {event}: arrived and was never committed" for event in arrived if event not in world.events]
    for key in {key for key, _ in world.events}:
        committed = [n for k, n in world.events if k == key]
        first = [n for k, n in arrived if k == key]
        if [n for n in committed if n in first] != first:
            broken.append(f"P {key}: arrived as {first}, committed as {committed}")
    return broken


def repaired(world):
    """Nothing was left for housekeeping to repair, and nothing was said of a bug."""
    broken = [f"H {line}" for line in world.bugs]
    database = world.database
    broken += [f"H {rule}" for rule in [*invariants.broken(database), *invariants.keep_house(database)]]
    ((running,),) = history.rows(database, "SELECT count(*) FROM resilient_job WHERE state = 'running'")
    return broken + ([f"H {running} jobs still run"] if running else [])


def circuits(world):
    """J8: a circuit changes as it may, one that is half open lets one request through, an open one none."""
    broken, by_key = [], defaultdict(list)
    for row in history.rows(world.database, "SELECT * FROM circuits ORDER BY n"):
        by_key[row.key].append(row)
    for key, changes in by_key.items():
        arrivals = [line["t"] for line in world.arrivals if f"p/{line['account']}".startswith(key)]
        ends = [change.at for change in changes[1:]] + [float("inf")]
        for change, end in zip(changes, ends, strict=True):
            if change.new not in history._EDGES[change.old] or change.generation != change.before + 1:
                edge = f"{change.old} to {change.new}"
                broken.append(f"J8 {key}: {edge}, generation {change.before} {change.generation}")
            begin, most = change.at, {"open": 0, "half_open": 1}.get(change.new)
            if most is None:
                continue
            if change.new == "open":
                begin += IN_FLIGHT
            elif change.old == "half_open":
                begin += REPLACED
            count = sum(begin <= t < end for t in arrivals)
            if count > most + 6 * world.frozen:
                broken.append(f"J8 {key}: {count} requests in generation {change.generation}, {change.new}")
    return broken


_TIMES = """
CREATE TABLE ends (n INTEGER PRIMARY KEY, at REAL, job TEXT, executions INT);
CREATE TRIGGER ends_u AFTER UPDATE OF state ON resilient_job WHEN NEW.state = 'succeeded' BEGIN
 INSERT INTO ends (at, job, executions) VALUES (virtual_seconds(), NEW.id, NEW.executions); END;
"""
_CIRCUITS = """
CREATE TABLE circuits (n INTEGER PRIMARY KEY, at REAL, key TEXT, old TEXT, new TEXT, generation INT, before INT);
CREATE TRIGGER circuits_u AFTER UPDATE ON resilient_resource
WHEN NEW.generation <> OLD.generation OR NEW.breaker <> OLD.breaker BEGIN
 INSERT INTO circuits (at, key, old, new, generation, before)
 VALUES (virtual_seconds(), NEW.key, OLD.breaker, NEW.breaker, NEW.generation, OLD.generation); END;
"""


def setup(database):
    """Tables of the program, and the log of every step."""
    history.install(database)
    with database.sync_engine.begin() as c:
        c.connection.driver_connection.create_function("virtual_seconds", 0, lambda: 0.0)
        c.connection.driver_connection.executescript(_TIMES + _CIRCUITS)
    with database.sync_engine.begin() as c:
        c.execute(sa.text("CREATE TABLE effect (n INTEGER, what TEXT)"))
