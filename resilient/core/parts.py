"""Endpoints that take several requests at once and answer each on its own, as facts: Microsoft Graph's ``$batch``.

A batch of n parts is n requests: to the limits, to the gate, and to whoever has to know which of them failed. So
each part is drawn, classified and reported like a request of its own, and the batch itself is only their envelope.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoint:
    """A JSON batch: ``POST path`` with ``{requests: [{id, method, url, headers, body}]}``.

    The answer is ``{responses: [{id, status, headers, body}]}``, in any order. ``path``: below the base URL;
    ``most``: parts in one batch.
    """

    path: str
    most: int = 20
    requests: str = "requests"
    responses: str = "responses"
