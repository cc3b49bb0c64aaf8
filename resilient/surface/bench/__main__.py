"""``python -m resilient.surface.bench``: the same as ``resilient bench``."""

from __future__ import annotations

from resilient.surface.bench.command import app

if __name__ == "__main__":
    app()
