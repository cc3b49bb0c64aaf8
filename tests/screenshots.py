"""Pictures of the dashboard for the documentation, taken of the running demo: ``make screenshots``.

The demo runs as it always does. When its accounts are in trouble (one lost its access, another one is stopped, jobs are
dead), its database is copied, and pages of the copy are taken under a clock that stands still: all pictures are of one
moment. What differs from run to run and says nothing (hosts, process ids) is written over first.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from resilient import Resilient, web
from tests.serving import serving
from tests.surface import dashboards  # noqa: F401 - its pages have their charts
from tests.surface.browser.conftest import chromium_path

FOLDER = Path(__file__).parent.parent / "docs" / "images"
LARGEST = 150_000  # bytes
LIMIT = 180.0  # seconds for the demo to come into trouble
_TROUBLE = """
SELECT (SELECT count(*) FROM resilient_resource WHERE auth = 'needs_reauth')
 AND (SELECT count(*) FROM resilient_resource WHERE breaker = 'open' OR blocked_until > :now)
 AND (SELECT count(*) FROM resilient_job WHERE state = 'dead')
"""


def copy_of_trouble(folder):
    """A copy of the demo's database while its accounts are in trouble, and the time of it."""
    place, copy = folder / "demo", folder / "copy.db"
    place.mkdir()
    command = [
        sys.executable,
        "-m",
        "resilient.surface.cli",
        "demo",
        "--plain",
        "--database",
        f"sqlite:///{place}/demo.db",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as demo:
        try:
            until = time.monotonic() + LIMIT
            while time.monotonic() < until and demo.poll() is None:
                for path in place.glob("**/*.db"):
                    now = datetime.now(UTC)
                    if _is_in_trouble(path, now):
                        with sqlite3.connect(path) as source, sqlite3.connect(copy) as target:
                            source.backup(target)
                        return copy, now
                time.sleep(0.05)
        finally:
            demo.terminate()
    raise SystemExit("the demo ended without trouble: run it again")


def _is_in_trouble(path, now):
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            return bool(database.execute(_TROUBLE, {"now": f"{now:%Y-%m-%d %H:%M:%S.%f}"}).fetchone()[0])
    except sqlite3.OperationalError:  # its tables are being made
        return False


def without_names(copy):
    """The names of this machine and its processes are replaced."""
    with sqlite3.connect(copy) as database:
        workers = [row[0] for row in database.execute("SELECT id FROM resilient_worker ORDER BY started_at, id")]
        for n, name in enumerate(workers, 1):
            database.execute("UPDATE resilient_worker SET id = ?, host = 'shop' WHERE id = ?", (f"shop-{n}", name))
            database.execute("UPDATE resilient_job SET locked_by = ? WHERE locked_by = ?", (f"shop-{n}", name))


async def take(copy, now):
    """The pictures, each at most `LARGEST` bytes."""
    from playwright.async_api import async_playwright

    app = Resilient(f"sqlite:///{copy}", clock=lambda: now)
    asgi = web.dashboard(app, operator=lambda _request: web.Operator("ann", ["read", "payloads", "jobs", "resources"]))
    async with serving(asgi) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        dead = (await app.jobs.list(state="dead", limit=1))[0]
        revoked = next(one for one in await app.resources.list(gate="auth"))
        for name, address, width, height, theme in (
            ("now", "/", 1200, 760, "dark"),
            ("now-phone", "/", 360, 760, "light"),
            ("account", f"/account/{revoked.key}", 1200, 820, "light"),
            ("job", f"/jobs/{dead.id}", 1200, 820, "dark"),
            ("dead", "/dead", 1200, 420, "light"),
        ):
            size = {"width": width, "height": height}
            context = await browser.new_context(viewport=size, color_scheme=theme, timezone_id="UTC")
            page = await context.new_page()
            await page.goto(url + address)
            path = FOLDER / f"{name}.png"
            await page.screenshot(path=path, animations="disabled")
            assert path.stat().st_size < LARGEST, f"{path.name} is {path.stat().st_size:,} bytes"
            sys.stdout.write(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size:,} bytes\n")
            await context.close()
        await browser.close()
    await app.close()


def main():
    with tempfile.TemporaryDirectory() as folder:
        copy, now = copy_of_trouble(Path(folder))
        without_names(copy)
        FOLDER.mkdir(exist_ok=True)
        asyncio.run(take(copy, now))


if __name__ == "__main__":
    main()
