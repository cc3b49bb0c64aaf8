"""Every page in a real browser: nothing is blocked or fails, axe finds nothing, nothing sticks out, keys are enough."""

from __future__ import annotations

import pytest

from resilient.surface.web.dashboard import mount
from tests.surface.browser.conftest import shape

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


async def test_axe_finds_nothing_and_nothing_sticks_out(site):
    """Narrow and wide, light and dark; the policy blocks nothing, and the console is silent (`Site.page`)."""
    findings = []
    async with site.page(axe=True) as page:
        for address in await site.addresses():
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
