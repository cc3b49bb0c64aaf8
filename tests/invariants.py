"""What is true of a database of the engine at every committed moment, checked by one function: `broken`.

Each rule is one query that gives the rows which break it; a rule names what it is about, so that a failure reads as a
sentence. `keep_house` does what staging and housekeeping do, and says what they had to repair: nothing, ever.
`install` notes every step of every job from then on, for the rules about its life (`lives`).
"""

from __future__ import annotations

from resilient import JobState
from resilient.core.gates.policy import Policy
from resilient.core.jobs.states import TERMINAL, permitted
from resilient.engine.jobs import workflows as attending
from resilient.engine.run import sweeper
from resilient.store.db.database import Database
from resilient.store.gates import turns
from resilient.store.jobs import dependencies, order, workflows

_OVER = "('succeeded', 'dead', 'cancelled')"
_GOES = "('ready', 'scheduled', 'running')"
_OPEN = "('ready', 'scheduled', 'running', 'blocked')"
_IN_LANE = "o.resource_key = j.resource_key AND o.ordering_key = j.ordering_key"

RULES = {
    # -- jobs
    "a job is over without a time, or has one and is not over": (
        f"SELECT id, state FROM {{job}} WHERE (state IN {_OVER}) <> (finished_at IS NOT NULL)"
    ),
    "a running job has no owner or no lease, or another job has one": (
        "SELECT id, state FROM {job} WHERE (state = 'running') <> (locked_by IS NOT NULL)"
        " OR (state = 'running') <> (lease_until IS NOT NULL)"
    ),
    "a job that is over holds its unique key": (
        f"SELECT id, state FROM {{job}} WHERE state IN {_OVER} AND unique_lock IS NOT NULL"
    ),
    "a job that is over is to run once more, to be cancelled, or waits for a resource": (
        f"SELECT id, state FROM {{job}} WHERE state IN {_OVER}"
        " AND (once_more OR wish IS NOT NULL OR cancel_requested OR waiting_for IS NOT NULL)"
    ),
    "a job was charged more attempts than it has": "SELECT id, attempts FROM {job} WHERE attempts > max_attempts",
    # -- turns
    "a key has ready work, no turn and no parked turn": (
        "SELECT DISTINCT j.resource_key FROM {job} j WHERE j.state = 'ready'"
        " AND NOT EXISTS (SELECT 1 FROM {turn} t WHERE t.resource_key = j.resource_key)"
    ),
    "a turn is parked on what is neither its key nor above it, or nobody looks at it again": (
        "SELECT resource_key, parked_on FROM {turn} WHERE parked_on IS NOT NULL AND (recheck_at IS NULL"
        " OR (parked_on <> resource_key AND substr(resource_key, 1, length(parked_on) + 1) <> parked_on || '/'))"
    ),
    # -- lanes
    "a lane with open jobs has no row": (
        f"SELECT j.id, j.resource_key FROM {{job}} j WHERE j.ordering_key IS NOT NULL AND j.state IN {_OPEN}"
        f" AND NOT EXISTS (SELECT 1 FROM {{order}} o WHERE {_IN_LANE})"
    ),
    "a lane has waiting jobs and no head, or one that is over": (
        f"SELECT DISTINCT j.resource_key, j.ordering_key FROM {{job}} j JOIN {{order}} o ON {_IN_LANE}"
        " LEFT JOIN {job} h ON h.id = o.head_id WHERE j.state = 'blocked' AND (h.id IS NULL OR (h.finished_at IS NOT"
        f" NULL AND NOT {order.HOLDS.replace('j.', 'h.')}))"
    ),
    "a job that is not the head of its lane may go": (
        f"SELECT j.id, j.state FROM {{job}} j JOIN {{order}} o ON {_IN_LANE} WHERE j.state IN {_GOES}"
        " AND (o.head_id IS NULL OR o.head_id <> j.id)"
    ),
    "a job waits in its lane with a number that is passed over or was never given": (
        f"SELECT j.id, j.order_no, o.seek_no, o.last_no FROM {{job}} j JOIN {{order}} o ON {_IN_LANE}"
        " WHERE j.state = 'blocked' AND (j.order_no IS NULL OR j.order_no > o.last_no"
        " OR (j.order_no < o.seek_no AND j.id <> coalesce(o.head_id, j.id)))"
    ),
    # -- waiting for others
    "a job waits for another number of things than there are": (
        "SELECT j.id, j.state, j.waits FROM {job} j LEFT JOIN {order} o ON " + _IN_LANE + " WHERE j.state = 'blocked'"
        " AND j.waits <> (SELECT count(*) FROM {dependency} e WHERE e.job_id = j.id)"
        " + CASE WHEN j.ordering_key IS NULL OR o.head_id = j.id THEN 0 ELSE 1 END"
    ),
    "a job may go and waits for something": (
        f"SELECT j.id, j.state, j.waits FROM {{job}} j WHERE j.state IN {_GOES} AND (j.waits <> 0"
        " OR EXISTS (SELECT 1 FROM {dependency} e WHERE e.job_id = j.id AND e.resolved))"
    ),
    "an edge stands whose blocker is over, gone, or does not know of it": (
        "SELECT e.job_id, e.blocker_id FROM {dependency} e LEFT JOIN {job} b ON b.id = e.blocker_id"
        " LEFT JOIN {job} w ON w.id = e.job_id WHERE e.resolved AND (w.id IS NULL OR b.id IS NULL"
        " OR b.state = 'succeeded' OR NOT b.followed"
        " OR (w.state = 'blocked' AND b.state IN ('dead', 'cancelled') AND e.on_dead <> 'wait'))"
    ),
    # -- workflows
    "a workflow is over without a time, or has one and is not over": (
        "SELECT id, state FROM {workflow} WHERE (state IN ('succeeded', 'undone', 'failed')) <> (finished_at IS NOT"
        " NULL)"
    ),
    "a workflow undoes two steps at once": (
        f"SELECT s.workflow_id FROM {{step}} s JOIN {{job}} u ON u.id = s.undo_job_id WHERE u.state IN {_OPEN}"
        " GROUP BY s.workflow_id HAVING count(*) > 1"
    ),
    "an undo is of no step": (
        "SELECT s.workflow_id, s.name FROM {step} s JOIN {workflow} w ON w.id = s.workflow_id WHERE w.state = 'undoing'"
        " AND s.undo_job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {job} u WHERE u.id = s.undo_job_id)"
    ),
    # -- gates
    "a circuit is open since never, or half open without a probe": (
        "SELECT key, breaker FROM {resource} WHERE (breaker = 'open' AND opened_at IS NULL)"
        " OR (breaker = 'half_open' AND (probe_owner IS NULL OR probe_until IS NULL))"
    ),
    "a cooldown has no beginning": (
        "SELECT key FROM {resource} WHERE blocked_until IS NOT NULL AND blocked_since IS NULL"
    ),
    # -- credentials
    "a grant is being refreshed without a lease or a mark": (
        "SELECT id FROM {grant} WHERE state = 'refreshing' AND (lease_until IS NULL OR sent_at IS NULL)"
    ),
    "a connection has no grant": (
        "SELECT n.resource_key FROM {connection} n WHERE NOT EXISTS (SELECT 1 FROM {grant} g WHERE g.id = n.grant_id)"
    ),
    "an account's gate does not say what its grant is": (
        "SELECT n.resource_key, g.state, r.auth FROM {connection} n JOIN {grant} g ON g.id = n.grant_id"
        " JOIN {resource} r ON r.key = n.resource_key WHERE (g.state = 'needs_reauth') <> (r.auth = 'needs_reauth')"
    ),
    "an account that is connected waits for a connection": (
        "SELECT n.resource_key, g.state FROM {connection} n JOIN {grant} g ON g.id = n.grant_id"
        " JOIN {resource} r ON r.key = n.resource_key WHERE r.auth = 'not_connected'"
    ),
    "a schedule's account has no schedule": (
        "SELECT a.schedule, a.resource_key FROM {schedule_account} a"
        " WHERE NOT EXISTS (SELECT 1 FROM {schedule} s WHERE s.name = a.schedule)"
    ),
}  # fmt: skip


def broken(database: Database) -> list[str]:
    """The rules that do not hold, each with what breaks it. One snapshot: it may be asked while others work."""
    return database.transaction_sync(_broken)


def _broken(c, d):
    if d.is_postgresql:
        c.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    found = []
    for rule, query in RULES.items():
        found += [f"{rule}: {tuple(map(str, row))}" for row in d.run(c, query)]
    still = attending._still(c, d, workflows.unattended(c, d, "", 10_000))
    return found + [f"a workflow stands still, and nobody was asked to look at it: {id_}" for id_ in still]


# -- what housekeeping would repair ------------------------------------------------------------------------------------


def keep_house(database: Database, *, rounds: int = 20) -> list[str]:
    """Stage and attend until nothing moves, then repair: what had to be repaired."""

    def attend(c, d):
        staged, released, due = sweeper.attend(c, d, _policy, 0.5)
        looked = attending.attend(c, d).size
        return bool(staged or released or looked or due.edges or due.workflows)

    for _ in range(rounds):
        if not database.transaction_sync(attend):
            break
    else:
        return [f"staging does not come to an end in {rounds} rounds"]
    found = {
        "turns": database.transaction_sync(turns.stranded),
        "lanes": database.transaction_sync(sweeper._repair_lanes),
        "jobs": database.transaction_sync(sweeper._repair_waiting, dependencies.Walk())[0],
        "workflows": database.transaction_sync(sweeper._repair_workflows, "")[0],
    }
    return [f"housekeeping had to repair {what}: {n}" for what, n in found.items() if n]


def _policy(_key, _override):
    return Policy()


# -- lives -------------------------------------------------------------------------------------------------------------

_POSTGRESQL = """
CREATE TABLE life (n bigserial, job text, old text, new text, version int, before int);
CREATE FUNCTION note_life() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 INSERT INTO life (job, old, new, version, before) VALUES (NEW.id::text, CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END,
  NEW.state, NEW.version, CASE WHEN TG_OP = 'UPDATE' THEN OLD.version END); RETURN NEW; END $$;
CREATE TRIGGER life AFTER INSERT OR UPDATE OF state ON resilient_job FOR EACH ROW EXECUTE FUNCTION note_life();
"""
_SQLITE = """
CREATE TABLE life (n INTEGER PRIMARY KEY, job TEXT, old TEXT, new TEXT, version INT, before INT);
CREATE TRIGGER life_i AFTER INSERT ON resilient_job BEGIN
 INSERT INTO life (job, old, new, version) VALUES (NEW.id, NULL, NEW.state, NEW.version); END;
CREATE TRIGGER life_u AFTER UPDATE OF state ON resilient_job BEGIN INSERT INTO life (job, old, new, version, before)
 VALUES (NEW.id, OLD.state, NEW.state, NEW.version, OLD.version); END;
"""


def install(c) -> None:
    """Note every step of every job from now on; ``c``: a driver's connection."""
    if hasattr(c, "executescript"):
        c.executescript(_SQLITE)
    else:
        c.execute(_POSTGRESQL)


def lives(database: Database, *, replayed: bool = False) -> list[str]:
    """What no job may do: a step that the table of states does not know, one without a new version, two ends.

    ``replayed``: somebody may have retried what was over, so one may end again.
    """
    found, ends, versions = [], {}, {}
    query = "SELECT job, old, new, version, before FROM life ORDER BY n"
    for job, old, new, version, known in database.transaction_sync(lambda c, d: d.run(c, query).all()):
        before, versions[job] = versions.get(job, known), version  # one transaction may raise it in a statement before
        if old is None or old == new:
            continue
        if not permitted(JobState(old), JobState(new)):
            found.append(f"a job went from {old} to {new}: {job}")
        if version <= before:
            found.append(f"a job went from {old} to {new} without a new version: {job}")
        if JobState(new) in TERMINAL and JobState(old) not in TERMINAL:
            ends[job] = ends.get(job, 0) + 1
    return found + [f"a job ended {n} times: {job}" for job, n in ends.items() if n > 1 and not replayed]
