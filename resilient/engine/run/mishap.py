"""What it means for a job that something failed which is not its own: the engine's database, or the engine itself.

Nothing here raises, whatever an exception of the program's own does when it is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import DatabaseBusy, Failure, FailureKind, ResourceStopped, chain
from resilient.core.jobs.outcomes import Failed
from resilient.engine.ground.sealing import trace
from resilient.store.db import trouble
from resilient.wire.requests.redact import text_of

if TYPE_CHECKING:
    from resilient.core.jobs.outcomes import Outcome
    from resilient.engine.run.execution import Execution

_UNREADABLE: Final = "Unreadable"  # the code of an error without a name


def is_databases(error: BaseException) -> bool:
    """Whether an exception says that the engine's own database was away, busy or full."""
    return trouble.is_of_database(error) or (isinstance(error, ResourceStopped) and error.gate == "database")


def explain_trouble(error: BaseException, execution: Execution | None = None) -> Failed:
    """The engine's own database was away, busy or full: nothing is charged, unless a repeat might do something twice.

    What was answered without a provider's key would be sent again with the handler: it took effect, and nothing that
    was to be written beside it has been.
    """
    code = "busy" if isinstance(error, DatabaseBusy) else "unreachable"
    effect = None if execution is None else execution.effect
    if effect is None:
        return Failed(Failure(FailureKind.DATABASE, code=code, counts_for_breaker=False), text_of(error))
    failure = Failure(FailureKind.AMBIGUOUS, code=f"database_{code}", counts_for_breaker=False)
    return Failed(failure, f"{effect} was answered, and then the engine's database failed the job: {text_of(error)}")


def explain_bug(execution: Execution, error: BaseException) -> Outcome:
    """What it means that the engine itself failed over an execution, over an exception that cannot be read, say."""
    try:
        if any(is_databases(one) for one in chain(error)):
            return explain_trouble(error, execution)
        code, text = type(error).__name__, text_of(error)
        lines = trace(error, execution.handler.sealed)
    except BaseException:  # noqa: BLE001 - an exception of the program's own that raises itself
        code, text, lines = _UNREADABLE, "an exception that raises when it is looked at", ""
    return Failed(Failure(FailureKind.BUG, code=code), execution.doubt_effect() + text, lines)
