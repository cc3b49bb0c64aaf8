"""The summary at the end, for people: what was promised, what was found, which contacts are dead and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from resilient.surface.demo.audit import Audit

_DEAD_SHOWN: Final = 20


def report(console: Console, audit: Audit, seconds: float) -> None:
    """Print ``audit``."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False, style=style)

    line("")
    line("What the provider's own log says, beside the database")
    line("")
    for claim in audit.claims:
        line(
            f"  {'ok    ' if claim.holds else 'FALSE '} {claim.text}: {claim.found}",
            None if claim.holds else "bold red",
        )
    line("")
    for fact in audit.facts:
        line(f"  {fact}")
    if audit.dead:
        line("")
        line("  Dead, and why (in an application: resilient dead list)")
        for contact, reason in audit.dead[:_DEAD_SHOWN]:
            line(f"    {contact}  {reason}")
        if len(audit.dead) > _DEAD_SHOWN:
            line(f"    and {len(audit.dead) - _DEAD_SHOWN} more")
    line("")
    if audit.passed:
        line(f"Everything that was promised is true. {seconds:.1f} s.", "bold green")
    else:
        broken = sum(not claim.holds for claim in audit.claims)
        line(f"{broken} of {len(audit.claims)} claims are FALSE. {seconds:.1f} s.", "bold red")
