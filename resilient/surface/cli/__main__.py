"""``python -m resilient.surface.cli``: the same as ``resilient``."""

from __future__ import annotations

import sys

from resilient.surface.cli import main

sys.exit(main())
