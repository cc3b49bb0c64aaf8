"""Prometheus metrics for servers of your own (extra ``metrics``); a worker has ``resilient worker --metrics :9100``.

`collector` goes into a registry that you have: ``REGISTRY.register(resilient.metrics.collector(app))``.
`asgi` is an application to mount at ``/metrics``. Both take an app, or `Shards`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from resilient.core.base.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, make_asgi_app
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra("metrics need prometheus-client: pip install 'resilient-engine[metrics]'") from error

from resilient.surface.metrics import AppCollector, ShardsCollector, collector, registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from resilient.engine.app.app import Resilient
    from resilient.surface.shards import Shards

__all__ = ["AppCollector", "ShardsCollector", "asgi", "collector"]


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def asgi(app: Resilient | Shards) -> Any:
    """An ASGI application that answers with an app's metrics: mount it at ``/metrics``."""
    source = registry(app)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        metrics = await asyncio.to_thread(lambda: [*source.collect()])  # it reads the database
        collected = CollectorRegistry()
        collected.register(_Collected(metrics))
        await make_asgi_app(collected)(scope, receive, send)

    return answer
