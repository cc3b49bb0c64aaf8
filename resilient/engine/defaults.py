"""What a worker works with unless it is told otherwise."""

from __future__ import annotations

from typing import Final

DEFAULT_CONCURRENCY: Final = 50
LEASE: Final = 60.0  # seconds, unless a heartbeat renews it
GRACE: Final = 30.0  # seconds
STUCK_PATIENCE: Final = 300.0  # seconds for which a stuck handler keeps its job
