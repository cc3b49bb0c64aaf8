"""What tests of connecting accounts need: somebody to connect to, a place to come back to; commands run here."""

from __future__ import annotations

import pytest

from resilient.surface.cli import main
from tests import brokers
from tests.idp import idp

__all__ = ["idp"]  # a fixture


@pytest.fixture
def free_port():
    return brokers.free_port()


@pytest.fixture
def run(capsys):
    """Run a command: (status, what it printed, what it complained of)."""

    def call(*arguments):
        status = main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call
