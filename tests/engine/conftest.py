"""Servers on this machine that stand for others."""

from __future__ import annotations

import contextlib

import pytest

from tests.idp import Idp, idp
from tests.serving import Server
from tests.tenants import make

__all__ = ["idp", "make"]  # fixtures


@pytest.fixture
def stranger():
    """Another host altogether."""
    found = Idp()
    with Server(found) as url:
        found.url = url
        yield found


@pytest.fixture
def serve():
    """``serve(asgi_app)``: its address on this machine."""
    with contextlib.ExitStack() as servers:
        yield lambda app, **options: servers.enter_context(Server(app, **options))


@pytest.fixture
def api(request, serve):
    """The `Api` of the test's module, served at its ``url``."""
    api = request.module.Api()
    api.url = serve(api)
    return api
