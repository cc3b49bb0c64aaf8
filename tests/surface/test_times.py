"""Times and lengths as the command line prints them: to the second, whatever the database keeps."""

import asyncio
import re
import sys
import textwrap
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Job, Limit, Resilient, ResourceStopped, Retry, Snooze, Throttled, Transient, handler
from resilient.core.inspect.why import Reason, Why
from resilient.core.jobs.records import Count
from resilient.surface.cli import main
from resilient.surface.cli.output import Output, show_why

ODD = timedelta(seconds=3700.123457)
LONG = re.compile(r"\d:\d\d[.,]\d|\d\.\d{4}|\d{4}-\d\d-\d\dT")  # parts of a second, too many digits, what programs read
PROGRAM = """
    from tests.surface.test_times import build
    app = build({url!r})
"""


@handler("odd", retry=Retry(max_attempts=4))
async def odd(job: Job[str]) -> None:
    """Ends as its payload says."""
    now = job.app.database.dialect.clock()
    match job.payload:
        case "throttled":
            raise Throttled(now + ODD)
        case "stopped":
            raise ResourceStopped("q/other", "cooldown", now + ODD)
        case "transient":
            raise Transient("try later", retry_after=ODD.total_seconds())
        case "snooze":
            raise Snooze(ODD)


def build(url, **options):
    return Resilient(url, handlers=[odd], limits={"p/*": [Limit(2_500_000, per="1d")]}, **options)


async def waiting(url, clock):
    """Jobs that wait until odd moments, by resource."""
    clock.advance(0.654321)
    words, late = ["throttled", "stopped", "transient", "snooze"], clock.now() + timedelta(seconds=60.5)
    async with build(url, clock=clock.now) as app:
        jobs = {word: (await app.enqueue(odd, word, resource_key=f"p/{word}")).id for word in words}
        jobs["late"] = (await app.enqueue(odd, "transient", resource_key="p/late", expires_at=late)).id
        await app.resources.pause("p/paused", until=ODD)
        await app.worker().drain()
    return jobs


@pytest.fixture
def shop(database_url, clock, tmp_path, monkeypatch):
    """A program, and its jobs."""
    jobs = asyncio.run(waiting(database_url, clock))
    (tmp_path / "odd_shop.py").write_text(textwrap.dedent(PROGRAM).format(url=database_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RESILIENT_APP", "odd_shop:app")
    return jobs


def test_times_are_told_to_the_second(shop, capsys):
    looks = [["status"], ["jobs", "list"], ["dead", "list"], ["resources", "list"], ["resources", "show", "p/paused"]]
    for word, id_ in shop.items():
        looks += [["jobs", "show", str(id_)], ["jobs", "why", str(id_)], ["resources", "show", f"p/{word}"]]
    printed = {}
    for look in looks:
        assert main(look) in (0, 1), look
        sys.modules.pop("odd_shop")  # one process runs one command
        printed[" ".join(look)] = capsys.readouterr().out
    assert {look: times for look, out in printed.items() if (times := LONG.findall(out))} == {}
    shown = printed[f"jobs show {shop['stopped']}"]
    assert "is stopped by its cooldown until 2030-01-01 13:01:40 UTC" in shown
    assert "expires at 2030-01-01 12:01:01 UTC" in printed[f"jobs show {shop['late']}"]
    assert "2,500,000 requests per 1 d" in printed["resources show p/paused"]


@pytest.mark.parametrize("alive", [True, False])
def test_the_end_of_what_stops_it_is_told_if_a_worker_is_there_to_go_on(alive, capsys):
    now = datetime(2030, 1, 1, 12, tzinfo=UTC)
    reasons = [Reason("cooldown", "It rests.", until=now + timedelta(minutes=5)), Reason("waiting", "1 job waits.")]
    reasons += [] if alive else [Reason("no_worker", "No worker is running.")]
    show_why(Output(), Why("p/a", "stopped", now + timedelta(minutes=5), Count(1), tuple(reasons)), now)
    assert ("Nothing known stops it after 12:05:00 UTC (in 5 min)." in capsys.readouterr().out) is alive
