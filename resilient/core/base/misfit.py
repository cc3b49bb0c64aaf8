"""Arguments that do not fit: words and numbers that mean nothing, and wrong types, explained.

What a program declares is checked by the code that uses it, with the functions below. A wrong type that passes these
checks ends in a `TypeError`, an `AttributeError` or an error of the database from somewhere inside; `explained` then
compares the arguments with the annotations and names the first that does not fit, with what it takes. Nothing is
compared unless a call fails, and a value is never shown: it may be a secret.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from enum import Enum
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeGuard, TypeVar, cast, get_args

from resilient.core.base.body import pick
from resilient.core.base.errors import InvalidInput, ResilientError
from resilient.core.base.phrases import nearest

if TYPE_CHECKING:
    from collections.abc import Awaitable


# -- checks -----------------------------------------------------------------------------------------------------------
#
# For the words in declarations of facts: an unknown word is refused where it is written. A type checker refuses most
# of them already (`Literal`, enumerations); these checks are for programs without one.

_BRACES: Final = re.compile(r"\{([^{}]*)\}")


def check_word(where: str, name: str, value: object, vocabulary: Any) -> None:
    """Refuse a word that is not in ``vocabulary``: a `Literal`, an enumeration, or the words themselves.

    ``where`` is the declaration (``OAuth2``), ``name`` its argument. Raises `InvalidInput`, which names the vocabulary.
    """
    if isinstance(vocabulary, type) and issubclass(vocabulary, Enum):
        if not isinstance(value, vocabulary):
            choices = ", ".join(f"{vocabulary.__name__}.{one.name}" for one in vocabulary)
            raise InvalidInput(f"{where}({name}={value!r}): {name} is one of {choices}")
        return
    words = get_args(vocabulary) or tuple(vocabulary)
    if not any(value == word and type(value) is type(word) for word in words):
        choices = ", ".join(repr(word) for word in words)
        raise InvalidInput(f"{where}({name}={value!r}): {name} is one of {choices}")


def check_braces(where: str, name: str, text: str, vocabulary: Iterable[str]) -> None:
    """Refuse ``{placeholders}`` in a text that are not in ``vocabulary``. Raises `InvalidInput`."""
    words = sorted(vocabulary)
    for unknown in (placeholder for placeholder in _BRACES.findall(text) if placeholder not in words):
        choices = ", ".join(f"{{{word}}}" for word in words)
        raise InvalidInput(f"{where}({name}={text!r}): nothing fills {{{unknown}}}; in braces use {choices}")


def check_pattern(where: str, name: str, text: str, *, groups: tuple[int, ...] = ()) -> None:
    """Refuse what is no regular expression, or has another number of groups. Raises `InvalidInput`."""
    try:
        number = re.compile(text).groups
    except re.error as error:
        raise InvalidInput(f"{where}({name}={text!r}) is no regular expression: {error}") from None
    if groups and number not in groups:
        expected = " or ".join(str(one) for one in groups)
        raise InvalidInput(f"{where}({name}={text!r}) has {number} groups, not {expected}: the group is what is read")


def check_storable(what: str, text: str) -> str:
    """Return a text that a database stores, and can be asked for; else raise `InvalidInput`. ``what`` names it."""
    if not STORABLE.fullmatch(text):
        raise InvalidInput(f"{what} has a character that no database stores (NUL, half a pair): {text!r}")
    return text


STORABLE: Final = re.compile("[^\\x00\\ud800-\\udfff]*")
_LARGEST: Final = sys.float_info.max


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float holds: no ``True``, no text, no infinity, no NaN, no ``10**400``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def is_whole(value: object, least: int = 1, most: int = 2**63 - 1) -> TypeGuard[int]:
    """Whether it is a whole number within these bounds: no ``True``, no ``2.0``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_number(where: str, name: str, value: float | None, *, least: float = 0.0, above: bool = True) -> None:
    """Refuse a number that is not above ``least`` (or, unless ``above``, at least it); None says nothing.

    Raises `InvalidInput`.
    """
    if value is None:
        return
    if not is_number(value) or not (least < value or (not above and value == least)):
        raise InvalidInput(f"{where}({name}={value!r}): {name} is a number {'above' if above else 'from'} {least:g}")


def check_whole(where: str, name: str, value: float | None, *, least: int = 1) -> None:
    """Refuse what is no whole number from ``least`` on; None says nothing. Raises `InvalidInput`."""
    if value is not None and not is_whole(value, least):
        raise InvalidInput(f"{where}({name}={value!r}): {name} is a whole number from {least}")


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
    """Lower the case of these fields, which name headers: headers are looked up in small letters."""
    for name in names:
        object.__setattr__(owner, name, getattr(owner, name).lower())


# -- wrong types ------------------------------------------------------------------------------------------------------

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

    def explained_error(failure: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception:
        if isinstance(failure, ResilientError):
            return failure
        if advice := _advice_on_names(fn, args, kwargs):
            return TypeError(f"{failure}{advice}")
        text = explanation(fn, args, kwargs, name)
        return failure if text is None else error(text)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as failure:
            better = explained_error(failure, args, kwargs)
            if better is failure:
                raise
            raise better from failure

    @wraps(fn)
    async def wait(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await cast("Callable[P, Awaitable[Any]]", fn)(*args, **kwargs)
        except Exception as failure:
            better = explained_error(failure, args, kwargs)
            if better is failure:
                raise
            raise better from failure

    return cast("Callable[P, R]", wait) if inspect.iscoroutinefunction(fn) else call


def explanation(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = "") -> str | None:
    """What is wrong with the first argument that does not fit its annotation; None if all seem to fit."""
    signature, names = inspect.signature(fn), vars(sys.modules[fn.__module__])
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # see `_advice_on_names`
        return None
    for argument, value in arguments.items():
        wants = signature.parameters[argument].annotation
        for option, option_value, annotation in _options(argument, value, wants, names):
            if isinstance(annotation, str):
                expression = ast.parse(annotation, mode="eval").body
                bad = misfit(option_value, expression, names)
                if bad is not None:
                    return f"{name or fn.__name__}({option}=...) {_advice(bad, names)}"
    return None


def _advice_on_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What Python's own words leave out where names or places of arguments do not fit; "" if they fit."""
    parameters = inspect.signature(fn).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return ""
    names = [one.name for one in parameters if one.name != "self" and one.kind is not one.VAR_POSITIONAL]
    unknown = next((name for name in kwargs if name not in names), None)
    if unknown is not None:
        return f"{nearest(unknown, names)}; there are {', '.join(names)}"
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in kwargs]
    places = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
    is_open = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if by_name and len(args) > places and not is_open:
        return f"; write {by_name[0]}=...: by name go {', '.join(by_name)}"
    return ""


def _options(argument: str, value: Any, wants: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, annotation) of an argument; of ``**options: Unpack[Typed]`` those of each option."""
    typed = names.get(wants[7:-1]) if isinstance(wants, str) and wants.startswith("Unpack[") else None
    if typed is None:
        yield argument, value, wants
        return
    for name, annotation in typed.__annotations__.items():
        if name in value:
            yield name, value[name], getattr(annotation, "__forward_arg__", annotation)


def misfit(value: Any, wants: ast.expr, names: Mapping[str, Any], where: str = "") -> Misfit | None:
    """Where the value does not fit the annotation; None if it fits, or if the annotation is one not understood here."""
    if isinstance(wants, ast.BinOp):
        if _fits(value, wants.left, names) or _fits(value, wants.right, names):
            return None
        deeper = [misfit(value, side, names, where) for side in (wants.left, wants.right)]
        return next((one for one in deeper if one is not None and one.value is not value), Misfit(where, wants, value))
    if isinstance(wants, ast.Subscript):
        return _within(value, wants, names, where)
    name, cls = ast.unparse(wants), _class_of(wants, names)
    if name == "Callable":
        return None if callable(value) else Misfit(where, wants, value)
    if name in _MANY | _MAPPINGS:
        return None if _is_many(value, name) else Misfit(where, wants, value)
    return None if cls is None or isinstance(value, cls) else Misfit(where, wants, value)


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
        cls = _class_of(wants.value, names)
        fits = cls is None or isinstance(value, cls)
    return None if fits else Misfit(where, wants, value)


def _items(value: Any, outer: str, inner: list[ast.expr], where: str) -> list[tuple[str, Any, ast.expr]]:
    """The place, the value and the annotation of each item; none of an iterator, which can be read only once."""
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
    cls = _CLASSES.get(name) or names.get(name) or vars(builtins).get(name)
    is_class = isinstance(cls, type) and cls is not Any and not getattr(cls, "_is_protocol", False)
    return cls if is_class else None


def _advice(bad: Misfit, names: Mapping[str, Any]) -> str:
    """What the argument takes, what it got, and how to mend it."""
    value, at = bad.value, f"takes at {bad.where}" if bad.where else "takes"
    what = f"the class {value.__name__}" if isinstance(value, type) else _kind(value)
    text = f"{at} {_in_words(bad.wants)}, not {what}"
    if isinstance(value, type) and _fits_class(value, bad.wants, names):
        return f"{text}: write {value.__name__}(...)"
    for one in (side for side in _alternatives(bad.wants) if isinstance(side, ast.Subscript)):
        outer, inner = ast.unparse(one.value), _inner(one)
        takes_one = outer in _MANY and (len(inner) == 1 or _is_endless(inner))
        if value is not None and takes_one and _fits(value, inner[0], names):
            return f"{text}: write " + _WRITTEN.get(outer, "[it]")
    return text


def _kind(value: Any) -> str:
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
    phrases = [_one_in_words(one) for one in _alternatives(wants)]
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} or {phrases[-1]}"


def _is_anything(wants: ast.expr) -> bool:
    """Whether any value fits: `Any`, or a type variable, whose name is one letter."""
    return any(ast.unparse(one) == "Any" or len(ast.unparse(one)) == 1 for one in _alternatives(wants))


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
        return _CONTAINERS.get(outer, "a list") + ("" if any(map(_is_anything, items)) else f" of {of}")
    return outer
