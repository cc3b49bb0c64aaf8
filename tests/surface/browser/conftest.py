"""Debian's chromium at the dashboard: one browser a process, all of it in the session's one event loop.

Outside CI these tests are skipped where no chromium is installed; `.ci/run` installs it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, compile_path

from resilient import web
from resilient.surface.web.dashboard import bulk, mount
from tests.serving import serving
from tests.surface.browser import world
from tests.surface.dashboards import ALL

_CRM = Starlette(routes=[Route("/me", lambda _request: JSONResponse({"id": 1}))])
PATIENCE = 60_000  # milliseconds: bounds a test that hangs, and promises nothing
_AXE = Path(__file__).parent / "axe" / "axe.min.js"
# What the browser itself says of a page, beside its console.
_REPORTS = """
window.reports = [];
document.addEventListener('securitypolicyviolation', (e) => reports.push(`${e.violatedDirective}: ${e.blockedURI}`));
window.executed = () => { reports.push('a script of a stranger ran'); };
window.alert = window.executed;
"""


def chromium_path():
    """Where the browser is; skips the test if it is nowhere."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here: apt-get install chromium, or say CHROMIUM=/path/to/it")
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium():
    path = chromium_path()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=path, args=options, timeout=PATIENCE)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _world(tmp_path_factory, chromium):
    """A filled SQLite file, which each test copies."""
    path = tmp_path_factory.mktemp("world") / "world.db"
    app = world.build(f"sqlite:///{path}", upgrade=True)
    await world.fill(app)
    await app.close()
    return path


def shape(address):
    """The pattern of `mount.PAGES` that serves an address."""
    path = address.partition("?")[0]
    return next(one for one in mount.PAGES if compile_path(one)[0].match(path))


class Site:
    """A dashboard that is served, and who stands before it: ``rights`` may change between two requests."""

    def __init__(self, app, chromium):
        self.app, self.chromium, self.url = app, chromium, ""
        self.rights = ALL

    def asgi(self, **options):
        return web.dashboard(self.app, operator=lambda _request: web.Operator("ann", self.rights), **options)

    @asynccontextmanager
    async def page(self, *, axe=False, **options):
        """A tab of its own. Afterwards: nothing was blocked by the policy, and nothing failed in the console."""
        context = await self.chromium.new_context(base_url=self.url, **options)
        context.set_default_timeout(PATIENCE)
        scripts = options.get("java_script_enabled", True)
        if scripts:
            await context.add_init_script(_REPORTS)
        if axe:
            await context.add_init_script(path=_AXE)
        page = await context.new_page()
        faults = []
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
        page.faults = faults
        try:
            yield page
            if scripts:
                faults += await page.evaluate("window.reports")
            assert faults == []
        finally:
            await context.close()

    async def addresses(self):
        """Every page, in each of the shapes that it has on this database."""
        app = self.app
        jobs = {one.state.value: one for one in await app.jobs.list(limit=500)}
        doubt = next(one for one in await app.jobs.list(state="dead") if one.last_error_kind == "ambiguous")
        going = bulk.Bulk("resources", "Pause 9 accounts", 9, "/accounts", 3600.0, id="going", done=3)
        bulk._BULKS.setdefault(app.database, {})["going"] = going
        flows = {one.name: one for one in await app.workflows.list()}
        return [
            "/", "/accounts", "/accounts?all=1", "/accounts?q=crm&gate=pause", "/account/crm", "/account/crm/acct-1",
            "/account/crm/acct-8", "/account/mail/acct-2", "/jobs", "/jobs?state=dead&kind=contact.push&worker=x",
            *(f"/jobs/{one.id}" for one in [*jobs.values(), doubt]), f"/jobs/{jobs['ready'].id}/edit", "/enqueue",
            "/enqueue?kind=contact.push&resource=crm/acct-1", "/enqueue?kind=order.charge&raw=1", "/dead", "/workflows",
            *(f"/workflows/{one.id}" for one in flows.values()), "/schedules", "/schedules/nightly",
            "/schedules/each-account", "/streams", "/outbox", "/connections", "/workers", "/system", "/audit",
            "/bulk/going",
        ]  # fmt: skip


@pytest_asyncio.fixture(loop_scope="session")
async def site(_world, tmp_path, chromium):
    """A dashboard on a database of its own that has everything, at an address of its own."""
    path = tmp_path / "world.db"
    shutil.copy(_world, path)
    async with serving(_CRM) as crm_at:
        app = world.build(f"sqlite:///{path}", crm_at)
        site = Site(app, chromium)
        async with serving(site.asgi()) as site.url:
            yield site
    await app.close()
