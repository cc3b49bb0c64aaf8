"""What tests of connecting accounts need: somebody to connect to, and a place to come back to."""

from __future__ import annotations

import pytest

from tests import brokers
from tests.idp import idp

__all__ = ["idp"]  # a fixture


@pytest.fixture
def free_port():
    return brokers.free_port()
