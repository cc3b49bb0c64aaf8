"""Every page in a real browser: nothing is blocked or fails, axe finds nothing, nothing sticks out, keys are enough."""

from __future__ import annotations

import pytest

from resilient import Shards
from resilient.surface.web.dashboard import mount
from tests.surface.browser.conftest import Site, serving, shape

pytestmark = pytest.mark.asyncio(loop_scope="session")
# Width and theme: a theme changes colours, a width the layout, and neither the other, so each is looked at once.
LOOKS = ((320, "dark"), (1280, "light"))
_LOOK = """
() => axe.run(document, {resultTypes: ['violations', 'passes'], iframes: false}).then((answer) => [
  answer.passes.length,
  answer.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target} ${node.failureSummary}`)),
])
"""


async def test_every_page_is_among_those_that_are_looked_at(site):
    assert {shape(one) for one in await site.addresses()} == set(mount.PAGES)


@pytest.mark.proof("the pages of several shards")
async def test_axe_finds_nothing_and_nothing_sticks_out(site):
    """Narrow and wide, light and dark; the policy blocks nothing, and the console is silent (`Site.page`)."""
    await look_at(site, await site.addresses())


async def test_axe_finds_nothing_on_pages_of_several_shards(tmp_path, chromium):
    urls = {name: f"sqlite:///{tmp_path / place}" for name, place in (("eu", "1.db"), ("us", "nowhere/2.db"))}
    async with Shards(urls, of=lambda _: "eu", upgrade=True) as shards:
        site = Site(shards, chromium)
        async with serving(site.asgi()) as site.url:
            await look_at(site, ["/", "/shard/eu/", "/shard/eu/jobs"])


async def look_at(site, addresses):
    findings = []
    async with site.page(axe=True) as page:
        for address in addresses:
            await page.goto(address)
            await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            for width, theme in LOOKS:
                await page.set_viewport_size({"width": width, "height": 800})
                await page.emulate_media(color_scheme=theme)
                if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    findings.append((address, width, "wider than the window"))
                passes, violations = await page.evaluate(_LOOK)
                assert passes >= 15, "axe looked at the page"
                findings += [(address, width, theme, one) for one in violations]
            assert await page.evaluate("window.reports") == [], address
    assert findings == []


async def test_pages_are_a_menu_where_it_is_narrow(site):
    """One line of header; opened by the keyboard, and without scripts."""
    async with site.page(java_script_enabled=False) as page:
        await page.set_viewport_size({"width": 320, "height": 700})
        await page.goto("/workers")
        assert (await page.locator("header").bounding_box())["height"] < 60
        menu = page.get_by_role("navigation", name="Pages")
        assert await menu.locator("summary").inner_text() == "Workers"
        assert not await menu.get_by_role("link", name="Dead").is_visible()
        await menu.locator("summary").focus()
        closed = await menu.locator("summary").bounding_box()
        await page.keyboard.press("Enter")
        assert await menu.locator("summary").bounding_box() == closed, "what was pressed stays where it is"
        links = await menu.get_by_role("link").all()
        assert len({(await link.bounding_box())["height"] for link in links}) == 1, "no name is broken"
        await menu.get_by_role("link", name="Dead").click()
        assert await page.locator("h1").inner_text() == "Dead"
        for address in ("/connections", "/workflows", "/schedules"):  # the longest names
            await page.goto(address)
            assert (await page.locator("header").bounding_box())["height"] < 60
        await page.goto("/workers")
        lags = await page.locator("[data-label='loop lag'] .s-warn").all_inner_texts()
        assert [text.split()[-2:] for text in lags] == [["1.4", "s"]] * 2
