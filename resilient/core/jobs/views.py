"""What people are shown of a payload: nothing of a sealed one, and of others what their kind does not hide.

A sealed payload (``sealed=True``) stands in its row as one JSON object with one name (`SEALED`) and the encrypted text.
``redact=`` is for views alone: the row keeps the value.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from resilient.core.base.errors import InvalidInput
from resilient.core.base.loggers import MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEALED: Final = "resilient:sealed"
SEALED_KEY: Final = "sealed_key"  # code of a job that waits for a worker with its key
START: Final = f'{{"{SEALED}"'  # of the JSON text, as the engine writes it
Redaction: TypeAlias = "Sequence[str] | Callable[[Any], Any]"


def is_sealed(value: Any) -> bool:
    """Whether a decoded payload is a sealed one."""
    return isinstance(value, dict) and value.keys() == {SEALED}


def without_sealed(value: Any) -> Any:
    """The value, with a note of its key in place of each sealed payload."""
    if is_sealed(value):
        return {"sealed": f"with key {str(value[SEALED]).partition(':')[0][:12]}"}
    if isinstance(value, dict):
        return {name: without_sealed(one) for name, one in value.items()}
    return [without_sealed(one) for one in value] if isinstance(value, list) else value


def check_redaction(kind: str, redact: Any) -> None:
    """Raise `InvalidInput` unless it is a list of names and paths, or a function."""
    is_list = isinstance(redact, (list, tuple, set, frozenset)) and all(isinstance(one, str) and one for one in redact)
    if redact is not None and not is_list and not callable(redact):
        raise InvalidInput(
            f"redact of kind {kind!r} takes field names (['token']), paths (['card.number', 'items.*.price']) or a"
            " function of the payload"
        )


def redacted(payload: Any, redact: Redaction | None) -> Any:
    """What is shown of a decoded payload. A name stands for that field anywhere, a path is walked from the top."""
    if redact is None:
        return payload
    if callable(redact):
        try:
            return redact(copy.deepcopy(payload))
        except Exception as error:  # noqa: BLE001 - the program's own function; its text may hold the payload
            return f"{MASK} (redact= failed: {type(error).__name__})"
    shown = copy.deepcopy(payload)
    for path in redact:
        _hide(shown, path.split("."), anywhere="." not in path)
    return shown


def _hide(value: Any, path: list[str], *, anywhere: bool) -> None:
    name, rest = path[0], path[1:]
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(places):
        if name in ("*", str(key)):
            if rest:
                _hide(one, rest, anywhere=False)
            else:
                value[key] = MASK
        elif anywhere:
            _hide(one, path, anywhere=True)
