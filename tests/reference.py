"""Writes docs/reference-providers.md: every argument of every fact, out of the docstrings and signatures.

    python -m tests.reference

A test compares what it makes with what is checked in.
"""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path

import resilient
from resilient import Paginator
from resilient.core.base import budgets
from resilient.core.events import webhook
from resilient.core.gates import rate_limit, retry_after
from resilient.core.provider import auth, rules
from resilient.core.provider import facts as provider
from resilient.core.sync import incremental, paging

WHERE = Path(__file__).parent.parent / "docs" / "reference-providers.md"
CLASSES = (
    ("Provider", "Idempotency", "BatchEndpoint"),
    ("OAuth2", "Bearer", "ApiKey", "Basic", "Rotation"),
    ("Limit", "WaitDialect", "BudgetFields", "Word"),
    ("Errors", "Rule", "Wait", "FailureKind", "Scope"),
    ("Paginator", "LinkHeader", "NextUrl", "NextCursor", "LastKey", "PageNumber", "Offset", "GraphQLPages", "OnePage"),
    ("Incremental", "Webhook", "Signature", "Inbound"),
)
HEADINGS = ("The provider", "Credentials", "Limits and waits", "Errors", "Pages", "Changes and webhooks")
INTRODUCTION = """# Facts: every argument

Made from the docstrings by `python -m tests.reference`; [providers.md](providers.md) says how they go together. A
fact that is not known, or contradicts another, is refused with `InvalidInput` where it is written. Times are in
seconds, names of headers may be written in any case, paths lead into a JSON body (`error.code`, `errors[0].code`,
`errors[].code`, `data.*.id`, `error['.tag']`).
"""
_INTERNAL = {"guarded"}  # set by the engine, never by a declaration
_ALIASES = {
    name: value
    for module in (auth, budgets, incremental, rate_limit, paging, provider, retry_after, rules, webhook)
    for name, value in vars(module).items()
    if typing.get_origin(value) is typing.Literal
}


def named(name: str) -> type:
    """A class by its name."""
    found: type = Paginator if name == "Paginator" else getattr(resilient, name)
    return found


def text_of(cls: type) -> str:
    """Its docstring in Markdown."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def arguments(cls: type) -> list[tuple[str, str, str]]:
    """Name, what it takes, default."""
    found = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in _INTERNAL:
            continue
        kind = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
        found.append((name, _taken(kind), _default(cls, name, parameter)))
    return found


def _taken(kind: str) -> str:
    for name, value in _ALIASES.items():
        words = ", ".join(f'"{word}"' for word in typing.get_args(value))
        kind = re.sub(rf"\b{name}\b(?!\[)", f"[{words}]" if "tuple" in kind else words, kind)
    literal = re.fullmatch(r"Literal\[(.*)\]", kind)
    return (literal[1] if literal else kind).replace("|", "or").replace("Final", "").strip()


def _default(cls: type, name: str, parameter: inspect.Parameter) -> str:
    default = parameter.default
    if is_dataclass(cls):
        one = next((field for field in fields(cls) if field.name == name), None)
        if one is not None and one.default is not MISSING:
            default = one.default
        elif one is not None and one.default_factory is not MISSING:
            return "none"
    if default is inspect.Parameter.empty:
        return "has to be said"
    if isinstance(default, Enum):
        return f"`{type(default).__name__}.{default.name}`"
    if is_dataclass(default) or (isinstance(default, tuple) and default and is_dataclass(default[0])):
        return "the usual ones"
    return "none" if default in (None, (), "") else f"`{default!r}`"


def page() -> str:
    """The whole file."""
    parts = [INTRODUCTION]
    for heading, names in zip(HEADINGS, CLASSES, strict=True):
        parts.append(f"## {heading}\n")
        for name in names:
            cls = named(name)
            parts.append(f"### {name}\n\n{text_of(cls)}\n")
            if issubclass(cls, Enum):
                parts.append(_members(cls))
            elif not inspect.isabstract(cls):
                rows = [f"| `{arg}` | {kind} | {default} |" for arg, kind, default in arguments(cls)]
                parts.append("\n".join(["| argument | takes | default |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _members(cls: type[Enum]) -> str:
    source = inspect.getsource(cls)
    notes = dict(re.findall(r"^\s+(\w+) = \"[^\"]*\"(?:  # (.*))?$", source, re.MULTILINE))
    rows = [f"| `{cls.__name__}.{one.name}` | {notes.get(one.name, '')} |" for one in cls]
    return "\n".join(["| word | means |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    WHERE.write_text(page())
