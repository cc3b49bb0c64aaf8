"""What talks to the outside: the only code that knows httpx and tenacity."""

from __future__ import annotations

import sys
from types import ModuleType

if "httpx" not in sys.modules:  # its command line brings click, rich and pygments: half of httpx's imports, for nobody
    sys.modules.setdefault("httpx._main", ModuleType("httpx._main"))
