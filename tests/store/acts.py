"""Every transaction function of the engine, registered with something to do in a `world`.

`pairs` (`test_pairs.py`) runs each beside each. One that is new joins by an `@act` that names it as the engine does;
`registry.NOT_PAIRED` holds those that cannot spoil anything, each with its reason. A test fails for one in neither.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from resilient import BreakerPolicy, ConnectionNotFound, Credentials, Failure, FailureKind, JobFilter, JobState, Limit
from resilient.core.accounts.tokens import GrantEvent
from resilient.core.alerts import rules as alert_words
from resilient.core.gates.breaker import Report
from resilient.core.gates.learnt import Answers, Refusal
from resilient.core.gates.policy import Policies
from resilient.core.jobs.outcomes import Transition
from resilient.engine.accounts import connections as engine_connections
from resilient.engine.accounts import fuse as engine_fuse
from resilient.engine.accounts import seals
from resilient.engine.gates import api as resources_api
from resilient.engine.ground import sealing
from resilient.engine.ground.encoder import JobRequest
from resilient.engine.jobs import queue
from resilient.engine.jobs import workflows as attending
from resilient.engine.run import completer, heartbeat, sweeper
from resilient.engine.schedules import schedules as ticking
from resilient.engine.schedules.declaration import job_of
from resilient.store import alerts, events
from resilient.store import sync as cursors
from resilient.store.accounts import connections, fuse, grants, secrets
from resilient.store.accounts.secrets import KeyRing, new_key
from resilient.store.gates import circuits, limits, resources
from resilient.store.gates import controls as gates
from resilient.store.inspect import erasure, retention, workers
from resilient.store.inspect.throughput import Series
from resilient.store.jobs import changes, claim, dependencies, finishing, leases, ready
from resilient.store.schedules import programs
from resilient.store.schedules import ticks as schedules
from tests.store.registry import ACTS, Act, Refused, act, nothing
from tests.store.world import AHEAD, HOURLY, NOW, fresh, id_of, new

RING = KeyRing([new_key()])
POLICIES = Policies(
    concurrency={"p": 20, "flow": 8},
    limits={"p/*": [Limit(50, per=1, burst=50, counts="jobs", name="j")]},
    breakers={"c/*": BreakerPolicy()},
)
LIMIT = Limit(10, per=60, burst=10, name="m")
MINUTE = timedelta(minutes=1)


# -- workers -----------------------------------------------------------------------------------------------------------


def _ask(**over: Any) -> claim.Ask:
    return claim.Ask("w2", 12, ["k"], MINUTE, POLICIES.for_key, lambda: 0.5, take=50, per_key=4, **over)


@act("run.dispatcher: claim.claim", again=lambda c, d: claim.claim(c, d, _ask(careful=True)))
def claims(c, d):
    return claim.claim(c, d, _ask())


@act("run.dispatcher: claim.claim")
def claims_carefully(c, d):
    return claim.claim(c, d, _ask(careful=True))


def _done(*names: str) -> list[Any]:
    return sorted((id_of(name), 2, None) for name in names)


def _finish(name: str, state: str, **over: Any) -> finishing.Finish:
    """As decided, with what is written instead if somebody cancels it or asks for it once more."""
    step = Transition(JobState(state), state, charged=True, attempts=1, error="no", error_kind="bug",
                      resource_key="p/1", **over)  # type: ignore[arg-type]  # fmt: skip
    if state == JobState.DEAD:
        step = step._replace(if_once_more=step._replace(state=JobState.READY, attempts=0, run_at=NOW, fresh_key=True))
    else:
        step = step._replace(if_cancelled=step._replace(state=JobState.CANCELLED, run_at=None))
    return finishing.Finish(id_of(name), 2, step, execution=1, worker_id="w", started_at=NOW)


@act("run.completer: write")
def finishes(c, d):
    done = _done("run1", "lane1.run", "flow1.a", "flow2.a", "flow3.b", "unique2")
    return completer.write(c, d, done, [_finish("run2", "dead")], {"p": 2}, how_long="1s")


@act("run.completer: write")
def finishes_others(c, d):
    """Other steps of the same workflows, another event, one that is tried again."""
    ends = [_finish("run4", "scheduled", run_at=AHEAD), _finish("flow1.b", "dead"), _finish("flow2.b", "dead")]
    return completer.write(c, d, _done("lane4.run", "run3"), ends, {"p": 1}, how_long="1s")


@act("run.completer: write")
def finishes_and_goes_on(c, d):
    """What a job's end enqueues, in lanes too."""
    follow = {id_of("run3"): [_in_lane("lane2", "q/1"), JobRequest(fresh("p/2"))]}
    return completer.write(c, d, _done("run3", "late2"), [_finish("flow2.a", "dead")], {}, follow_ups=follow)


@act("run.completer: write")
def finishes_alone(c, d):
    """In one round trip: what others wait for is left."""
    done = _done("run1", "run3", "lane1.run", "flow1.a", "unique2")
    if d.is_postgresql:
        completer.write(c, d, [*done, *((id_, 2, "7") for id_, _, _ in _done("run2"))], [], {}, alone=True)


@act("run.completer: locked_jobs")
def asks_who_is_held(c, d):
    from resilient.store.jobs.queries import locked_jobs

    return locked_jobs(c, d, [id_of(name) for name in ("run1", "run2", "flow1.a")])


@act("run.heartbeat: beat")
def beats(c, d):
    row = workers.Beat("w", "host", 1, ["k"], 4, 4, "1", stopping=False)
    held = [(id_of(name), 2) for name in ("run1", "run2", "run3", "lane1.run", "flow1.a", "flow1.b")]
    return heartbeat.beat(c, d, row, sorted(held), MINUTE, lambda: 0.0, {Series("k", "p", "succeeded"): 3})


@act("run.heartbeat: sign_off")
def signs_off(c, d):
    heartbeat.sign_off(c, d, "w", {Series("k", "p", "succeeded"): 1, Series("k", "p", "retry"): 1})


@act("run.backend: _mark")
def marks(c, d):
    return leases.mark_sent_if_held(c, d, id_of("run1"), 2, '{"a": {}}', d.now(c))


@act("run.lease: leases.keep_if_held")
def keeps_one(c, d):
    """For an execution that was frozen, and must know now; it waits for whoever has the job's row."""
    return leases.keep_if_held(c, d, id_of("run1"), 2, MINUTE)


@act("run.worker: leases.note_stuck_if_held")
def notes_that_one_is_stuck(c, d):
    return leases.note_stuck_if_held(c, d, id_of("run1"), 2, "it should have ended")


@act("run.backend: _progress")
def says_its_progress(c, d):
    return leases.set_progress_if_held(c, d, id_of("run2"), 2, "7", d.now(c))


@act("run.dispatcher: resources.ensure", "gates.snapshot: resources.ensure")
def makes_rows(c, d):
    resources.ensure(c, d, ["z/1", "z", "p", "p/3"])


# -- time --------------------------------------------------------------------------------------------------------------


@act("run.sweeper: attend", "run.sweeper: ready.read_due")
def stages(c, d):
    ready.read_due(c, d)
    return sweeper.attend(c, d, POLICIES.for_key, 0.5)


@act("run.sweeper: workflows.attend", "run.sweeper: fn", again=lambda c, d: attending.attend(c, d, careful=True))
def attends(c, d):
    return attending.attend(c, d)


@act("run.sweeper: workflows.attend")
def attends_carefully(c, d):
    return attending.attend(c, d, careful=True)


_RULES = sweeper.RescueRules({}, POLICIES, random.Random(1).random, lambda _row: False)


@act("run.sweeper: rescue", "run.sweeper: _overdue")
def rescues(c, d):
    sweeper._overdue(c, d)
    return sweeper.rescue(c, d, _RULES)


@act("run.sweeper: _expire", again=lambda c, d: sweeper._expire(c, d, careful=True))
def expires(c, d):
    return sweeper._expire(c, d)


@act("run.sweeper: _repair", check=nothing)
def repairs_turns(c, d):
    return sweeper._repair(c, d)


@act("run.sweeper: _repair_waiting", check=nothing)
def repairs_jobs(c, d):
    return sweeper._repair_waiting(c, d, dependencies.Walk())


@act("run.sweeper: _repair_lanes", check=nothing)
def repairs_lanes(c, d):
    return sweeper._repair_lanes(c, d)


@act("run.sweeper: _repair_workflows", check=nothing)
def repairs_workflows(c, d):
    return sweeper._repair_workflows(c, d, "")


@act("run.sweeper: _forget")
def forgets_workers(c, d):
    return sweeper._forget(c, d)


@act("schedules.schedules: _serve", "schedules.schedules: store.due")
def ticks(c, d):
    return ticking._serve(c, d, "hourly", 0.5)


@act("schedules.schedules: _declare")
def declares(c, d):
    ticking._declare(c, d, {"hourly": ("k", HOURLY), "third": ("k", HOURLY)}, ["k"])


@act("schedules.schedules: _keep")
def looks_after_declarations(c, d):
    declared = {"hourly": ("k", HOURLY)}
    programs.note(c, d, declared)
    d.run(c, "UPDATE {schedule} SET next_at = :at WHERE name LIKE 'engine:program:%'", {"at": d.now(c) + programs.LOOK})
    ticking._keep(c, d, declared, ["k"])


@act("schedules.schedules: self._remove")
def removes_a_schedule(c, d):
    row, now = schedules.lock(c, d, "hourly"), d.now(c)
    schedules.remove(c, d, [row.name], now)


@act("schedules.schedules: self._set_paused")
def pauses_a_schedule(c, d):
    row = schedules.lock(c, d, "hourly")
    schedules.set_paused(c, d, row, paused=not row.paused)


@act("engine.alerts: self._look")
def notes_successes(c, d):
    schedules.look_since(c, d, "engine:alerts")
    schedules.note_successes(c, d)


@act("run.sweeper: schedules.elect", "inspect.retention: schedules.elect")
def is_elected(c, d):
    return schedules.elect(c, d, "engine:housekeeping", MINUTE)


@act("inspect.exporter: ticks.lead")
def leads(c, d):
    return schedules.lead(c, d, "engine:housekeeping", None, MINUTE)


@act("inspect.retention: w.step", "inspect.retention: walk.step")
def prunes_dead(c, d):
    return retention.prune_finished(c, d, "dead", NOW - timedelta(days=1), limit=100)


@act("inspect.retention: w.step")
def prunes_succeeded(c, d):
    return retention.prune_succeeded(c, d, NOW - timedelta(days=1), events=False, limit=100, most=100)


@act("inspect.retention: w.step")
def forgets_idle(c, d):
    return retention.forget_idle(c, d, NOW - timedelta(days=1), "")


@act("inspect.retention: w.step")
def forgets_notes(c, d):
    retention.prune_attempts(c, d, NOW - timedelta(days=1), 10)
    events.prune_inbox(c, d, NOW - timedelta(days=1), 10)
    return retention.forget_notes(c, d, NOW - timedelta(days=1))


@act("inspect.erasure: store.stop", "inspect.erasure: controls.resume")
def stops(c, d):
    return erasure.stop(c, d, "p/1")


@act("inspect.erasure: store.jobs", "inspect.erasure: visit")
def erases_jobs(c, d):
    for visit in (erasure.jobs, erasure.attempts, erasure.steps):
        visit(c, d, erasure.Name("p/1", ("q/1:token",)), erasure.Place(), dry_run=False)


@act("inspect.erasure: store.others")
def erases_others(c, d):
    for table in erasure.OTHERS:
        erasure.others(c, d, erasure.Name("q/1"), table, dry_run=False)


# -- programs and people -----------------------------------------------------------------------------------------------


def _in_lane(lane: str, key: str) -> JobRequest:
    return JobRequest(fresh(key, ordering_key=lane, ordering_policy="block"))


@act("jobs.queue: write_many")
def enqueues(c, d):
    after = tuple(map(id_of, ("run1", "run3")))
    return queue.write_many(
        c, d,
        [
            JobRequest(fresh("p/1")), JobRequest(fresh("p/2", delay=60.0)),
            _in_lane("lane1", "p/1"), _in_lane("lane2", "q/1"), _in_lane("lane9", "p/1"),
            JobRequest(fresh("p/1", unique_key="x"), on_conflict="replace"),
            JobRequest(fresh("p/1", unique_key="y", priority=4), "replace", "once_more"),
            JobRequest(fresh("p/1", waits=2, followed=True), after=after),
        ],
    )  # fmt: skip


@act("jobs.queue: write_many")
def enqueues_in_another_order(c, d):
    """In a program's transaction, for which a job that is kept waits."""
    return queue.write(
        c, d, [_in_lane("lane2", "q/1"), _in_lane("lane1", "p/1"), _in_lane("lane9", "p/1"),
               JobRequest(fresh("p/1", unique_key="y")), JobRequest(fresh("p/1", unique_key="x"))],
    )  # fmt: skip


@act("jobs.queue: write_many")
def publishes(c, d):
    return queue.write(c, d, [_in_lane("lane4", "outbox/orders")])


def _sweep(change: Any, *names: str) -> Callable[[Any, Any], Any]:
    return lambda c, d: changes.Sweep(change, JobFilter(ids=tuple(map(id_of, names)))).step(c, d)


@act("jobs.api: step")
def cancels(c, d):
    names = ("ready1", "run1", "lane1.next", "lane2.ready", "child1", "flow1.c", "flow3.b", "due1", "unique1")
    return _sweep(changes.Cancel(), *names)(c, d)


@act("jobs.api: step")
def cancels_what_runs(c, d):
    """Jobs that a worker finishes in several statements, one for each kind of end."""
    return _sweep(changes.Cancel(), "run1", "run2", "run3", "run4", "flow2.a", "late2")(c, d)


@act("jobs.api: step", replays=True)
def retries_them(c, d):
    return _sweep(changes.Retry(), "dead1", "dead2", "lane3.dead", "flow3.a", "flow4.a.undo", "done1", "child5")(c, d)


@act("jobs.api: step", replays=True)
def retries_slowly(c, d):
    return _sweep(changes.Retry(spacing=MINUTE), "dead1", "dead2", "lane3.dead", "flow4.a.undo")(c, d)


@act("jobs.api: step")
def edits_them(c, d):
    return _sweep(changes.Edit(priority=7, run_at=NOW), "ready1", "ahead", "lane1.next", "due1", "child1")(c, d)


@act("jobs.api: step")
def puts_off(c, d):
    return _sweep(changes.Edit(run_at=AHEAD), "ready1", "ready3", "lane2.ready", "due1", "unique1")(c, d)


@act("jobs.api: step")
def discards(c, d):
    return _sweep(changes.Discard(), "dead1", "lane3.dead", "flow4.a.undo")(c, d)


@act("jobs.api: step")
def deletes(c, d):
    return _sweep(changes.Delete(), "old1", "done1", "dead2", "lane3.dead", "olddead")(c, d)


@act("jobs.workflows: _cancel")
def turns_a_workflow_around(c, d):
    return attending._cancel(c, d, id_of("flow1"), lambda _: None)


@act("jobs.workflows: self._write_all")
def adds_a_step(c, d):
    """As `job.workflow()` within a step does."""
    from resilient.core.base.errors import WorkflowOver
    from resilient.engine.jobs.workflows import require_going
    from resilient.store.jobs import workflows

    try:
        _, first = require_going(c, d, id_of("flow1"), lock=False)
        step = workflows.NewStep("d", first, id_of("flow1.d"), "k", "flow")
        if workflows.insert_steps(c, d, id_of("flow1"), [step]):
            queue.write(c, d, [JobRequest(new("flow1.d", "flow", followed=True))])
        require_going(c, d, id_of("flow1"), lock=True)
    except WorkflowOver:
        raise Refused from None


# -- gates -------------------------------------------------------------------------------------------------------------


def _report(key: str, **over: Any) -> circuits.Evidence:
    failure = Failure(FailureKind.TRANSIENT, "no") if over.get("failed") else None
    return circuits.Evidence(key, Report(**{"generation": 0, **over}), failure)


@act("gates.reporter: circuits.report_if_current")
def reports_failures(c, d):
    bad = {"failed": 6, "trailing": 6}
    evidence = [_report("p/1", **bad), _report("p", **bad), _report("p/2", ok=2), _report("q/1", **bad)]
    return circuits.report_if_current(c, d, evidence, POLICIES, lambda: 0.5)


@act("gates.reporter: circuits.elect_for_request")
def elects_a_probe(c, d):
    return circuits.elect_for_request(c, d, ["c/1", "c"], "w3", POLICIES)


@act("gates.gate: gates.cool_down")
def cools_down(c, d):
    return gates.cool_down(c, d, "p/1", AHEAD, "429", 0.5)


@act("gates.gate: gates.cool_down")
def learns_of_a_throttle(c, d):
    return gates.cool_down(c, d, "p/2", AHEAD, "429", 0.5, refusal=Refusal(0, 1.0, 5, 0.2, 3))


@act("gates.lessons: gates.take_in")
def counts_answers(c, d):
    gates.cool_down(c, d, "p/2", AHEAD, "429", 0.5, refusal=Refusal(0, 1.0, 5, 0.2, 3))
    return gates.take_in(c, d, [gates.Report("p/2", Answers(0, 40)), gates.Report("p", Answers(0, 3))], POLICIES)


@act("gates.lessons: gates.slow_down", "gates.lessons: fn")
def slows_down(c, d):
    gates.slow_down(c, d, "p/2", Refusal(0, None, 20, 2.0, 4), 2.5)


@act("gates.lessons: gates.forget_burst")
def forgets_a_burst(c, d):
    gates.cool_down(c, d, "p/2", AHEAD, "429", 0.5, refusal=Refusal(0, 1.0, 5, 0.2, 3))
    gates.forget_burst(c, d, ["p", "p/2"], d.now(c) - timedelta(minutes=1))


def _changes_a_gate(fn: Callable[..., Any], key: str, **options: Any) -> Callable[[Any, Any], Any]:
    return partial(
        resources_api._if_selected, selection=resources_api._Selection([key]), key=key, fn=fn, options=options
    )


for _name, _fn, _key, _options in (
    ("pauses", resources_api._pause, "p/1", {"until": None, "reason": "x"}),
    ("pauses a new one", resources_api._pause, "new/1", {"until": None, "reason": "x"}),
    ("resumes", gates.resume, "h/1", {}),
    ("opens", resources_api._open, "p/2", {"until": None, "reason": "x"}),
    ("closes", gates.close, "c/1", {}),
    ("resets", resources_api._reset, "c/2", {"policies": POLICIES}),
    (
        "limits",
        resources_api._set_policy,
        "p",
        {"policies": POLICIES, "change": {"concurrency": 3}, "dropped": (), "forget": True},
    ),
):
    _run = _changes_a_gate(_fn, _key, **_options)
    ACTS[_name] = Act(_name, ("gates.api: _if_selected",), _run, _run, lambda _: None)


DRAWS = [limits.Ask((("p/1", LIMIT), ("p/2", LIMIT)), more=2), limits.Ask((("q/1", LIMIT),))]


@act("gates.drawing: store.draw", again=lambda c, d: limits.draw_free(c, d, DRAWS, []))
def draws(c, d):
    return limits.draw(c, d, DRAWS)


@act("gates.drawing: store.draw_free")
def draws_what_is_free(c, d):
    settled = [limits.Settled("p/1", LIMIT, 1.0), limits.Settled("q/2", LIMIT, -1.0)]
    return limits.draw_free(c, d, DRAWS, settled)


def observations():
    now = NOW.timestamp()
    return [limits.Observation(key, LIMIT, 3.0, now + 60, now) for key in ("q/1", "p/2")]


@act("gates.drawing: store.observe", again=lambda c, d: limits.observe_free(c, d, observations()))
def observes(c, d):
    return limits.observe(c, d, observations())


@act("gates.drawing: store.observe_free")
def observes_what_is_free(c, d):
    return limits.observe_free(c, d, observations())


# -- credentials -------------------------------------------------------------------------------------------------------


class _Quiet:
    def tell(self, c, d, dead):
        """To nobody."""

    def hush(self, c, d, provider, keys):
        """The same."""


def _held(c, d, name: str) -> Any:
    if (grant := grants.read(c, d, id_of(name))) is None:  # its account was erased
        raise Refused
    return grant


_FRESH = grants.NewSecrets("s", "k", AHEAD, AHEAD)


@act("accounts.grants: grants.begin")
def begins_a_refresh(c, d):
    return grants.begin(c, d, id_of("grant1"), 1, 60.0, refused=False)


@act("accounts.grants: grants.begin")
def takes_over_a_refresh(c, d):
    return grants.begin(c, d, id_of("grant2"), 1, 60.0, refused=True)


@act("accounts.grants: grants.renew_if_held")
def renews_a_grant(c, d):
    return grants.renew_if_held(c, d, _held(c, d, "grant2"), _FRESH)


@act("accounts.grants: grants.settle_if_held", "accounts.grants: grants.let_go")
def gives_a_refresh_up(c, d):
    return grants.settle_if_held(c, d, _held(c, d, "grant2"), GrantEvent.REFUSED, "no", AHEAD)


@act("accounts.grants: grants.keep_up")
def keeps_a_refresh_up(c, d):
    return grants.keep_up(c, d, _held(c, d, "grant2"), 60.0)


@act("accounts.grants: grants.park")
def parks_accounts(c, d):
    return grants.park(c, d, id_of("grant2")), grants.park(c, d, id_of("grant1"))


@act("accounts.grants: grants.note_worked")
def notes_that_it_worked(c, d):
    return grants.note_worked(c, d, id_of("grant1"), 1), grants.note_worked(c, d, id_of("grant2"), 1)


@act("accounts.consent: fuse.note_accepted", "accounts.application: fuse.note_accepted")
def is_taken_again(c, d):
    return fuse.note_accepted(c, d, "p")


@act("accounts.grants: grants.let_go")
def lets_a_refresh_go(c, d):
    return grants.let_go(c, d, _held(c, d, "grant2"))


@act("accounts.fuse: store.die_if_held")
def finds_a_grant_dead(c, d):
    return fuse.die_if_held(c, d, _held(c, d, "grant2"), "no", _Quiet())


@act("accounts.fuse: store.die_if_version")
def finds_another_dead(c, d):
    return fuse.die_if_version(c, d, _held(c, d, "grant1"), "no", _Quiet())


@act(
    "accounts.connections: fuse.release",
    "accounts.connections: fuse.confirm",
    "accounts.fuse: store.release",
    "accounts.fuse: store.confirm",
)
def decides_about_suspects(c, d):
    return fuse.confirm(c, d, "p", _Quiet()), fuse.release(c, d, "q")


@act("accounts.connections: grants.authorise")
def authorises(c, d):
    return grants.authorise(c, d, id_of("grant2"), _FRESH, kind="oauth2", flow=None)


@act("accounts.connections: connections.give_up")
def gives_an_account_up(c, d):
    return connections.give_up(c, d, "p/1")


# -- streams, consumers ------------------------------------------------------------------------------------------------

PLACE, WHERE = ("p/1", "issues", ""), ("issues", "p/*", "")


@act("run.stream_reader: fn")
def checkpoints(c, d):
    cursor, now = cursors.read(c, d, PLACE)
    if not leases.checkpoint_if_held(c, d, id_of("run1"), 2, "1", now):
        raise Refused
    if not cursors.write_if_unmoved(c, d, PLACE, cursor, id_of("run1"), now):
        raise Refused


@act("engine.sync: cursors.reset")
def resets_a_stream(c, d):
    return cursors.reset(c, d, cursors.Where(*WHERE), "asked for")


@act("engine.sync: cursors.forget")
def forgets_a_stream(c, d):
    return cursors.forget(c, d, cursors.Where(*WHERE))


@act("events.inbox: _arrived", "events.inbox: _first", "events.webhooks: _store")
def takes_a_message(c, d):
    first = events.first_seen(c, d, "me", "m1", NOW)
    return first, events.arrived(c, d, "me", "m2", "k", 1, NOW, gapless=True)


@act("engine.alerts: self._write")
def raises_alerts(c, d):
    """What was found is written, told, and closed when it is over."""
    now = d.now(c)
    found = [alert_words.swept("k", "expired", 3, "17"), alert_words.repaired(1), alert_words.stuck("flow", "1")]
    alerts.record(c, d, found, now, lasting=False)
    told = alerts.to_tell(c, d, now, now - MINUTE)
    return told, alerts.resolve(c, d, ["dead"], now, now)


@act("schedules.schedules: self._run")
def runs_a_schedule_now(c, d):
    row, now = schedules.lock(c, d, "hourly"), d.now(c)
    (done,) = queue.write(c, d, [job_of(row, None, 0.0)])
    schedules.move_on(c, d, "hourly", now, next_at=row.next_at, last_at=row.last_at, job=done.id)


@act("events.outbox: self._replay")
def replays_an_event(c, d):
    row = fresh("outbox/orders", ordering_key="lane4", ordering_policy="block", order_no=1)
    queue.write_back(c, d, [row])


@act("accounts.connections: _put", "accounts.connections: _hand_over", "accounts.access: adopt")
def connects(c, d):
    if connections.find(c, d, "p/3") is None:
        grants.insert_if_new(c, d, grants.new(id_of("grant3"), "p/3", "bearer", NOW), "k")
        connections.bind_if_new(c, d, "p/3", id_of("grant3"), {})


@act("accounts.grants: connections.note_left")
def notes_that_an_account_is_left_to_others(c, d):
    connections.note_left(c, d, "p/1", "no key")


@act("accounts.grants: connections.shut_unconnected", "accounts.grants: connections.shut_unreadable")
def shuts_accounts_out(c, d):
    connections.shut_unreadable(c, d, "p/1", id_of("grant1"), 1, tell=True)
    return connections.shut_unconnected(c, d, "p/3", tell=True)


@act("accounts.connections: gates.open_auth", "accounts.grants: gates.open_auth")
def lets_an_account_in(c, d):
    return gates.open_auth(c, d, "p/3", "not_connected")


_OF_APP: Any = SimpleNamespace(
    fuse=_Quiet(),
    accounts=SimpleNamespace(
        ring=KeyRing([]), decrypt=lambda _: Credentials(), encrypt=lambda *_: _FRESH, wants_seals=lambda _: False
    ),
)


@act("accounts.connections: _put")
def connects_one_of_two_that_share(c, d):
    engine_connections._put(c, d, "p/1", "bearer", Credentials(), None, {}, _OF_APP)


@act("accounts.connections: self._grants.fuse.hush")
def takes_a_notice_back(c, d):
    tells = SimpleNamespace(_kind=SimpleNamespace(kind="k"))
    engine_fuse.Fuse.hush(tells, c, d, "p", ["p/1"])


@act("accounts.connections: _share")
def shares_a_grant(c, d):
    try:
        engine_connections._share(c, d, "p/2", "q/1", {}, _OF_APP)
    except ConnectionNotFound as error:  # it was erased meanwhile
        raise Refused from error


@act("accounts.seals: _reseal_batch")
def reseals(c, d):
    for grant in grants.lock_next(c, d, None, 10, waits=True):
        seals.seal_all(c, d, RING, grant.id, was_required=False)
        grants.reseal(c, d, grant.id, "s", "k9")


@act("accounts.seals: reseal_payload")
def reseals_a_payload(c, d):
    text = sealing.seal(RING, "k", "1")
    ready = d.run(c, "SELECT CAST(payload AS text) FROM {job} WHERE id = :id", {"id": d.id(id_of("ready1"))}).scalar()
    return secrets.write_sealed(c, d, secrets.SealedRow(id_of("ready1"), None, "k", ready), text)


@act(
    "accounts.consent: _expect", "accounts.consent: connections.arrived", "accounts.connections: _end_return"
)  # fmt: skip
def goes_through_a_consent_page(c, d):
    connections.expect(c, d, "state", "p/1", "s", AHEAD)
    connections.arrived(c, d, "state", MINUTE)
    return engine_connections._end_return(c, d, "p/1", "state")


@act("accounts.fuse: _gate_provider", "accounts.fuse: _is_turn")
def shuts_a_provider(c, d):
    engine_fuse._gate_provider(c, d, "p", "app_refused")
    facts = resources.read(c, d, ["p"])["p"]
    return engine_fuse._is_turn(c, d, "p", facts)
