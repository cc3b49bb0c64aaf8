"""What traces cost: ``python tests/benchmarks/bench_tracing.py [postgresql://...]``.

One worker drains the same jobs, which do nothing, in turns: without traces, with OpenTelemetry's API and no SDK, and
with an SDK whose exporter throws everything away. Rates are medians over the turns; shares are of the first
variant's turn beside them. CPU is this process's, in microseconds a job, enqueueing included. Last, one look for a
tracer.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from resilient import Job, Resilient, Tracing, handler
from resilient.surface.scratch import scratch


class Nowhere(SpanExporter):
    """Takes spans and throws them away."""

    def export(self, spans):  # noqa: ARG002
        return SpanExportResult.SUCCESS


@handler("nothing")
async def nothing(job: Job[int]) -> None:
    pass


async def turn(url, schema, tracing, jobs):
    """Jobs a second, and the CPU of one in microseconds."""
    app = Resilient(url, schema=schema, handlers=[nothing], tracing=tracing, upgrade=True)
    await app.ready()
    cpu = time.process_time()
    for at in range(0, jobs, 1000):
        await app.enqueue_many("nothing", range(at, at + 1000), resource_key=f"api/{at // 1000 % 10}")
    began = time.perf_counter()
    await app.worker(concurrency=50).drain()
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    await app.close()
    return jobs / seconds, cpu / jobs * 1e6


async def main():
    words = argparse.ArgumentParser()
    words.add_argument("database", nargs="?", default="sqlite")
    words.add_argument("--jobs", type=int, default=5_000)
    words.add_argument("--turns", type=int, default=7)
    options = words.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    variants = {"off": Tracing(enabled=False), "API, no SDK": Tracing(), "SDK": Tracing(provider)}
    figures = {name: [] for name in variants}
    with scratch(None if options.database == "sqlite" else options.database, "tracing") as place:
        for _ in range(options.turns):
            for name, tracing in variants.items():
                figures[name].append(await turn(place.url, place.schema, tracing, options.jobs))
    print(f"{'':>12}  jobs/s  of off  CPU us/job")
    for name, rows in figures.items():
        share = statistics.median(one[0] / off[0] for one, off in zip(rows, figures["off"], strict=True))
        rate, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:>12} {rate:7,.0f}   {share:5.3f} {cpu:11,.1f}")
    for name, tracing in variants.items():
        look = min(timeit.repeat(tracing.tracer, number=100_000, repeat=5)) * 1e4
        print(f"a look for a tracer, {name}: {look:,.0f} ns")
    provider.shutdown()


asyncio.run(main())
