"""Whether an execution may start, right before it does, and its payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from resilient.core.errors import BadPayload
from resilient.core.failure import Failure, FailureKind
from resilient.core.outcomes import Deferred, Expired, Failed, HandedBack, Outcome, Snoozed
from resilient.engine.endings import raised, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.errors import ResourceStopped
    from resilient.engine.execution import Execution

NEWER_VERSION_DELAY: Final = 30.0  # seconds, and up to as many again


def refusal(execution: Execution, before: Callable[[Execution], ResourceStopped | None]) -> Outcome | None:
    """Why it does not run; None if it does, and its payload is decoded then. ``before`` asks the gate."""
    if execution.lost:
        return HandedBack("its lease was lost before it started")
    row = execution.row  # housekeeping ends expired jobs now and then; what a mark stands for is found out first
    if row.expires_at is not None and not row.sent and row.expires_at <= execution.worker.now():
        return Expired()
    if (stopped := before(execution)) is not None:
        return Deferred(stopped.resource, stopped.gate, stopped.until, str(stopped))
    if execution.sent and execution.handler.reconcile is None:
        return Failed(Failure(FailureKind.AMBIGUOUS), execution.doubt())
    return _undecodable(execution)


async def prepared(execution: Execution) -> Outcome | None:
    """The gate as it is now, if it waited; where its account lives, before its handler asks. Why it does not run."""
    try:
        if execution.waited:
            await execution.worker.gate.check(execution.resource_key, probes=execution.probes)
        await execution.worker.wire.prepare(execution)
    except Exception as error:  # noqa: BLE001 - a stopped account, the database, an address that is none
        return raised(execution, error)
    return None


def _undecodable(execution: Execution) -> Outcome | None:
    """Why its payload cannot be read; None if it was."""
    handler, row = execution.handler, execution.row
    if row.payload_version > handler.version:
        return Snoozed(
            delay=NEWER_VERSION_DELAY * (1 + execution.worker.rng.random()),
            message=f"payload version {row.payload_version} is newer than this worker's {handler.version} of"
            f" {handler.kind!r}; waiting for a newer worker",
        )
    if row.tags and not isinstance(row.tags, dict):
        return Failed(Failure(FailureKind.UNDECODABLE), "its tags are not a JSON object of strings")
    try:
        execution.payload = handler.decode(row.payload, row.payload_version)
    except BadPayload as error:
        return Failed(Failure(FailureKind.UNDECODABLE), str(error))
    except BaseException as error:  # noqa: BLE001 - the user's upgrade function
        return Failed(
            Failure(FailureKind.UNDECODABLE),
            f"upgrade of payload version {row.payload_version}: {text_of(error)}",
        )
    return None
