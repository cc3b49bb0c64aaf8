"""The life of a job: its states and every permitted step between them.

Owns the table below and nothing else. A missing entry is the error: the store refuses a step that is not here, the
README's diagram is generated from it, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """Where a job stands."""

    BLOCKED = "blocked"  # waits for other jobs, or for its turn in an ordering key
    SCHEDULED = "scheduled"  # run_at lies ahead; retries wait here too
    READY = "ready"  # may be claimed as soon as its resource lets it through
    RUNNING = "running"  # claimed, under a lease
    SUCCEEDED = "succeeded"
    DEAD = "dead"  # out of attempts, permanently failed or expired: inspected, replayed or discarded
    CANCELLED = "cancelled"


TERMINAL: Final = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED})
WAITING: Final = frozenset({JobState.BLOCKED, JobState.SCHEDULED, JobState.READY})

TRANSITIONS: Final[dict[JobState, dict[JobState, str]]] = {
    JobState.BLOCKED: {
        JobState.SCHEDULED: "unblocked, run_at ahead",
        JobState.READY: "unblocked",
        JobState.CANCELLED: "cancelled",
        JobState.DEAD: "expired, or a blocker failed",
    },
    JobState.SCHEDULED: {
        JobState.READY: "due",
        JobState.SCHEDULED: "edited",
        JobState.CANCELLED: "cancelled",
        JobState.DEAD: "expired",
    },
    JobState.READY: {
        JobState.RUNNING: "claimed",
        JobState.SCHEDULED: "edited",
        JobState.CANCELLED: "cancelled",
        JobState.DEAD: "expired or undecodable",
    },
    JobState.RUNNING: {
        JobState.SUCCEEDED: "finished",
        JobState.SCHEDULED: "retry or snooze",
        JobState.READY: "deferred, handed back or rescued",
        JobState.DEAD: "permanent, out of attempts, ambiguous or lost_worker",
        JobState.CANCELLED: "cancelled",
    },
    JobState.SUCCEEDED: {
        JobState.READY: "replayed",
        JobState.SCHEDULED: "replayed at a bounded rate",
        JobState.BLOCKED: "replayed, not its turn",
    },
    JobState.DEAD: {
        JobState.READY: "retried or replayed",
        JobState.SCHEDULED: "replayed at a bounded rate",
        JobState.BLOCKED: "retried, not its turn",
        JobState.CANCELLED: "discarded",
    },
    JobState.CANCELLED: {
        JobState.READY: "retried",
        JobState.SCHEDULED: "retried at a bounded rate",
        JobState.BLOCKED: "retried, not its turn",
    },
}


def permitted(old: JobState, new: JobState) -> bool:
    """Whether a job may step from ``old`` to ``new``."""
    return new in TRANSITIONS[old]


def mermaid() -> str:
    """The state diagram of the README, one line a step."""
    lines = ["stateDiagram-v2", "    [*] --> scheduled: enqueue later", "    [*] --> ready: enqueue"]
    lines.append("    [*] --> blocked: enqueue behind others")
    lines += [f"    {old} --> {new}: {why}" for old, steps in TRANSITIONS.items() for new, why in steps.items()]
    return "\n".join(lines)
