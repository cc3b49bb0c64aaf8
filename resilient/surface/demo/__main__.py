"""``python -m resilient.surface.demo``: the same as ``resilient demo``."""

from __future__ import annotations

import typer

from resilient.surface.demo.command import demo

typer.run(demo)
