"""The pytest plugin: fixtures for programs that are tested against a scriptable provider. Installed with the package.

- ``fake_clock``: a `FakeClock`.
- ``fake_provider``: ``fake_provider("hubspot", ...)`` starts a `FakeProvider` on that clock, ended with the test.
- ``resilient_url``: the address of a fresh SQLite database with the tables.
- ``resilient_app``: ``resilient_app(handlers=[...], providers=[fake.provider], ...)`` makes an app on that database and
  that clock, with a key for secrets, closed at the end of the test.
- ``drain``: ``await drain(app)`` runs everything that is due; ``await drain(app, hours=1)`` moves the clock first, in
  ten steps, so that what becomes due on the way runs in its order. At each step the app's schedules tick and its
  alerts look at what lasts, as a worker has them do. ``drain_sync`` is the same without a loop.

Nothing of the engine is imported before a fixture is asked for. A fixture of the same name in a conftest.py wins.
"""

from __future__ import annotations

import asyncio
import shutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import datetime
    from pathlib import Path

    from resilient.engine.app.app import Resilient
    from resilient.testing.fake import FakeProvider
    from resilient.testing.jobs import FakeClock

STEPS: Final = 10  # looks at what is due while the clock moves


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that moves when told."""
    from resilient.testing.jobs import FakeClock  # noqa: PLC0415 - nothing before it is used

    return FakeClock()


@pytest.fixture
def fake_provider(fake_clock: FakeClock) -> Iterator[Callable[..., FakeProvider]]:
    """``fake_provider(provider, **options)``: a running `FakeProvider`, by default on ``fake_clock``."""
    from resilient.testing.fake import FakeProvider  # noqa: PLC0415

    made: list[FakeProvider] = []

    def make(provider: Any, **options: Any) -> FakeProvider:
        fake = FakeProvider(provider, **{"clock": fake_clock.now, **options})
        made.append(fake)
        fake.start()
        return fake

    yield make
    for fake in made:
        fake.close()


@pytest.fixture(scope="session")
def _resilient_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the tables, to be copied."""
    from resilient.store.db import schema  # noqa: PLC0415
    from resilient.store.db.database import Database  # noqa: PLC0415

    path = tmp_path_factory.mktemp("resilient") / "template.db"
    database = Database(f"sqlite:///{path}")
    schema.upgrade_sync(database)
    database.close_sync()
    return path


@pytest.fixture
def resilient_url(tmp_path: Path, _resilient_template: Path) -> str:
    """A fresh SQLite database with the tables."""
    shutil.copy(_resilient_template, tmp_path / "resilient.db")
    return f"sqlite:///{tmp_path}/resilient.db"


@pytest.fixture
def resilient_app(resilient_url: str, fake_clock: FakeClock) -> Iterator[Callable[..., Resilient]]:
    """``resilient_app(handlers=[...], providers=[...], ...)``: an app; ``url=`` for a database of your own."""
    from resilient.engine.app.app import Resilient  # noqa: PLC0415
    from resilient.store.accounts.secrets import new_key  # noqa: PLC0415

    made: list[Resilient] = []

    def make(*, url: Any = None, **options: Any) -> Resilient:
        upgrade = {} if url is not None else {"upgrade": False}
        defaults = {"clock": fake_clock.now, "secrets": [new_key()], **upgrade}
        app = Resilient(url or resilient_url, **{**defaults, **options})
        made.append(app)
        return app

    yield make
    for app in made:
        asyncio.run(app.close())


@pytest.fixture
def drain(fake_clock: FakeClock) -> Callable[..., Awaitable[int]]:
    """Run what is due: a function of the app and a span of time. How many executions ended; see the module."""

    async def run(app: Resilient, seconds: float = 0.0, **span: float) -> int:
        done, start = 0, fake_clock.now()
        wait = _span(seconds, span)
        for step in range(STEPS + 1 if wait else 1):
            _to(fake_clock, start, wait * step / STEPS)
            await app.ready()
            await app.schedules.tick()
            done += await app.worker().drain()
            await app.alerts.flush()
            await app.alerts.keep_house()
        return done

    return run


@pytest.fixture
def drain_sync(drain: Callable[..., Any]) -> Callable[..., int]:
    """`drain` for tests without an event loop."""

    def run(app: Resilient, seconds: float = 0.0, **span: float) -> int:
        done: int = asyncio.run(drain(app, seconds, **span))
        return done

    return run


def _span(seconds: float, parts: dict[str, float]) -> timedelta:
    return timedelta(seconds=seconds, **parts)


def _to(clock: FakeClock, start: datetime, passed: timedelta) -> None:
    """Forward only: a handler may have moved the clock as well."""
    clock.set(max(clock.now(), start + passed))
