"""Sealed payloads: encrypted by the keys that credentials are stored under, and opened for the handler alone.

A sealed payload is bound to its kind: whoever can only write the database cannot give one kind's payload to another. It
is not bound to its job, because an edit, an undo and a schedule write it before, or without, a job's id.

Text that may quote the payload of a sealed kind is not kept: of an error or a reason of its handler, only the kind, the
code and the place are. What a handler returns, logs, tags and saves as progress is its program's responsibility.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import BadPayload, Failure, FailureKind, SecretsUnreadable
from resilient.core.base.frames import from_callee
from resilient.core.jobs.outcomes import CancelledByHandler, Failed, Snoozed
from resilient.core.jobs.records import SEALED, SEALED_KEY
from resilient.store.accounts.secrets import VARIABLE, key_id_of
from resilient.wire.requests.redact import trace_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.core.jobs.outcomes import Outcome
    from resilient.store.accounts.secrets import KeyRing

_PLACE: Final = ("resilient_job", "payload")
_FRAMES: Final = 20
UNSAID: Final = "its text is not kept, because its payload is sealed"


class KeyNotHereError(BadPayload):
    """A payload is sealed with a key that this process does not have."""


def seal(ring: KeyRing, kind: str, text: str) -> str:
    """Seal a payload's JSON text. Raises `SetupError` if the ring has no key."""
    return json.dumps({SEALED: ring.seal(text, _PLACE[0], kind, _PLACE[1])}, separators=(",", ":"))


def unseal(ring: KeyRing, kind: str, text: str) -> str:
    """The JSON text of a sealed payload. Raises `KeyNotHereError`, or `BadPayload` if it was changed."""
    try:
        sealed = str(json.loads(text)[SEALED])
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: nested too deeply
        sealed = ""
    if sealed and (key_id := key_id_of(sealed)) not in ring.key_ids:
        raise KeyNotHereError(
            f"its payload is sealed with key {key_id[:12]}, which this worker does not have: add it to {VARIABLE}"
            " (new keys: last everywhere, then first, then rotate)"
        )
    try:
        return ring.open(sealed, _PLACE[0], kind, _PLACE[1])
    except SecretsUnreadable:
        raise BadPayload(f"the sealed payload of {kind!r} was changed, or is another kind's") from None


def reseal(ring: KeyRing, kind: str, text: str) -> str:
    """The same payload, sealed with the first key of the ring. Raises what `unseal` raises."""
    return seal(ring, kind, unseal(ring, kind, text))


def unreadable(error: BadPayload, delay: float) -> Outcome:
    """The outcome of a job whose payload cannot be read: it waits for a worker with the key, or is dead."""
    if isinstance(error, KeyNotHereError):
        return Snoozed(delay, None, str(error), FailureKind.UNDECODABLE, SEALED_KEY)
    return Failed(Failure(FailureKind.UNDECODABLE), str(error))


def discreet(outcome: Outcome, *, is_sealed: bool = True) -> Outcome:
    """The outcome of an execution; if its kind is sealed, without text that may quote the payload."""
    if not is_sealed:
        return outcome
    if isinstance(outcome, Failed):
        return replace(outcome, message=f"{outcome.failure} ({UNSAID})")
    if isinstance(outcome, CancelledByHandler) and not outcome.interrupted:
        return replace(outcome, reason=f"cancelled by its handler ({UNSAID})")
    return outcome


def trace(error: BaseException, is_sealed: bool, secrets: Iterable[str] = ()) -> str:  # noqa: FBT001 - of its kind
    """The traceback of an exception; for a sealed kind only files, lines and functions, without any value."""
    if not is_sealed:
        return trace_of(error, secrets)
    frames = traceback.extract_tb(from_callee(error.__traceback__))[-_FRAMES:]
    return "".join(f'  File "{one.filename}", line {one.lineno}, in {one.name}\n' for one in frames)


def broken_rules(errors: list[Any]) -> str:
    """The names of pydantic's rules that a payload breaks, without fields and texts, which may quote it."""
    kinds = sorted({str(one["type"]) for one in errors})
    return f"{', '.join(kinds)} ({UNSAID})"
