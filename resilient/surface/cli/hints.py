"""Commands that a text proposes, made to work when they are copied: with the options that say which app is meant.

Who typed ``resilient --app shop.jobs:app status`` reads ``resilient --app shop.jobs:app jobs why ID``. What came from
the environment or from ``.env`` needs no option: it is there for the next command, too.
"""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WHICH: Final = ("--app", "--database", "--schema", "--shard")  # of the shared options, those that say which app
DJANGO: Final = "resilient.django:app"  # for `manage.py resilient`
_COMMAND: Final = re.compile(r"`(resilient [^`]+)`")
_ALONE: Final = ("secrets new", "providers new", "demo", "bench")  # need no app
_OF_CODE: Final = (  # need a program's app: a database alone is not enough
    "worker", "enqueue", "connect", "connections test", "connections add", "connections release", "connections confirm",
    "resources test", "outbox replay",
)  # fmt: skip
_SHORT: Final = {"-A": "--app"}
_HARMLESS: Final = re.compile(r"sqlite[+a-z]*:///[^?#]*|postgres(?:ql)?[+a-z0-9]*://[^:#]*(?::\d+[^:@#]*)*")
_SECRET: Final = re.compile("pass|secret|token|key", re.IGNORECASE)


def which_of(words: Sequence[str]) -> dict[str, str]:
    """The options that say which app is meant, of a command line with these in front."""
    options: dict[str, str] = {}
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if name not in WHICH:
            continue
        value = value if equals else "".join(words[n + 1 : n + 2])
        options[name] = "ADDRESS" if name == "--database" and _may_be_secret(value) else value
    return options


def _may_be_secret(address: str) -> bool:
    """Whether an address of a database may hold a password: all but a file, or a server whose colons mean ports."""
    return _HARMLESS.fullmatch(address) is None or _SECRET.search(address.partition("?")[2]) is not None


def hinted(text: str, options: Mapping[str, str]) -> str:
    """A text with these options in each command that stands in it between backticks."""
    if not options or "`resilient " not in text:
        return text
    return _COMMAND.sub(lambda match: f"`{command_with(match[1], options)}`", text)


def command_with(command: str, options: Mapping[str, str]) -> str:
    """A command with the options that say which app is meant."""
    _, _, rest = command.partition(" ")
    is_whole = any(word.partition("=")[0] in (*WHICH, "--help") for word in rest.split())
    if not options or is_whole or _begins(rest, _ALONE):
        return command
    if options.get("--app") == DJANGO:
        return f"python manage.py {command}"
    if "--database" in options and _begins(rest, _OF_CODE):
        options = {"--app": "module:app"}
    return " ".join(["resilient", *(f"{name} {quote(value)}" for name, value in options.items()), rest])


def _begins(rest: str, commands: Sequence[str]) -> bool:
    return any(rest == one or rest.startswith(f"{one} ") for one in commands)
