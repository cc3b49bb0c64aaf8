"""What an application needs to test its handlers: jobs without a database, a clock that moves when told, a provider.

from resilient import testing

result = await sync_issues(testing.job(SyncIssues(repo="a/b"), client=client))

clock = testing.FakeClock()
app = Resilient("sqlite:///test.db", handlers=[...], clock=clock.now)
await app.worker().drain()          # runs everything that is due, then returns
clock.advance(60)

with testing.FakeProvider("hubspot", clock=clock.now) as fake:      # a real server that does what it is told
    fake.throttle(for_=30)

Nothing is imported before it is used, so that the pytest plugin costs those nothing who do not use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient.store.accounts.secrets import new_key
    from resilient.testing.fake import FakeProvider, Log, Reply, Seen, provider_at
    from resilient.testing.jobs import Bench, FakeClock, batch, bench_of, job, sync_batch, sync_job

_WHERE = {
    "resilient.store.accounts.secrets": ("new_key",),
    "resilient.testing.fake": ("FakeProvider", "Log", "Reply", "Seen", "provider_at"),
    "resilient.testing.jobs": ("Bench", "FakeClock", "batch", "bench_of", "job", "sync_batch", "sync_job"),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


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
    "provider_at",
    "sync_batch",
    "sync_job",
]
