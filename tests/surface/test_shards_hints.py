"""A worker of several shards proposes commands that say which one is meant."""

from __future__ import annotations

import asyncio
import logging

from resilient import Job, Shards, handler
from resilient.surface.cli.logs import TextFormatter
from tests.helpers import LIMIT, until

LOG = logging.getLogger("resilient.worker")


@handler("say")
async def say(job: Job[None]) -> None:
    LOG.warning("look: `resilient jobs show %s`", job.resource_key)


async def test_a_line_of_the_log_names_its_shard(empty_urls, caplog):
    of = {"crm/a": "eu", "crm/b": "us"}.__getitem__
    async with Shards({"eu": empty_urls(), "us": empty_urls()}, of=of, handlers=[say], upgrade=True) as shards:
        for key in ("crm/a", "crm/b"):
            await shards.enqueue(say, resource_key=key)
        workers = shards.worker()
        running = asyncio.create_task(workers.run(signals=False))
        async with asyncio.timeout(LIMIT):
            await until(lambda: sum("look" in one.msg for one in caplog.records) == 2)
        workers.stop()
        await running
    lines = [TextFormatter({"--app": "m:app"}).format(one) for one in caplog.records if "look" in one.msg]
    assert sorted(line.partition("look: ")[2] for line in lines) == [
        "`resilient --app m:app --shard eu jobs show crm/a`",
        "`resilient --app m:app --shard us jobs show crm/b`",
    ]
