"""Arguments of a wrong type, explained.

What a program declares is checked by the code that uses it, in its own words. A wrong type that gets past these checks
ends in a `TypeError`, an `AttributeError` or an error of the database from somewhere inside; `explained` then compares
the arguments with the annotations and names the first that does not fit, with what it takes. Nothing is looked at while
all is well, and a value is never shown: it may be a secret.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar, cast

from resilient.core.errors import InvalidInput, ResilientError

if TYPE_CHECKING:
    from collections.abc import Awaitable

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type[Any])

_SINGLE: Final[Mapping[str, type | tuple[type, ...]]] = {
    "str": str,
    "bytes": (bytes, bytearray, memoryview),
    "bool": bool,
    "int": int,
    "float": Real,
    "None": type(None),
    "datetime": datetime,
    "date": date,
    "timedelta": timedelta,
}
_MANY: Final = frozenset({"tuple", "list", "set", "frozenset", "Sequence", "Iterable", "Collection"})
_SETS: Final = frozenset({"set", "frozenset"})
_MAPPINGS: Final = frozenset({"Mapping", "dict"})
_WORDS: Final = {
    "str": "text", "bytes": "bytes", "bool": "True or False", "int": "a whole number", "float": "a number",
    "timedelta": "a timedelta", "datetime": "a datetime with a zone", "date": "a date", "Callable": "a function",
}  # fmt: skip
_CONTAINERS: Final = {"tuple": "a tuple", "set": "a set", "frozenset": "a frozenset"}
_WRITTEN: Final = {"tuple": "(it,), with a comma", "set": "{it}", "frozenset": "frozenset({it})"}
_CLASSES: Final[dict[str, type]] = {}  # those that are declared with `explained`, by their names


class Misfit(NamedTuple):
    """A value that does not fit: where in the argument, what belongs there, and what is there."""

    where: str
    wants: ast.expr
    value: Any


def explained_class(cls: C) -> C:
    """The class, whose construction explains a wrong type by `InvalidInput`."""
    _CLASSES[cls.__name__] = cls
    cls.__init__ = explained(cls.__init__, cls.__name__)
    return cls


def explained_calls(at: str, error: type[ResilientError] = InvalidInput) -> Callable[[C], C]:
    """A class whose public methods explain a wrong type, under the name by which a program reaches them."""

    def explain(cls: C) -> C:
        for name, fn in list(vars(cls).items()):
            if inspect.isfunction(fn) and not name.startswith("_") and not inspect.isasyncgenfunction(fn):
                setattr(cls, name, explained(fn, f"{at}.{name}", error))
        return cls

    return explain


def explained(fn: Callable[P, R], name: str = "", error: type[ResilientError] = InvalidInput) -> Callable[P, R]:
    """The function; where it fails over an argument of a wrong type, it raises ``error``, which says what to pass."""

    def told(failure: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception:
        text = None if isinstance(failure, ResilientError) else explanation(fn, args, kwargs, name)
        return failure if text is None else error(text)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as failure:
            better = told(failure, args, kwargs)
            if better is failure:
                raise
            raise better from failure

    @wraps(fn)
    async def wait(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await cast("Callable[P, Awaitable[Any]]", fn)(*args, **kwargs)
        except Exception as failure:
            better = told(failure, args, kwargs)
            if better is failure:
                raise
            raise better from failure

    return cast("Callable[P, R]", wait) if inspect.iscoroutinefunction(fn) else call


def explanation(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = "") -> str | None:
    """What is wrong with the first argument that does not fit its annotation; None if nobody can tell."""
    signature, names = inspect.signature(fn), vars(sys.modules[fn.__module__])
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python's own words are clear
        return None
    for argument, value in given.items():
        wants = signature.parameters[argument].annotation
        if isinstance(wants, str):
            expression = ast.parse(wants, mode="eval").body
            found = misfit(value, expression, names)
            if found is not None:
                return f"{name or fn.__name__}({argument}=...) {_told(found, names)}"
    return None


def misfit(value: Any, wants: ast.expr, names: Mapping[str, Any], where: str = "") -> Misfit | None:
    """Where the value does not fit the annotation; None too if nobody can tell."""
    if isinstance(wants, ast.BinOp):
        if _fits(value, wants.left, names) or _fits(value, wants.right, names):
            return None
        deeper = [misfit(value, side, names, where) for side in (wants.left, wants.right)]
        return next((one for one in deeper if one is not None and one.value is not value), Misfit(where, wants, value))
    if isinstance(wants, ast.Subscript):
        return _within(value, wants, names, where)
    name, known = ast.unparse(wants), _class_of(wants, names)
    if name == "Callable":
        return None if callable(value) else Misfit(where, wants, value)
    if name in _MANY | _MAPPINGS:
        return None if _is_many(value, name) else Misfit(where, wants, value)
    return None if known is None or isinstance(value, known) else Misfit(where, wants, value)


def _fits(value: Any, wants: ast.expr, names: Mapping[str, Any]) -> bool:
    return misfit(value, wants, names) is None


def _within(value: Any, wants: ast.Subscript, names: Mapping[str, Any], where: str) -> Misfit | None:
    outer, inner = ast.unparse(wants.value), _inner(wants)
    if outer in _MANY | _MAPPINGS:
        if not _is_many(value, outer):
            return Misfit(where, wants, value)
        return next(
            (
                bad
                for place, one, part in _items(value, outer, inner, where)
                if (bad := misfit(one, part, names, place))
            ),
            None,
        )
    if outer == "Literal":
        fits = value in [ast.literal_eval(one) for one in inner]
    elif outer == "Callable":
        fits = callable(value)
    else:
        known = type if outer == "type" else _class_of(wants.value, names)
        fits = known is None or isinstance(value, known)
    return None if fits else Misfit(where, wants, value)


def _items(value: Any, outer: str, inner: list[ast.expr], where: str) -> list[tuple[str, Any, ast.expr]]:
    """The place, the value and the annotation of each item; what can be read only once is left alone."""
    if outer in _MAPPINGS:
        return [(f"{where}[{key!r}]", one, inner[1]) for key, one in value.items() if isinstance(key, str)]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return []
    is_fixed = outer == "tuple" and not _is_endless(inner) and len(inner) == len(value)
    parts = inner if is_fixed else [inner[0]] * len(value)
    return [(f"{where}[{n}]", one, part) for n, (one, part) in enumerate(zip(value, parts, strict=True))]


def _inner(wants: ast.Subscript) -> list[ast.expr]:
    return wants.slice.elts if isinstance(wants.slice, ast.Tuple) else [wants.slice]


def _is_endless(inner: list[ast.expr]) -> bool:
    return isinstance(inner[-1], ast.Constant) and inner[-1].value is ...


def _is_many(value: Any, name: str) -> bool:
    if name in _MAPPINGS:
        return isinstance(value, Mapping)
    if name in _SETS:
        return isinstance(value, (set, frozenset))
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, type, Mapping))


def _class_of(wants: ast.expr, names: Mapping[str, Any]) -> type | tuple[type, ...] | None:
    """The class an annotation names; None where it is an alias, a protocol or not known here."""
    name = ast.unparse(wants)
    if name in _SINGLE:
        return _SINGLE[name]
    found = _CLASSES.get(name) or names.get(name) or vars(builtins).get(name)
    is_class = isinstance(found, type) and found is not Any and not getattr(found, "_is_protocol", False)
    return found if is_class else None


def _told(bad: Misfit, names: Mapping[str, Any]) -> str:
    """In words: what it takes, what it got, and how to mend it."""
    value, at = bad.value, f"takes at {bad.where}" if bad.where else "takes"
    what = f"the class {value.__name__}" if isinstance(value, type) else _kind(value)
    text = f"{at} {_in_words(bad.wants)}, not {what}"
    if isinstance(value, type) and _fits_class(value, bad.wants, names):
        return f"{text}: write {value.__name__}(...)"
    for one in _alternatives(bad.wants):
        outer = ast.unparse(one.value) if isinstance(one, ast.Subscript) else ""
        if (
            value is not None
            and isinstance(one, ast.Subscript)
            and outer in _MANY
            and _fits(value, _inner(one)[0], names)
        ):
            return f"{text}: write " + _WRITTEN.get(outer, "[it]")
    return text


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if inspect.isroutine(value):
        return "a function"
    name = type(value).__name__
    return {"str": "text", "NoneType": "None"}.get(name, f"{'an' if name[0] in 'aeioAEIOU' else 'a'} {name}")


def _fits_class(value: type, wants: ast.expr, names: Mapping[str, Any]) -> bool:
    classes = [_class_of(one, names) for one in _alternatives(wants)]
    return any(isinstance(one, type) and issubclass(value, one) for one in classes)


def _alternatives(wants: ast.expr) -> list[ast.expr]:
    return [*_alternatives(wants.left), *_alternatives(wants.right)] if isinstance(wants, ast.BinOp) else [wants]


def _in_words(wants: ast.expr) -> str:
    """``tuple[str, ...] | None``: a tuple of text, or None."""
    said = [_one_in_words(one) for one in _alternatives(wants)]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} or {said[-1]}"


def _one_in_words(wants: ast.expr) -> str:
    if not isinstance(wants, ast.Subscript):
        name = ast.unparse(wants)
        return _WORDS.get(name, name)
    outer, inner = ast.unparse(wants.value), _inner(wants)
    if outer in _MAPPINGS:
        return f"a dict of {_in_words(inner[0])} to {_in_words(inner[1])}"
    if outer == "Literal":
        return " or ".join(ast.unparse(one) for one in inner)
    if outer == "Callable":
        return "a function"
    if outer in _MANY:
        items = inner if outer == "tuple" and not _is_endless(inner) else inner[:1]
        of = ", ".join(_in_words(one) for one in items)
        return _CONTAINERS.get(outer, "a list") + (f" of {of}" if of != "Any" else "")
    return outer
