"""The trace a program is in, as W3C Trace Context says (https://www.w3.org/TR/trace-context/).

OpenTelemetry is asked if the program uses it, and never imported otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from resilient.core.message import LONGEST


def current() -> tuple[str | None, str | None]:
    """``traceparent`` and ``tracestate`` of the current span; None where there is none."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None, None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None, None
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    state = context.trace_state.to_header()
    return parent, state if 0 < len(state) <= LONGEST else None  # without it rather than a transaction that fails
