"""The trace a program is in, as W3C Trace Context says (https://www.w3.org/TR/trace-context/).

OpenTelemetry is asked if the program uses it, and never imported otherwise.
"""

from __future__ import annotations

import sys
from typing import Any


def current() -> tuple[str | None, str | None]:
    """``traceparent`` and ``tracestate`` of the current span; None where there is none."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None, None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None, None
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return parent, context.trace_state.to_header() or None
