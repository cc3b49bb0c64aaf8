"""The scriptable provider: see `resilient.testing.fake.provider`."""

from resilient.testing.fake.log import Log, Reply, Seen
from resilient.testing.fake.provider import FakeProvider, provider_at

__all__ = ["FakeProvider", "Log", "Reply", "Seen", "provider_at"]
