"""The history checker: what must be true of every run, whatever was killed, stopped or cut off in it.

Triggers in the database log every step of every job and circuit; handlers log when they start and end; the provider
logs what it received. The functions here read these logs and return the broken rules, so a test asserts an empty list
and a mutant a full one.

J1 a committed job is terminal in the end; J2 a rolled-back job never runs; J3 every succeeded job was executed;
J4 every step is permitted, raises the version, and exactly one is terminal; J5 a job succeeds only after the execution
that holds it has ended (the fence); J6 attempts never fall and never exceed their maximum; J7 limits and caps hold over
all processes; J8 circuits change as they may, a half-open one has one probe and an open one none; J9 no key has ready
work and no turn; J10 the provider stores each finished job's thing once, under one key; J11 nothing breaks a rule of
`tests/invariants.py`: no workflow stands still unattended, no lane lacks a head, no job waits for nothing; J12 each
workflow comes to its end, and what was done of one that failed is undone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from sqlalchemy import text

from resilient import JobState
from resilient.core.jobs.states import TERMINAL, permitted
from resilient.store.gates import turns
from tests import invariants

_POSTGRESQL = """
CREATE TABLE history (n bigserial, at timestamptz DEFAULT clock_timestamp(), began timestamptz DEFAULT now(),
 tx bigint DEFAULT txid_current(), job text, key text, old text, new text,
 version int, executions int, attempts int);
CREATE FUNCTION log_history() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 INSERT INTO history (job, key, old, new, version, executions, attempts) VALUES (NEW.id::text, NEW.resource_key,
  CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END, NEW.state, NEW.version, NEW.executions, NEW.attempts);
 RETURN NEW; END $$;
CREATE TRIGGER history AFTER INSERT OR UPDATE OF state ON resilient_job FOR EACH ROW EXECUTE FUNCTION log_history();
CREATE TABLE circuits (n bigserial, at timestamptz DEFAULT clock_timestamp(), tx bigint DEFAULT txid_current(),
 key text, old text, new text, generation bigint, before bigint, probe_until timestamptz, probe_before timestamptz);
CREATE FUNCTION log_circuits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 IF NEW.generation <> OLD.generation OR NEW.breaker <> OLD.breaker THEN
  INSERT INTO circuits (key, old, new, generation, before, probe_until, probe_before) VALUES (NEW.key, OLD.breaker,
   NEW.breaker, NEW.generation, OLD.generation, NEW.probe_until, OLD.probe_until);
 END IF; RETURN NEW; END $$;
CREATE TRIGGER circuits AFTER UPDATE ON resilient_resource FOR EACH ROW EXECUTE FUNCTION log_circuits();
"""
_SQLITE = """
CREATE TABLE history (n INTEGER PRIMARY KEY, at TEXT DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')), job TEXT,
 key TEXT, old TEXT, new TEXT, version INT, executions INT, attempts INT);
CREATE TRIGGER history_i AFTER INSERT ON resilient_job BEGIN
 INSERT INTO history (job, key, old, new, version, executions, attempts)
 VALUES (NEW.id, NEW.resource_key, NULL, NEW.state, NEW.version, NEW.executions, NEW.attempts); END;
CREATE TRIGGER history_u AFTER UPDATE OF state ON resilient_job BEGIN
 INSERT INTO history (job, key, old, new, version, executions, attempts)
 VALUES (NEW.id, NEW.resource_key, OLD.state, NEW.state, NEW.version, NEW.executions, NEW.attempts); END;
"""
_EDGES = {
    "closed": ("open",), "open": ("half_open",), "half_open": ("half_open", "closed", "open"),
}  # fmt: skip


def install(database):
    """Log every step from now on."""
    with database.sync_engine.begin() as c:
        if database.is_sqlite:
            c.connection.driver_connection.executescript(_SQLITE)
        else:
            c.exec_driver_sql(_POSTGRESQL)


def note(path, **fields):
    """Append one line to a log; O_APPEND keeps lines whole."""
    with Path(path).open("a") as f:
        f.write(json.dumps(fields) + "\n")


def read(path):
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def rows(database, statement):
    with database.sync_engine.begin() as c:
        return c.execute(text(statement)).all()


def check(database, log, *, committed, rolled_back=()):
    """The broken rules about jobs, each as one line naming rule and job."""
    broken = []
    started, ended = defaultdict(set), defaultdict(dict)
    for line in read(log):
        if line["event"] == "start":
            started[line["job"]].add(line["execution"])
        else:
            ended[line["job"]][line["execution"]] = line["n"]
    jobs = {str(r.id).replace("-", ""): r for r in rows(database, "SELECT * FROM resilient_job")}
    by_job = defaultdict(list)
    for step in rows(database, "SELECT * FROM history ORDER BY n"):
        by_job[step.job.replace("-", "")].append(step)
    for id_ in committed:
        job = jobs.get(id_)
        if job is None or JobState(job.state) not in TERMINAL:
            broken.append(f"J1 {id_}: {job and job.state}")
            continue
        if job.state == "succeeded" and not started[id_]:
            broken.append(f"J3 {id_}: succeeded without an execution")
        if job.max_attempts is not None and job.attempts > job.max_attempts:
            broken.append(f"J6 {id_}: {job.attempts} attempts of {job.max_attempts}")
        broken += steps(id_, by_job[id_], ended[id_])
    broken += [f"J2 {id_}: was rolled back and ran" for id_ in rolled_back if started[id_] or id_ in jobs]
    stranded = database.transaction_sync(turns.stranded)
    broken += [f"J9 {key}: ready work and no turn" for key, _ in stranded]
    return broken + [f"J11 {line}" for line in invariants.broken(database)]


def steps(id_, history, ended):
    """One job's life; ``ended``: its executions that came to their end."""
    broken, version, attempts, terminal = [], 0, 0, 0
    for step in history:
        if step.old is not None and step.old != step.new:
            if not permitted(JobState(step.old), JobState(step.new)):
                broken.append(f"J4 {id_}: {step.old} to {step.new}")
            if step.version <= version:
                broken.append(f"J4 {id_}: version {step.version} after {version}")
        if step.attempts < attempts:
            broken.append(f"J6 {id_}: attempts fell from {attempts} to {step.attempts}")
        version, attempts = max(version, step.version), step.attempts
        if JobState(step.new) in TERMINAL and step.old != step.new:
            terminal += 1
            if step.new == "succeeded" and step.executions not in ended:
                broken.append(f"J5 {id_}: succeeded in execution {step.executions}, which had not ended")
    if terminal != 1:
        broken.append(f"J4 {id_}: {terminal} terminal steps")
    return broken


def workflows(database):
    """J12, once nothing is left to do."""
    broken = []
    found = rows(
        database,
        "SELECT w.id, w.state, s.name, j.state AS job, u.state AS undo, s.undo_kind FROM resilient_workflow w"
        " JOIN resilient_step s ON s.workflow_id = w.id LEFT JOIN resilient_job j ON j.id = s.job_id"
        " LEFT JOIN resilient_job u ON u.id = s.undo_job_id",
    )
    for one in found:
        done = one.job == "succeeded" and one.undo_kind is not None
        well = {
            "succeeded": one.job == "succeeded" and one.undo is None,
            "undone": one.undo == "succeeded" if done else one.undo in (None, "succeeded"),
            "failed": not done,
        }
        if not well.get(one.state, False):
            broken.append(f"J12 {one.id}: {one.state}, its step {one.name} {one.job}, undo {one.undo}")
    return broken


def within(arrivals, most, seconds):
    """J7 by the provider's log: at most ``most`` requests of an account in any ``seconds``."""
    broken, by_account = [], defaultdict(list)
    for line in arrivals:
        by_account[line["account"]].append(line["t"])
    for account, times in by_account.items():
        times.sort()
        for i in range(most, len(times)):
            if times[i] - times[i - most] < seconds:
                broken.append(f"J7 {account}: {most + 1} requests in {times[i] - times[i - most]:.2f} s, of {most}")
                break
    return broken


def capped(database, key, most):
    """J7 by the job rows: never more than ``most`` jobs running at or below ``key``."""
    running = set()
    for step in rows(database, "SELECT * FROM history ORDER BY n"):
        if step.key == key or step.key.startswith(key + "/"):
            (running.add if step.new == "running" else running.discard)(step.job)
            if len(running) > most:
                return [f"J7 {key}: {len(running)} jobs running, of {most}"]
    return []


def circuits(database, arrivals=None, *, in_flight=0.4):
    """J8. With ``arrivals`` (the provider's log) also who was let through.

    A request counts for the moment its job was claimed, because who claims decides; it may arrive much later.
    ``in_flight``: how long after a circuit opened a claim may begin that does not see it.
    """
    broken, by_key, claims = [], defaultdict(list), {} if arrivals is None else _claims(database)
    for row in rows(database, "SELECT * FROM circuits ORDER BY n"):
        by_key[row.key].append(row)
    for key, changes in by_key.items():
        for change in changes:
            if change.new not in _EDGES[change.old] or change.generation != change.before + 1:
                broken.append(f"J8 {key}: {change.old} to {change.new}, generation {change.before} {change.generation}")
            if change.old == change.new == "half_open" and change.at < change.probe_before:
                broken.append(f"J8 {key}: a second probe was elected before the lease of the first ended")
        if arrivals is not None:
            below = [_let_through(line, claims, changes) for line in arrivals if f"p/{line['account']}".startswith(key)]
            broken += _probes(key, changes, below, in_flight)
    return broken


def _claims(database):
    """The claims of each job, by the number in its payload, in their order."""
    numbers = {}
    for row in rows(database, "SELECT id, payload FROM resilient_job"):
        payload = row.payload if isinstance(row.payload, dict) else json.loads(row.payload)
        numbers[str(row.id)] = payload.get("n")
    found = defaultdict(list)
    for step in rows(database, "SELECT job, at, began, tx FROM history WHERE new = 'running' ORDER BY n"):
        found[numbers.get(step.job)].append(step)
    return found


def _let_through(line, claims, changes):
    """When a request was: with the election in the transaction of its claim, else when that began."""
    before = [claim for claim in claims.get(line["n"], ()) if claim.at.timestamp() <= line["t"]]
    if not before:
        return line["t"]
    elected = [change.at for change in changes if change.tx == before[-1].tx]
    return (elected[-1] if elected else before[-1].began).timestamp()


def _probes(key, changes, arrivals, in_flight):
    """At most one request for each half-open generation, none while a circuit is open."""
    broken = []
    ends = [change.at.timestamp() for change in changes[1:]] + [float("inf")]
    for change, end in zip(changes, ends, strict=True):
        begin, allowed = change.at.timestamp(), {"open": 0, "half_open": 1}.get(change.new)
        if change.new == "open":
            begin += in_flight
        count = sum(begin <= t < end for t in arrivals)
        if allowed is not None and count > allowed:
            broken.append(f"J8 {key}: {count} requests in generation {change.generation}, {change.new}")
    return broken


def delivered(database, arrivals):
    """J10. Things are counted by their number ``n``, which the test gives each job."""
    stored, keys = defaultdict(int), defaultdict(set)
    for line in arrivals:
        stored[line["n"]] += line["new"]
        keys[line["n"]].add(line["key"])
    broken = [f"J10 {n}: sent under {len(k)} keys" for n, k in keys.items() if len(k) > 1]
    broken += [f"J10 {n}: stored {count} times" for n, count in stored.items() if count > 1]
    succeeded = rows(database, "SELECT payload FROM resilient_job WHERE kind = 'work' AND state = 'succeeded'")
    numbers = [(row.payload if isinstance(row.payload, dict) else json.loads(row.payload))["n"] for row in succeeded]
    return broken + [f"J10 {n}: succeeded and was not stored" for n in numbers if not stored[n]]
