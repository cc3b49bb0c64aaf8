"""What type checkers say about the test kit and the adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import aiohttp

from resilient import Job, Part, PartAnswer, Provider, SyncJob, testing
from resilient.adapters import aiohttp as for_aiohttp
from resilient.adapters import requests as for_requests
from resilient.testing import FakeProvider, Log, Seen

if TYPE_CHECKING:
    from datetime import datetime

assert_type(FakeProvider("github").log, Log)
assert_type(FakeProvider("github").log[0], Seen)
assert_type(FakeProvider("github").provider, Provider)
assert_type(FakeProvider("github").early, int)
assert_type(testing.new_key(), str)


def clock(fake: FakeProvider) -> datetime:
    """Its clock."""
    return fake.now()


def plain(job: SyncJob[None]) -> None:
    """A plain handler's session."""
    assert_type(for_requests.session(job), for_requests.Session)


def coroutine(job: Job[None]) -> None:
    """An ``async def`` handler's session."""
    assert_type(for_aiohttp.session(job), aiohttp.ClientSession)
    for_requests.session(job)  # type: ignore[arg-type]


async def parts(job: Job[None], plain_job: SyncJob[None]) -> None:
    """Several requests in one."""
    assert_type(await job.client.batch([Part("GET", "/me")]), list[PartAnswer])
    assert_type(plain_job.client.batch([Part("GET", "/me")]), list[PartAnswer])
