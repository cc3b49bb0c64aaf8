"""The options that say which jobs are meant, the same for every command that takes a filter.

Times are ``1h`` (that long ago), ``+1h`` (that far ahead) or ``2030-01-31T12:00Z``; a time without a zone is refused,
because the command line prints UTC and the reader's clock may not.
"""

from __future__ import annotations

import functools
import inspect
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from resilient.core.errors import InvalidInput, NaiveDatetime
from resilient.core.failure import FailureKind
from resilient.core.limit import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.store.filters import Criteria as Criteria  # noqa: PLC0414 - mypy: exported
else:
    Criteria = dict  # typer evaluates annotations; the store is only imported by commands that use it

_WHEN: Final = "1h (ago), +1h (ahead) or 2030-01-31T12:00Z"


def _option(*names: str, text: str, shape: str = "TEXT") -> Any:
    return typer.Option(*names, help=text, show_default=False, metavar=shape)


_MANY: Final = list[str] | None
_ONE: Final = str | None
OPTIONS: Final[dict[str, Any]] = {
    "state": Annotated[
        _MANY,
        _option(
            "--state",
            "-s",
            shape="STATE",
            text="blocked, scheduled, ready, running, succeeded, dead, cancelled; may be repeated.",
        ),
    ],
    "kind": Annotated[_MANY, _option("--kind", "-k", shape="KIND", text="Kind of job; may be repeated.")],
    "resource": Annotated[
        _MANY,
        _option("--resource", "-r", shape="KEY", text="Resource key or pattern, such as 'github/*'; may be repeated."),
    ],
    "within": Annotated[_ONE, _option("--within", shape="KEY", text="A resource key and everything below it.")],
    "tag": Annotated[
        _MANY, _option("--tag", "-t", shape="NAME=VALUE", text="name=value; all of them must fit; may be repeated.")
    ],
    "unique_key": Annotated[_ONE, _option("--unique-key", text="The unique key.")],
    "ordering_key": Annotated[_ONE, _option("--ordering-key", text="The ordering key.")],
    "error_kind": Annotated[
        _MANY,
        _option("--error-kind", shape="KIND", text=f"Kind of the last error: {', '.join(FailureKind)}."),
    ],
    "error_code": Annotated[
        _MANY, _option("--error-code", shape="CODE", text="Code of the last error, such as http_422.")
    ],
    "text": Annotated[_ONE, _option("--text", text="Occurs in the last error.")],
    "struggling": Annotated[
        bool, typer.Option("--struggling", help="Attempts used, and still going.", show_default=False)
    ],
    "worker": Annotated[_ONE, _option("--worker", text="The worker that runs it.")],
    "created_after": Annotated[
        _ONE, _option("--created-after", "--since", shape="TIME", text=f"Created since: {_WHEN}.")
    ],
    "created_before": Annotated[_ONE, _option("--created-before", shape="TIME", text="Created before.")],
    "finished_after": Annotated[_ONE, _option("--finished-after", shape="TIME", text="Finished since.")],
    "finished_before": Annotated[_ONE, _option("--finished-before", shape="TIME", text="Finished before.")],
    "run_after": Annotated[_ONE, _option("--run-after", shape="TIME", text="To run from then on.")],
    "run_before": Annotated[_ONE, _option("--run-before", shape="TIME", text="To run before then.")],
}


BULK: Final[dict[str, Any]] = {
    "dry_run": Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be changed.")],
    "rate": Annotated[_ONE, _option("--rate", shape="RATE", text="So many at a time: 10/s, 600/min.")],
    "limit": Annotated[int | None, typer.Option("--limit", "-l", min=1, help="At most so many.", show_default=False)],
    "stopped_after": Annotated[_ONE, _option("--stopped-after", shape="TIME", text=f"Stopped since: {_WHEN}.")],
    "stopped_before": Annotated[_ONE, _option("--stopped-before", shape="TIME", text="Stopped before.")],
}


def bulk(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that changes resources the options that bound it; it gets them as ``criteria``."""
    return _with_options({name: option for name, option in BULK.items() if name not in without})


def filtered(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the filter options; it gets them as ``criteria``."""
    return _with_options({name: option for name, option in OPTIONS.items() if name not in without})


def _with_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for p in own.values() if p.name != "criteria"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=option)
            for name, option in options.items()
        ]

        @functools.wraps(command)
        def call(*args: Any, **kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in options}
            command(*args, **kwargs, criteria=criteria_of(given))

        parameters = kept + added
        del call.__wrapped__  # typer would look through it
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect honours
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


_DEFAULTS: Final = {"dry_run": False, "struggling": False}
_SPELT: Final = {"created_after": "--created-after/--since"}


def criteria_of(given: dict[str, Any]) -> Criteria:
    """Options as `JobFilter` criteria; what was not given is left out."""
    found = {name: value for name, value in given.items() if value}
    if "tag" in found:
        found["tags"] = tags_of(found.pop("tag"))
    for name, value in found.items():
        if name.endswith(("_after", "_before")):
            found[name] = moment(_SPELT.get(name, "--" + name.replace("_", "-")), value)
    return cast("Criteria", found)


def tags_of(pairs: list[str]) -> dict[str, str]:
    """``name=value`` options as a mapping."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--tag {pair!r}: write name=value")
        found[name] = value
    return found


def moment(option: str, text: str) -> datetime | timedelta:
    """A time, or how long ago (ahead: negative)."""
    ahead = text.startswith("+")
    try:
        if ahead or len(text) < len("2030-1-1"):
            far = timedelta(seconds=seconds(text.removeprefix("+")))
            return -far if ahead else far
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r} is not a time: write {_WHEN}") from None
    if at.tzinfo is None:
        raise NaiveDatetime(f"{option} {text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    return at


def span(option: str, text: str) -> timedelta:
    """A length of time: ``90s``, ``15m``, ``1h``, ``7d``."""
    try:
        return timedelta(seconds=seconds(text))
    except (InvalidInput, OverflowError):
        raise InvalidInput(f"{option} {text!r} is not a length of time: write 90s, 15m, 1h or 7d") from None


def until(option: str, duration: str | None, end: str | None) -> datetime | timedelta | None:
    """``--for 10m`` or ``--until 2030-01-31T12:00Z``."""
    if duration is not None and end is not None:
        raise InvalidInput(f"give --for or {option}, not both")
    if duration is not None:
        return span("--for", duration)
    if end is None:
        return None
    at = moment(option, end)
    return -at if isinstance(at, timedelta) and end.startswith("+") else at
