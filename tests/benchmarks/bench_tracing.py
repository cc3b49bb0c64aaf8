"""What traces cost: ``python tests/benchmarks/bench_tracing.py [postgresql://...]``.

One worker drains the same jobs, which do nothing, in turns, each time in another order: without traces, with
OpenTelemetry's API and no SDK, and with an SDK whose exporter throws everything away, of all traces, of one in ten and
of one in a hundred. Rates are medians over the turns; shares are of the first variant's turn beside them. CPU is this
process's, in microseconds a job, enqueueing included: the least of the turns. Last, one look for a tracer.
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
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

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
    sdks = {"SDK": 1.0, "SDK, 10 %": 0.1, "SDK, 1 %": 0.01}
    providers = [TracerProvider(sampler=ParentBased(TraceIdRatioBased(share))) for share in sdks.values()]
    for one in providers:
        one.add_span_processor(BatchSpanProcessor(Nowhere()))
    variants = {"off": Tracing(enabled=False), "API, no SDK": Tracing()}
    variants |= {name: Tracing(one) for name, one in zip(sdks, providers, strict=True)}
    figures = {name: [] for name in variants}
    with scratch(None if options.database == "sqlite" else options.database, "tracing") as place:
        names = list(variants)
        for n in range(options.turns):  # the database grows meanwhile
            for name in [*names[n % len(names) :], *names[: n % len(names)]]:
                figures[name].append(await turn(place.url, place.schema, variants[name], options.jobs))
    print(f"{'':>12}  jobs/s  of off  CPU us/job")
    for name, rows in figures.items():
        share = statistics.median(one[0] / off[0] for one, off in zip(rows, figures["off"], strict=True))
        rate, cpu = statistics.median(one[0] for one in rows), min(one[1] for one in rows)
        print(f"{name:>12} {rate:7,.0f}   {share:5.3f} {cpu:11,.1f}")
    for name, tracing in variants.items():
        look = min(timeit.repeat(tracing.tracer, number=100_000, repeat=5)) * 1e4
        print(f"a look for a tracer, {name}: {look:,.0f} ns")
    for one in providers:
        one.shutdown()


asyncio.run(main())
