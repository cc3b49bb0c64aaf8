"""The scriptable provider: see `resilient.testing.fake.provider`."""

from resilient.testing.fake.provider import FakeProvider, provider_at
from resilient.testing.fake.server import Log, Reply, Seen

__all__ = ["FakeProvider", "Log", "Reply", "Seen", "provider_at"]
