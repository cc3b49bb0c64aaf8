"""``resilient providers ...``: which APIs are known, what is known about one, and a new one to fill in."""

from __future__ import annotations

import keyword
import re
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from resilient.core.errors import InvalidInput
from resilient.core.facts_age import is_old
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.facts import described, facts_of, limits_in_words
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from resilient.core.provider import Provider
    from resilient.surface.cli.context import Context

providers = typer.Typer(help="Known third-party APIs: see their facts, write a new one.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A provider's name, such as github.")]
TEMPLATES: Final = "resilient.surface"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_OLD: Final = "read more than a year ago: compare it with what its sources say now"


def today() -> date:
    """The day by which facts are old."""
    return datetime.now(UTC).date()


@providers.command("list")
def list_providers(ctx: typer.Context) -> None:
    """List the installed providers, and the app's own."""
    run: Context = ctx.obj
    found = _known(run)
    if run.out.as_json:
        run.out.json({"providers": [{"name": name, **described(one)} for name, one in found.items()]})
        return
    rows = [
        Row(
            name,
            one.title,
            ", ".join(dict.fromkeys(auth.kind for auth in one.auth)) or "by its SDK",
            limits_in_words(one),
            one.verified_on,
            remark=_OLD if is_old(one.verified_on, today()) else "",
        )
        for name, one in found.items()
    ]
    run.out.table(("NAME", "TITLE", "CREDENTIALS", "LIMITS OF AN ACCOUNT", "VERIFIED ON"), rows)


@providers.command("show")
def show_provider(ctx: typer.Context, name: Name) -> None:
    """Everything that is known about one API.

    What of it is not verified is marked. With --app, as that program has configured it.
    """
    run: Context = ctx.obj
    if (found := _known(run, name).get(name)) is None:
        mine = "" if run.app_name else "; one of your program's own needs --app"
        raise NotFound(f"no provider is called {name!r}: see `resilient providers list`{mine}")
    if run.out.as_json:
        run.out.json(described(found))
        return
    run.out.fields([("provider", f"{found.title} ({found.name})"), ("verified on", found.verified_on)])
    if is_old(found.verified_on, today()):
        run.out.paragraph(f"Warning: {_OLD}", style="yellow")
    for heading, lines in facts_of(found):
        run.out.heading(heading)
        for line in lines:
            run.out.paragraph(line, indent=2)


def _known(run: Context, *names: str) -> dict[str, Provider]:
    """The installed providers (of these names), as the program has configured them, and the program's own."""
    from resilient.engine.catalogue import providers_by_name  # noqa: PLC0415 - half a second of imports, only where needed

    found = {name: make() for name, make in providers_by_name().items() if not names or name in names}
    return dict(sorted({**found, **(run.app.providers if run.app_name else {})}.items()))


@providers.command("new")
def new_provider(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in resource keys: lower case, such as acme.")],
    into: Annotated[Path, typer.Option(help="The directory to write to.", file_okay=False)] = Path(),
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
) -> None:
    """Write a provider to fill in, and the test of its contract."""
    run: Context = ctx.obj
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InvalidInput(f"{name!r} cannot name a provider: use lower-case letters, digits and _, such as 'acme'")
    words = {"name": name, "module": name, "title": name.replace("_", " ").title(), "constant": name.upper()}
    made = [(into / f"{name}.py", "provider.py.txt"), (into / f"test_{name}.py", "provider_test.py.txt")]
    there = [str(path) for path, _ in made if path.exists()]
    if there and not force:
        raise InvalidInput(f"{' and '.join(there)} would be overwritten: choose another name, or say --force")
    into.mkdir(parents=True, exist_ok=True)
    for path, template in made:
        text = (files(TEMPLATES) / "templates" / template).read_text(encoding="utf-8")
        path.write_text(text.format(**words), encoding="utf-8")
    if run.out.as_json:
        run.out.json({"written": [str(path) for path, _ in made]})
        return
    module, test = (str(path) for path, _ in made)
    run.out.say(f"Wrote {module} and {test}.")
    run.out.say(f"Fill in the facts, then: pytest {test}")
