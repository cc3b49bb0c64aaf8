"""Places in a JSON body, as facts name them.

They are written ``error.code``, ``errors[0].code``, ``errors[].extensions.code`` (every one), ``data.*.userErrors``
(under any name) and ``error['.tag']``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from resilient.core.bounds import LISTED
from resilient.core.errors import InvalidInput

_STEP: Final = re.compile(r"\[(?:(\d+)|'([^']*)')?\]|([^.\[\]]+)")


@lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[str | int | None, ...]:
    """``errors[].code`` as ``("errors", None, "code")``. Raises `InvalidInput`."""
    steps: list[str | int | None] = []
    at = 0
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            raise InvalidInput(f"{path!r} is no path into a body: write error.code, errors[0].code, errors[].code")
        index, quoted, name = found.groups()
        steps.append(name or quoted or (int(index) if index is not None else None))
        at = found.end() + (path[found.end() : found.end() + 1] == ".")
    return tuple(steps)


def pick(body: Any, path: str) -> list[Any]:
    """Every value at ``path`` in a JSON body; none where the body has another shape."""
    found = [body]
    for step in _steps(path):
        if step is None:
            found = [item for value in found if isinstance(value, list) for item in value[: LISTED.value]]
        elif isinstance(step, int):
            found = [value[step] for value in found if isinstance(value, list) and step < len(value)]
        elif step == "*":
            found = [item for value in found if isinstance(value, dict) for item in _some(value)]
        else:
            found = [value[step] for value in found if isinstance(value, dict) and step in value]
    return found


def _some(value: dict[str, Any]) -> list[Any]:
    return list(islice(value.values(), LISTED.value))


def hidden(body: Any, path: str) -> Any:
    """A copy of a JSON body in which what stands at ``path`` is empty text."""
    return _emptied(body, _steps(path))


def _emptied(value: Any, steps: tuple[str | int | None, ...]) -> Any:
    if not steps:
        return ""
    step, rest = steps[0], steps[1:]
    if isinstance(value, list) and not isinstance(step, str):  # one of a list hides the same in all of it
        return [_emptied(item, rest) for item in value]
    if isinstance(value, dict) and step in value:
        return {name: _emptied(item, rest) if name == step else item for name, item in value.items()}
    return value
