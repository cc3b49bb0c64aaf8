"""``manage.py resilient ...``: the whole command line, with the app of the settings."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import BaseCommand, CommandError

from resilient.surface.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence

_APP: Final = "resilient.django:app"
_APPS: Final = ("--app", "-A", "--database")  # options that name another app
_OF_DJANGO: Final = ("--settings", "--pythonpath")  # which manage.py has read already


class Command(BaseCommand):
    """Every command of ``resilient``, for the app that ``RESILIENT`` in the settings describes."""

    help = "Jobs that go through somebody else's API: `manage.py resilient worker`, `... status`, `... jobs why ID`."
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Hand the line on as it was typed: Django's own options mean something else there."""
        sys.exit(main(with_app(argv[2:])))

    def print_help(self, prog_name: str, subcommand: str) -> None:  # noqa: ARG002 - as Django calls it
        """``manage.py help resilient``."""
        main(["--help"])

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """For `call_command`, which goes another way."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_args: Any, **options: Any) -> None:
        """Run one command from a program. Raises `CommandError` with the exit status."""
        if status := main(with_app(options["arguments"])):
            raise CommandError(f"resilient ended with status {status}", returncode=status)


def with_app(arguments: Sequence[str]) -> list[str]:
    """The line without Django's options, and with the app of the settings unless it names another."""
    words, rest = iter(arguments), list[str]()
    for word in words:
        if word in _OF_DJANGO:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _OF_DJANGO)):
            rest.append(word)
    if any(word.partition("=")[0] in _APPS for word in rest):
        return rest
    return ["--app", _APP, *rest]
