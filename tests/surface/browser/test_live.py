"""Open pages in a real browser: what changes arrives, also after the server was away; keys are enough."""

from __future__ import annotations

import pytest

from tests import brokers
from tests.serving import serving
from tests.surface.browser import world
from tests.surface.browser.conftest import Site

pytestmark = pytest.mark.asyncio(loop_scope="session")
_AT = "document.activeElement"


async def says(page, words):
    await page.locator("#sentence", has_text=words).wait_for()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
async def test_an_open_page_is_kept_up_to_date_also_after_a_restart_of_the_server(database_url, backend, chromium):
    """On SQLite it asks, on PostgreSQL it is told. While the server is away the page says so."""
    app = world.build(database_url)
    site, port = Site(app, chromium), brokers.free_port()
    site.url = f"http://127.0.0.1:{port}"
    asgi = site.asgi(secret="the same secret before and after the restart")
    signals = []
    async with site.page() as page:
        page.on("request", lambda request: signals.append(request.url) if request.url.endswith("/live") else None)
        async with serving(asgi, port=port):
            await page.goto("/")
            await says(page, "Nothing is stopped")
            await app.resources.pause("crm/acct-1")
            await says(page, "1 of 1 account stopped")
        await page.locator("#stale:not([hidden])").wait_for()
        assert "The server does not answer" in await page.locator("#stale").inner_text()
        await app.resources.pause("crm/acct-2")
        async with serving(asgi, port=port):
            await says(page, "2 of 2 accounts stopped")
            await page.locator("#stale").wait_for(state="hidden")
            await app.resources.resume("crm/acct-1")
            await says(page, "1 of 2 accounts stopped")
            assert "stopped" in await page.locator("#announce").inner_text()
            assert await page.evaluate("window.reports") == []
            await page.goto("/nothing")  # whose stream cannot break when the server ends
        assert (len(signals) > 1) == (backend == "postgresql"), "a stream that broke is opened again"
        page.faults[:] = [one for one in page.faults if "Content Security Policy" in one or "Error: " in one]
    await app.close()


async def test_keys_are_enough_and_the_focus_survives_an_update(site):
    async with site.page() as page:
        keys = page.keyboard
        await page.goto("/accounts")
        await keys.press("Tab")
        assert await page.evaluate(f"{_AT}.textContent") == "To the content"
        await keys.press("Enter")
        assert await page.evaluate(f"{_AT}.id") == "main"
        for _ in range(3):
            await keys.press("j")
        await keys.press("k")
        href = await page.evaluate(f"{_AT}.getAttribute('href')")
        row = await page.evaluate(f"[...document.querySelectorAll('[data-row]')].findIndex((e) => e.contains({_AT}))")
        assert row == 1
        await page.evaluate("document.querySelector('#live').dataset.before = '1'")
        await site.app.resources.pause("crm/acct-7")
        await page.locator("#live:not([data-before])").wait_for()
        assert await page.evaluate(f"{_AT}.getAttribute('href')") == href, "the focus is where it was"
        await keys.press("/")
        assert await page.evaluate(f"{_AT}.id") == "search"
        await keys.type("crm/acct-5")
        await keys.press("Enter")
        await page.wait_for_url("**/accounts?q=crm*")
        await keys.press("?")
        await page.locator("#help[open]").wait_for()
        await keys.press("Escape")
        await page.locator("#help:not([open])").wait_for(state="attached")
        await keys.press("j")
        await keys.press("Enter")
        await page.wait_for_url("**/account/crm/acct-5")
        await page.locator("[name=reason]").focus()
        await keys.type("j asked")
        await keys.press("Enter")
        await page.locator(".note", has_text="crm/acct-5 is paused.").wait_for()
        assert (await site.app.resources.get("crm/acct-5")).paused_reason == "j asked"
        await page.locator("#keys-switch").focus()
        await keys.press("Space")
        await page.locator("main").focus()
        await keys.press("g")
        await keys.press("d")
        await keys.press("?")
        assert await page.locator("#help[open]").count() == 0, "keys are switched off"
        await page.reload()
        assert not await page.locator("#keys-switch").is_checked()
        await page.locator("#keys-switch").press("Space")
        await page.locator("main").focus()
        await keys.press("g")
        await keys.press("d")
        await page.wait_for_url("**/dead")
