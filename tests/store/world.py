"""A small database with something of everything in it: what the pairs of transactions (`acts.py`) work on.

Every row has a name, and its id is made of that, so that two worlds are the same. Times stand around the test clock's.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from resilient import GrantState
from resilient.core.schedules import cron
from resilient.core.schedules.schedule import Spec, Template
from resilient.core.sync.stream import Cursor
from resilient.engine.ground.encoder import JobRequest
from resilient.engine.jobs import queue
from resilient.store import sync as cursors
from resilient.store.accounts import connections, grants
from resilient.store.db.dialect import Dialect
from resilient.store.gates import limits, resources
from resilient.store.jobs import changes, workflows
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.filters import JobFilter
from resilient.store.jobs.insert import NewJob
from resilient.store.schedules import ticks as schedules

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
AGO, AHEAD, LONG_AGO = NOW - timedelta(seconds=5), NOW + timedelta(hours=1), NOW - timedelta(days=30)
FLOWS = ("flow1", "flow2", "flow3", "flow4")
HOURLY = Spec(cron.Ticks(every=timedelta(hours=1)), Template("p/1", "null"))
KEYS = ("p", "p/1", "p/2", "q", "q/1", "c", "c/1", "c/2", "h", "h/1", "flow", "idle", "idle/1")

# -- which jobs there are: name, key, and what is special about them ---------------------------------------------------

_RUNNING = {
    "state": "running", "version": 2, "executions": 1, "locked_by": "w", "lease_until": NOW + timedelta(minutes=1),
    "started_at": AGO,
}  # fmt: skip
_LOST = _RUNNING | {"locked_by": "lost", "lease_until": AGO}
_FREE = {"locked_by": None, "lease_until": None}
_DEAD = _FREE | {
    "state": "dead",
    "version": 3,
    "executions": 1,
    "attempts": 1,
    "finished_at": AGO,
    "last_error_kind": "bug",
}
_DONE = _FREE | {"state": "succeeded", "version": 3, "executions": 1, "finished_at": AGO}
_OLD = {"finished_at": LONG_AGO, "updated_at": LONG_AGO}
PLAIN = (
    ("ready1", "p/1", {}), ("ready2", "p/1", {"priority": 3}), ("ready3", "p/2", {}), ("ready4", "q/1", {}),
    ("run1", "p/1", _RUNNING), ("run2", "p/1", _RUNNING), ("run3", "p/2", _RUNNING), ("run4", "p/2", _RUNNING),
    ("late1", "q/1", _LOST), ("late2", "q/1", _LOST),
    ("due1", "p/1", {"state": "scheduled", "run_at": AGO}), ("due2", "q/1", {"state": "scheduled", "run_at": AGO}),
    ("ahead", "p/1", {"state": "scheduled", "run_at": AHEAD}),
    ("elsewhere1", "p/1", {"state": "scheduled", "run_at": AGO, "waiting_for": "c/2"}),
    ("elsewhere2", "p/1", {"state": "scheduled", "run_at": AHEAD, "waiting_for": "c/2"}),
    ("expired", "p/2", {"expires_at": AGO}),
    ("dead1", "p/1", _DEAD), ("dead2", "p/2", _DEAD), ("olddead", "p/1", _DEAD | _OLD),
    ("done1", "p/1", _DONE), ("old1", "p/1", _DONE | _OLD), ("old2", "p/2", _DONE | _OLD),
    ("paused", "h/1", {}), ("broken", "c/1", {}), ("cooling", "c/2", {}),
)  # fmt: skip
LANES = {
    "lane1": ("p/1", ("run", "next", "last")), "lane2": ("q/1", ("ready", "next", "last")),
    "lane3": ("p/2", ("dead", "next")), "lane4": ("outbox/orders", ("run", "next")),
}  # fmt: skip
CHILDREN = {
    "child1": ("run1",), "child2": ("run1", "run2"), "child3": ("late1",), "child4": ("child1",),
    "child5": ("run2", "late2"),  # it was cancelled while it waited
}  # fmt: skip
PARKED = {"h/1": "h/1", "c/1": "c/1", "c/2": "c/2"}


def id_of(name: str) -> UUID:
    """The id of a named row."""
    return uuid5(NAMESPACE_URL, name)


def names() -> dict[str, str]:
    """Named ids, as hexadecimal text, back to their names."""
    steps = [f"{flow}.{step}" for flow in FLOWS for step in ("a", "b", "c", "a.undo")]
    lanes = [f"{lane}.{one}" for lane, (_, ones) in LANES.items() for one in ones]
    known = [*(name for name, _, _ in PLAIN), *lanes, *CHILDREN, "unique1", "unique2", *steps, *FLOWS, "new", "grant1"]
    return {id_of(name).hex: name for name in known}


def new(name: str, key: str, **over: object) -> NewJob:
    """A job with a name."""
    return NewJob(id_of(name), "k", key, "null", max_attempts=5, **over)  # type: ignore[arg-type]


def fresh(key: str, **over: object) -> NewJob:
    """One without: whoever runs twice makes two."""
    return new(str(uuid4()), key, **over)


def build(c, d: Dialect) -> None:
    """Everything, in one transaction."""
    resources.ensure(c, d, KEYS)
    jobs.insert(c, d, [new(name, key) for name, key, _ in PLAIN])
    for name, _, values in PLAIN:
        _change(c, d, name, **values)
    _build_lanes(c, d)
    _build_unique(c, d)
    _build_children(c, d)
    _build_workflows(c, d)
    _build_gates(c, d)
    _build_rest(c, d)


def _change(c, d, name, **values):
    if values:
        sets = ", ".join(f"{column} = :{column}" for column in values)
        d.run(c, f"UPDATE {{job}} SET {sets} WHERE id = :id", {**values, "id": d.id(id_of(name))})


def _build_lanes(c, d):
    for lane, (key, ones) in LANES.items():
        ordered = [JobRequest(new(f"{lane}.{o}", key, ordering_key=lane, ordering_policy="block")) for o in ones]
        queue.write(c, d, ordered)
    for name in ("lane1.run", "lane4.run"):
        _change(c, d, name, **_RUNNING)
    _change(c, d, "lane3.dead", **_DEAD)


def _build_unique(c, d):
    row = new("unique1", "p/1", unique_key="x", unique_until="start")
    held = new("unique2", "p/1", unique_key="y", unique_until="finish")
    queue.write(c, d, [JobRequest(row), JobRequest(held)])
    _change(c, d, "unique2", **_RUNNING)


def _build_children(c, d):
    for name, blockers in CHILDREN.items():
        row = new(name, "p/2", waits=len(blockers), followed=True)
        resolved = name != "child3"  # whose edge nobody has looked at yet
        queue.write(c, d, [JobRequest(row, after=tuple(map(id_of, blockers)))], last=resolved)
    changes.Sweep(changes.Cancel(), JobFilter(ids=(id_of("child5"),))).step(c, d)


def _build_workflows(c, d):
    for flow in FLOWS:
        id_ = id_of(flow)
        workflows.insert(c, d, id_, flow, NOW)
        steps = [(f"{flow}.{step}", step, no) for no, step in enumerate("abc")]
        made = [
            workflows.NewStep(step, no, id_of(name), "k", "flow", undo_kind="k", undo_version=1, undo_payload="null")
            for name, step, no in steps
        ]
        workflows.insert_steps(c, d, id_, made)
        before = tuple(id_of(name) for name, _, _ in steps[:2])
        rows = [new(name, "flow", followed=True, waits=2 * (no == 2)) for name, _, no in steps]
        queue.write(c, d, [JobRequest(row, after=before * (no == 2), on_dead="wait") for no, row in enumerate(rows)])
        for name, _, _ in steps[:2]:
            _change(c, d, name, **_RUNNING)
    _change(c, d, "flow3.a", **_DEAD)  # it turns around
    for flow in FLOWS[:3]:  # somebody asked for a look just now
        _set_flow(c, d, flow, attention=True)
    _build_stuck(c, d, "flow4")


def _build_stuck(c, d, flow):
    _change(c, d, f"{flow}.a", **_DONE)
    _change(c, d, f"{flow}.b", **_DEAD)
    _change(c, d, f"{flow}.c", state="cancelled", version=2, waits=0, finished_at=AGO)
    d.run(c, "DELETE FROM {dependency} WHERE job_id = :id", {"id": d.id(id_of(f"{flow}.c"))})
    jobs.insert(c, d, [new(f"{flow}.a.undo", "flow", followed=True)])
    _change(c, d, f"{flow}.a.undo", **_DEAD)
    workflows.undo_begins(c, d, id_of(flow), "a", id_of(f"{flow}.a.undo"))
    _set_flow(c, d, flow, state="stuck")


def _set_flow(c, d, flow, **values):
    sets = ", ".join(f"{column} = :{column}" for column in values)
    d.run(c, f"UPDATE {{workflow}} SET {sets} WHERE id = :id", {**values, "id": d.id(id_of(flow))})


def _build_gates(c, d):
    times = {"ago_at": AGO, "ahead_at": NOW + timedelta(minutes=5), "old_at": LONG_AGO}
    for key, sets in (
        ("h/1", "paused_at = :ago_at, paused_reason = 'x'"),
        ("c/1", "breaker = 'open', generation = 1, opened_at = :ago_at, open_until = :ago_at, streak = 5"),
        ("c/2", "blocked_until = :ahead_at, blocked_since = :ago_at, blocked_code = 'x'"),
        ("idle/1", "updated_at = :old_at"),
        ("idle", "updated_at = :old_at"),
    ):
        params = {name: value for name, value in times.items() if f":{name}" in sets}
        d.run(c, f"UPDATE {{resource}} SET {sets} WHERE key = :key", {"key": key, **params})
    for key, on in PARKED.items():
        d.run(c, "DELETE FROM {turn} WHERE resource_key = :key", {"key": key})
        d.run(
            c,
            "INSERT INTO {turn} (resource_key, parked_on, recheck_at) VALUES (:key, :on, :recheck_at)",
            {"key": key, "on": on, "recheck_at": AGO if key == "c/1" else NOW + timedelta(minutes=1)},
        )
    limits.insert(c, d, [("p/1", "m"), ("p/2", "m")])


def _build_rest(c, d):
    for name, keys in (("grant1", ("p/1", "p/2")), ("grant2", ("q/1",))):
        grants.insert_if_new(c, d, grants.new(id_of(name), keys[0], "oauth2", NOW), None)
        for key in keys:
            connections.bind(c, d, key, id_of(name), {}, "ok")
    state = GrantState.REFRESHING.value  # by one that died
    grants.write(c, d, id_of("grant2"), NOW, state=state, fence=1, lease_until=AGO, sent_at=AGO)
    schedules.declare(c, d, {"hourly": ("k", HOURLY), "other": ("k", HOURLY)}, ["k"])
    d.run(c, "UPDATE {schedule} SET next_at = :ago_at, last_job = :id, active_since = :ago_at WHERE name = 'hourly'",
          {"ago_at": AGO, "id": d.id(id_of("done1"))})  # fmt: skip
    cursors.write_if_unmoved(c, d, ("p/1", "issues", ""), Cursor(), None, NOW)
