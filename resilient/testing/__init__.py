"""What an application needs to test its handlers: jobs without a database, and a clock that moves when told.

from resilient import testing

result = await sync_issues(testing.job(SyncIssues(repo="a/b"), client=client))

clock = testing.FakeClock()
app = Resilient("sqlite:///test.db", handlers=[...], clock=clock.now)
await app.worker().drain()          # runs everything that is due, then returns
clock.advance(60)

with testing.FakeProvider("hubspot", clock=clock.now) as fake:      # a real server that does what it is told
    fake.throttle(for_=30)
"""

from resilient.store.secrets import new_key
from resilient.testing.clock import FakeClock
from resilient.testing.fake import FakeProvider, Log, Reply, Seen
from resilient.testing.jobs import Bench, batch, bench_of, job, sync_batch, sync_job

__all__ = [
    "Bench",
    "FakeClock",
    "FakeProvider",
    "Log",
    "Reply",
    "Seen",
    "batch",
    "bench_of",
    "job",
    "new_key",
    "sync_batch",
    "sync_job",
]
