"""``resilient demo``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console

from resilient.core.base.errors import MissingExtra, ResilientError


def demo(
    csv: Annotated[Path | None, typer.Option(help="Contacts to push: a file with the columns name and email.")] = None,
    database: Annotated[
        str | None, typer.Option(help="sqlite:///... or postgresql://...; default: a temporary SQLite file.")
    ] = None,
    workers: Annotated[int, typer.Option(min=2, max=16, help="Worker processes; one of them is killed.")] = 2,
    *,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live screen.")] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Also in a browser; what happened stays there until Ctrl-C.")
    ] = False,
) -> None:
    """Show the engine at work against a misbehaving provider on this machine, then audit what it did.

    Exit status: 0 if everything promised is true, 1 if something is not, 2 if the demo could not be run.
    """
    console = Console()
    try:
        _need_server()
        from resilient.surface.demo import run  # noqa: PLC0415 - the whole engine: only when needed

        options = run.Options(csv=csv, database=database, workers=workers, plain=plain, dashboard=dashboard)
        passed = run.run(options, console)
    except ResilientError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passed else 1)


def _need_server() -> None:
    try:
        import standardwebhooks  # noqa: F401, PLC0415 - the extra may be missing
        import uvicorn  # noqa: F401, PLC0415 - the same
    except ImportError:
        raise MissingExtra("the demo needs a local web server: install resilient-engine[demo]") from None
