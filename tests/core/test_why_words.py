"""`why` word for word: what a blocked job waits for, who could run it, and what does not end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest

from resilient.core.gates.admission import Level, ResourceFacts
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.policy import Policy
from resilient.core.inspect.blocked import JobSeen, Waits, of_blocked
from resilient.core.inspect.why import (
    Path,
    Reason,
    WorkerSeen,
    stands_still,
    stuck,
    workers,
)
from resilient.core.jobs.records import Count
from resilient.core.jobs.states import JobState
from tests.core.test_why import JOB

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
OTHER = UUID(int=7)
LINE = "ordering key 'k' of github/a"
BLOCKED = replace(JOB, state=JobState.BLOCKED, ordering_key="k", ordering_policy="block")
DEAD = replace(BLOCKED, state=JobState.DEAD)
WORKER = WorkerSeen("w1", frozenset({"mail.send"}), concurrency=2, running=1, stopping=False, seen_at=NOW)
RETRY, DISCARD = f"`resilient jobs retry {OTHER}`", f"`resilient dead discard {OTHER}`"


def other(state, error=None):
    return JobSeen(OTHER, "crm.push", state, error)


@pytest.mark.parametrize(
    ("job", "waits", "reasons"),
    [
        (BLOCKED, Waits(), []),
        (BLOCKED, Waits(head=JobSeen(BLOCKED.id, "mail.send", JobState.READY)), []),  # its own turn
        (
            BLOCKED,
            Waits(head=other(JobState.RUNNING)),
            [("order", f"It waits for its turn in {LINE}, after job {OTHER} (crm.push, running).")],
        ),
        (
            BLOCKED,
            Waits(head=other(None), ahead=Count(1)),
            [("order", f"It waits for its turn in {LINE}, after job {OTHER} (deleted), with 1 job between.")],
        ),
        (
            BLOCKED,
            Waits(head=other(JobState.DEAD), ahead=Count(0)),
            [
                (
                    "order_dead",
                    (
                        f"It waits for its turn in {LINE}, which job {OTHER} (crm.push) holds up since it is dead:"
                        f" {RETRY} or {DISCARD} lets it go on."
                    ),
                )
            ],
        ),
        (
            BLOCKED,
            Waits(head=other(JobState.DEAD, "HTTP 500"), ahead=Count(3)),
            [
                (
                    "order_dead",
                    (
                        f"It waits for its turn in {LINE}, which job {OTHER} (crm.push) holds up since it is dead,"
                        f" with 3 jobs between: {RETRY} or {DISCARD} lets it go on. Its error: HTTP 500"
                    ),
                )
            ],
        ),
        (
            BLOCKED,
            Waits([other(JobState.READY), other(None)]),
            [
                ("blocker", f"It waits for job {OTHER} (crm.push, ready)."),
                ("blocker", f"It waits for job {OTHER} (deleted)."),
            ],
        ),
        (
            BLOCKED,
            Waits([other(JobState.DEAD)], more=1),
            [
                (
                    "blocker_dead",
                    f"It waits for job {OTHER} (crm.push), which is dead: {RETRY}, or cancel this one.",
                ),
                ("blockers", "It waits for 1 other job beside these."),
            ],
        ),
        (
            BLOCKED,
            Waits([other(JobState.CANCELLED)]),
            [
                (
                    "blocker_cancelled",
                    f"It waits for job {OTHER} (crm.push), which was cancelled: {RETRY}, or cancel this one.",
                )
            ],
        ),
        (DEAD, Waits(behind=Count(0)), []),
        (DEAD, Waits([other(JobState.READY)], more=2), []),
        (replace(DEAD, ordering_policy="skip"), Waits(behind=Count(2)), []),
        (
            DEAD,
            Waits(behind=Count(2)),
            [
                (
                    "holds_order",
                    (
                        "It keeps 2 jobs of ordering key 'k' waiting: retry it, or give it up with"
                        f" `resilient dead discard {DEAD.id}`."
                    ),
                )
            ],
        ),
    ],
)
def test_what_a_blocked_job_waits_for(job, waits, reasons):
    assert list(of_blocked(job, waits)) == reasons


def path(*seen, **stuck_on):
    return Path([Level(ResourceFacts("github/a", BreakerFacts()), Policy(), {}, 0)], {}, workers=seen, stuck=stuck_on)


@pytest.mark.parametrize(
    ("seen", "kind", "reasons"),
    [
        ([WORKER], "mail.send", []),
        ([WORKER], None, []),
        ([], None, [("no_worker", "No worker is running: start one with `resilient worker`.")]),
        (
            [replace(WORKER, stopping=True)],
            "mail.send",
            [("no_worker", "No worker is running: start one with `resilient worker`.")],
        ),
        (
            [WORKER],
            "crm.push",
            [("unknown_kind", "1 worker runs, but none has a handler for kind 'crm.push': deploy one that has.")],
        ),
        (
            [WORKER, WORKER],
            "crm.push",
            [("unknown_kind", "2 workers run, but none has a handler for kind 'crm.push': deploy one that has.")],
        ),
        (
            [replace(WORKER, resources=("gitlab/*",))],
            "mail.send",
            [
                (
                    "unserved_resource",
                    (
                        "No running worker that has its kind serves github/a: start one without `--resource`, or"
                        " with one that fits."
                    ),
                    "github/a",
                )
            ],
        ),
        (
            [replace(WORKER, resources=("gitlab/*",))],
            None,
            [
                (
                    "unserved_resource",
                    "No running worker serves github/a: start one without `--resource`, or with one that fits.",
                    "github/a",
                )
            ],
        ),
        (
            [replace(WORKER, running=2)],
            "mail.send",
            [("busy", "Every slot that could take it is busy (2 on 1 worker).")],
        ),
        (
            [replace(WORKER, running=3), replace(WORKER, concurrency=1_000, running=1_000)],
            "mail.send",
            [("busy", "Every slot that could take it is busy (1,002 on 2 workers).")],
        ),
        ([replace(WORKER, running=2), WORKER], "mail.send", []),
        ([replace(WORKER, running=2), replace(WORKER, kinds=frozenset())], None, []),
    ],
)
def test_who_could_run_it(seen, kind, reasons):
    assert list(workers(path(*seen), kind)) == [Reason(*one) for one in reasons]


def test_a_kind_that_this_program_does_not_have_is_said_where_another_has_it():
    says = Reason("not_declared", "This program itself has no handler for kind 'mail.send'.")
    assert list(workers(path(WORKER), "mail.send", is_declared=False)) == [says]
    assert list(workers(path(WORKER), "mail.send", is_declared=True)) == []
    assert [one.code for one in workers(path(), "mail.send", is_declared=False)] == ["no_worker"]


def test_handlers_that_do_not_end_are_named_with_their_worker():
    seen = replace(WORKER, concurrency=50)
    (one,) = stuck(path(seen, w1=1))
    (two,) = stuck(path(seen, w1=2, gone=9))  # of a worker that nobody hears of, nothing is said
    share = one.text.split(" such handlers")[0].rpartition(" ")[2]
    rest = (
        f"not, on worker w1: with {share} such handlers of one key there, it runs nothing more of it until they end or"
        " it is restarted."
    )
    assert 1 < int(share) < 50
    assert one == Reason("stuck_handlers", f"1 job of github/a should have ended and does {rest}", "github/a")
    assert two == Reason("stuck_handlers", f"2 jobs of github/a should have ended and do {rest}", "github/a")


def test_a_loop_stands_still_from_a_second_on():
    assert not stands_still(None)
    assert not stands_still(0.999)
    assert stands_still(1.0)
