"""Settings from the environment and from the file ``.env``, for the command line.

An option that was typed comes first, then the environment, then ``.env`` of the working folder, then the default. Of
that file only what begins with ``RESILIENT_`` is taken, and it is put into the environment of this process: so the
program's own code, secrets and started processes have the same. `resilient.settings` is the same for programs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.errors import SetupError
from resilient.core.base.hosts import without_secrets
from resilient.core.base.loggers import MASK, masked
from resilient.core.base.phrases import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PREFIX: Final = "RESILIENT_"
FILE: Final = ".env"
DATABASE: Final = "RESILIENT_DATABASE"
SECRETS: Final = "RESILIENT_SECRETS"  # the one that no option has: what is typed can be read by every user
_LINE: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?(RESILIENT_\w+)[ \t]*=", re.MULTILINE)
_from_file: set[str] = set()


class Setting(NamedTuple):
    """One setting as `resilient doctor` prints it: no secret, and where it comes from."""

    name: str
    value: str
    source: str


def read_file() -> None:
    """Take the settings in ``.env`` that the environment does not have. Raises `SetupError`."""
    try:
        text = Path(FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{Path(FILE).resolve()} cannot be read: {type(error).__name__}") from None
    if not {*_LINE.findall(text)} - os.environ.keys():
        return
    from dotenv import dotenv_values  # noqa: PLC0415 - only where there is one

    for name, value in dotenv_values(FILE, interpolate=False).items():
        if name.startswith(PREFIX) and value is not None and name not in os.environ:
            os.environ[name] = value
            _from_file.add(name)


def options(command: Any) -> dict[str, Any]:
    """The options that have a variable, by that."""
    rows = {param.envvar: param for param in command.params if isinstance(param.envvar, str)}
    for one in getattr(command, "commands", {}).values():
        rows |= {name: param for name, param in options(one).items() if name not in rows}
    return rows


def typed(ctx: Any) -> dict[str, Any]:
    """The settings that the command line has, by variable."""
    context = ctx.find_root()
    sources = {one.envvar: context.get_parameter_source(one.name) for one in context.command.params}
    return {
        one.envvar: context.params[one.name]
        for one in context.command.params
        if isinstance(one.envvar, str) and (source := sources[one.envvar]) and source.name == "COMMANDLINE"
    }


def misspelt(settings: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that is almost a setting."""
    names = {name.removeprefix(PREFIX): name for name in (*settings, SECRETS)}
    for name in sorted(environ):
        word = name.removeprefix(PREFIX)
        if word != name and word not in names and (near := nearest(word, names)):
            yield f"{name} is no setting" + near.replace(" '", f" '{PREFIX}")


def unknown(settings: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none."""
    names = {*settings, SECRETS}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in names)


def listed(command: Any, values: Mapping[str, Any]) -> list[Setting]:
    """Every setting with its value and source; ``values`` are those that the command line has, by variable."""
    rows = options(command)
    return [_setting(name, rows.get(name), values) for name in sorted({*rows, SECRETS})]


def _setting(name: str, param: Any, values: Mapping[str, Any]) -> Setting:
    if name in values:
        return Setting(name, _shown(name, str(values[name])), "option")
    if name in os.environ:
        return Setting(name, _shown(name, os.environ[name]), FILE if name in _from_file else "environment")
    default = getattr(param, "default", None)
    return Setting(name, "" if default is None else str(default), "default")


def _shown(name: str, value: str) -> str:
    if name == SECRETS:
        number = len(value.replace(",", " ").split())
        return f"{MASK} ({number})"
    if "://" in value:
        return without_secrets(value)
    return MASK if name == DATABASE else masked(value)  # a misspelt address: nobody knows where its password stands
