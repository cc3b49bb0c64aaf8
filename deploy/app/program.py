"""The program that the files here run: put your own in its place, or name yours in RESILIENT_APP."""

from __future__ import annotations

from resilient import Job, Resilient, handler
from resilient.settings import Settings


@handler("ping")
async def ping(job: Job[str]) -> str:
    """Answer with what it was given."""
    return job.payload


app = Resilient(Settings().database_address, handlers=[ping], upgrade=False)  # `resilient db upgrade` does that, once
