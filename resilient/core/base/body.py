"""Places in a JSON body, as facts name them.

They are written ``error.code``, ``errors[0].code``, ``errors[].extensions.code`` (every one), ``data.*.userErrors``
(under any name) and ``error['.tag']``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from resilient.core.base.bounds import LISTED
from resilient.core.base.errors import InvalidInput

BOM: Final = b"\xef\xbb\xbf"  # in front of JSON it may be ignored (RFC 8259, 8.1)
_STEP: Final = re.compile(r"\[(?:(\d+)|'([^']*)')?\]|([^.\[\]]+)")


@lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[str | int | None, ...]:
    """``errors[].code`` as ``("errors", None, "code")``. Raises `InvalidInput`."""
    steps: list[str | int | None] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise InvalidInput(f"{path!r} is no path into a body: write error.code, errors[0].code, errors[].code")
        index, quoted, name = match.groups()
        steps.append(name or quoted or (int(index) if index is not None else None))
        at = match.end() + (path[match.end() : match.end() + 1] == ".")
    return tuple(steps)


def pick(body: Any, path: str) -> list[Any]:
    """Every value at ``path`` in a JSON body; none where the body has another shape."""
    values = [body]
    for step in _steps(path):
        if step is None:
            values = [item for value in values if isinstance(value, list) for item in value[: LISTED.value]]
        elif isinstance(step, int):
            values = [value[step] for value in values if isinstance(value, list) and step < len(value)]
        elif step == "*":
            values = [item for value in values if isinstance(value, dict) for item in _first_values(value)]
        else:
            values = [value[step] for value in values if isinstance(value, dict) and step in value]
    return values


def _first_values(value: dict[str, Any]) -> list[Any]:
    return list(islice(value.values(), LISTED.value))


def hidden(body: Any, path: str) -> Any:
    """A copy of a JSON body with empty text at ``path``; an index hides all of its list."""
    return _emptied(body, _steps(path))


def hidden_in_item(item: Any, path: str, events: str) -> Any:
    """An item of the list at ``events`` as `hidden` leaves it within its body."""
    steps, above = _steps(path), _steps(events)
    inside = len(steps) > len(above) and all(step in ("*", name) for step, name in zip(steps, above, strict=False))
    return _emptied(item, steps[len(above) + 1 :]) if inside and not isinstance(steps[len(above)], str) else item


def _emptied(value: Any, steps: tuple[str | int | None, ...]) -> Any:
    if not steps:
        return ""
    step, rest = steps[0], steps[1:]
    if isinstance(value, list) and not isinstance(step, str):  # at an index, too: hide it in every item
        return [_emptied(item, rest) for item in value]
    if isinstance(value, dict):
        return {name: _emptied(item, rest) if step in ("*", name) else item for name, item in value.items()}
    return value
