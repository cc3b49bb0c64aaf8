"""Words that facts are written in: a word nobody knows is a mistake, and says so where it is written.

A type checker refuses most of them already (`Literal`, enumerations); this is for programs that nobody checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, get_args

from resilient.core.body import pick
from resilient.core.errors import InvalidInput

_BRACES: Final = re.compile(r"\{([^{}]*)\}")


def check_word(where: str, name: str, value: object, known: Any) -> None:
    """Refuse a word that is not among ``known``: a `Literal`, an enumeration, or the words themselves.

    ``where`` is the declaration (``OAuth2``), ``name`` its argument. Raises `InvalidInput`, which names what is known.
    """
    if isinstance(known, type) and issubclass(known, Enum):
        if not isinstance(value, known):
            told = ", ".join(f"{known.__name__}.{one.name}" for one in known)
            raise InvalidInput(f"{where}({name}={value!r}): {name} is one of {told}")
        return
    words = get_args(known) or tuple(known)
    if not any(value == word and type(value) is type(word) for word in words):
        told = ", ".join(repr(word) for word in words)
        raise InvalidInput(f"{where}({name}={value!r}): {name} is one of {told}")


def check_braces(where: str, name: str, text: str, known: Iterable[str]) -> None:
    """Refuse ``{placeholders}`` in a text that are not among ``known``. Raises `InvalidInput`."""
    words = sorted(known)
    for unknown in (found for found in _BRACES.findall(text) if found not in words):
        told = ", ".join(f"{{{word}}}" for word in words)
        raise InvalidInput(f"{where}({name}={text!r}): nothing fills {{{unknown}}}; in braces use {told}")


def check_pattern(where: str, name: str, text: str, *, groups: tuple[int, ...] = ()) -> None:
    """Refuse what is no regular expression, or has another number of groups. Raises `InvalidInput`."""
    try:
        found = re.compile(text).groups
    except re.error as error:
        raise InvalidInput(f"{where}({name}={text!r}) is no regular expression: {error}") from None
    if groups and found not in groups:
        wanted = " or ".join(str(one) for one in groups)
        raise InvalidInput(f"{where}({name}={text!r}) has {found} groups, not {wanted}: the group is what is read")


def check_number(where: str, name: str, value: float | None, *, least: float = 0.0, above: bool = True) -> None:
    """Refuse a number that is not above ``least`` (or, unless ``above``, at least it); None says nothing.

    Raises `InvalidInput`.
    """
    if value is None:
        return
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not (least < value < float("inf") or (not above and value == least)):
        raise InvalidInput(f"{where}({name}={value!r}): {name} is a number {'above' if above else 'from'} {least:g}")


def check_texts(where: str, owner: Any, *names: str) -> None:
    """Refuse a text where several are listed: ``scopes="repo"`` would ask for ``r e p o``. Raises `InvalidInput`."""
    for name in names:
        value = getattr(owner, name)
        listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        if not listed or not all(isinstance(one, str) for one in value):
            raise InvalidInput(f"{where}({name}={value!r}): {name} lists texts: write ({value!r},)")


def check_paths(where: str, owner: Any, *names: str) -> None:
    """Refuse what is no path into a body. Raises `InvalidInput`."""
    for name in names:
        value = getattr(owner, name)
        for path in (value,) if isinstance(value, str) else value:
            try:
                pick(None, path)
            except InvalidInput as error:
                raise InvalidInput(f"{where}({name}=...): {error}") from None


def in_small_letters(owner: Any, *names: str) -> None:
    """Names of headers as they are looked for: in small letters."""
    for name in names:
        object.__setattr__(owner, name, getattr(owner, name).lower())
