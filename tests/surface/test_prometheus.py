"""The alert rules and the Grafana dashboard in docs, held against scrapes of real runs by Prometheus's own tool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from resilient import DatabaseUnreachable, Event, Job, Limit, Permanent, Resilient, Shards, handler
from resilient.store.inspect import workers
from resilient.surface.metrics import MEANINGS, registry
from tests.helpers import drain

DOCS = Path(__file__).parents[2] / "docs"
RULES, GRAFANA = DOCS / "prometheus-rules.yml", DOCS / "grafana.json"
OF_ILLNESS = {
    "ResilientNoWorkers", "ResilientWorkStandsStill", "ResilientAccountsStopped", "ResilientProviderDown",
    "ResilientJobsDie", "ResilientWorkersVanish", "ResilientLoopBlocked", "ResilientOutboxLags",
    "ResilientWebhooksRefused", "ResilientDatabaseSlow",
}  # fmt: skip


@handler("push")
async def push(job: Job[str]) -> None:
    if job.payload == "wrong":
        raise Permanent("no such contact")


class Told(Event, type="told"):
    pass


async def send(message):
    pass


@pytest.fixture
def promtool():
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is missing: apt install prometheus")

    def run(*arguments, text=None):
        done = subprocess.run([path, *arguments], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], limits={"crm/*": [Limit(1000, per=1)]}, destinations={"shop": send})
    await app.ready()
    yield app
    await app.close()


@pytest.fixture
def check(promtool, tmp_path):
    """``check(text, alerts)``: see `fires`."""
    return lambda text, alerts: fires(text, promtool, tmp_path, {(name, "") for name in alerts})


def fires(text, promtool, folder, alerts):
    """These alerts fire, each with its shard ("": none), if a process is scraped like this for half an hour."""
    labels = [f'{{alertname="{name}"' + (f', shard="{shard}"}}' if shard else "}") for name, shard in sorted(alerts)]
    file = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": list(series_of(text)), "promql_expr_test": [{
            "expr": 'group by (alertname, shard) (ALERTS{alertstate="firing"})',
            "eval_time": "30m",
            "exp_samples": [{"labels": one, "value": 1} for one in labels],
        }]}],
    }  # fmt: skip
    (folder / "test.yml").write_text(json.dumps(file))
    promtool("test", "rules", str(folder / "test.yml"))


def series_of(text):
    """Gauges stay as they are scraped; counters grow by as much again each minute."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in {**sample.labels, "instance": "here"}.items())
            values = f"0+{sample.value}x40" if family.type in ("counter", "histogram") else f"{sample.value}+0x40"
            yield {"series": f"{sample.name}{{{labels}}}", "values": values}


def scraped(app):
    return generate_latest(registry(app)).decode()


def works(c, d):
    workers.beat(c, d, workers.Beat("w", "host", 1, ["push"], 4, 0, "1", stopping=False), d.now(c))


def grow_old(c, d):
    before = d.now(c) - timedelta(hours=1)
    d.run(c, "UPDATE {job} SET run_at = :old_at, created_at = :old_at WHERE state = 'ready'", {"old_at": before})
    d.run(
        c,
        "UPDATE {resource} SET auth = 'needs_reauth', auth_since = :old_at WHERE key IN ('crm/3', 'crm/us3')",
        {"old_at": before},
    )


async def test_the_format_and_the_rules_are_prometheuss(app, promtool):
    await app.enqueue(push, "ok", resource_key="crm/1")
    await drain(app)
    promtool("check", "metrics", text=scraped(app))
    promtool("check", "rules", str(RULES))


async def test_nothing_fires_where_all_is_well(app, check):
    for n in range(20):
        await app.enqueue(push, "ok", resource_key=f"crm/{n % 5}")
    await drain(app)
    await app.database.transaction(works)
    check(scraped(app), set())


async def test_what_is_ill_fires(app, check):
    """Half of the jobs die, accounts stand still, a worker vanished, another's loop is blocked, nobody works ...

    ... two of three webhooks are refused, and claims take two seconds.
    """
    for n in range(20):
        await app.enqueue(push, "wrong" if n % 2 else "ok", resource_key=f"crm/{n % 5}")
    await drain(app)
    await app.resources.open("crm/2", reason="down")
    await app.enqueue(push, "ok", resource_key="crm/1")
    await app.enqueue(push, "ok", resource_key="crm/2")
    await app.database.transaction(lambda c, _: app.outbox.publish(c, Told(), to=["shop"]))
    await app.database.transaction(grow_old)
    counts = app.ground.counts
    counts.rescued("push", "crm/1", "rescued", "lost_worker")
    for answer in ("stored", "refused", "refused"):
        counts.webhook("crm", answer)
    for _ in range(100):
        counts.transaction("claim", 2.0)
    blocked = app.worker()
    blocked.heartbeat._alive_at = blocked.link.monotonic() - 20
    app.ground.workers.add(blocked)
    check(scraped(app), OF_ILLNESS)


async def test_a_shard_that_is_ill_fires_beside_one_that_is_well(empty_urls, promtool, tmp_path):
    """One shard's health hides nothing of the other's: no worker there, accounts stand still, half of jobs die."""
    urls = {"eu": empty_urls(), "us": empty_urls()}
    limits = {"crm/*": [Limit(1000, per=1)]}
    async with Shards(urls, of=lambda key: key[4:6], handlers=[push], limits=limits, upgrade=True) as shards:
        for n in range(20):
            await shards["eu"].enqueue(push, "ok", resource_key=f"crm/eu{n % 5}")
            await shards["us"].enqueue(push, "wrong" if n % 2 else "ok", resource_key=f"crm/us{n % 5}")
        for name in shards:
            await drain(shards[name])
        await shards["eu"].database.transaction(works)
        await shards["us"].enqueue(push, "ok", resource_key="crm/us1")
        await shards["us"].resources.open("crm/us2", reason="down")
        await shards["us"].enqueue(push, "ok", resource_key="crm/us2")
        await shards["us"].database.transaction(grow_old)
        text = scraped(shards)
    fires(text, promtool, tmp_path, {
        ("ResilientNoWorkers", "us"), ("ResilientWorkStandsStill", "us"), ("ResilientAccountsStopped", "us"),
        ("ResilientProviderDown", "us"), ("ResilientJobsDie", "us"),
    })  # fmt: skip


async def test_one_shards_database_that_is_away_fires(tmp_path, promtool):
    urls = {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/nowhere/2.db"}
    async with Shards(urls, of=lambda _: "eu", handlers=[push], upgrade=True) as shards:
        await shards["eu"].ready()
        await shards["eu"].database.transaction(works)
        text = scraped(shards)
    fires(text, promtool, tmp_path, {("ResilientDatabaseAway", "us")})


async def test_a_database_that_is_away_fires(app, check, monkeypatch):
    def away(*_):
        raise DatabaseUnreachable("gone")

    monkeypatch.setattr(app.database, "transaction_sync", away)
    check(scraped(app), {"ResilientDatabaseAway"})


async def test_gauges_that_nobody_shows_fire(app, check):
    scraped(app)  # by a process that is not among the targets
    check(scraped(app), {"ResilientNobodyExports"})


def test_every_rule_is_tried():
    names = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert names == OF_ILLNESS | {"ResilientDatabaseAway", "ResilientNobodyExports"}


def test_dashboard_and_rules_name_only_metrics_that_there_are():
    known = {*MEANINGS} | {f"{name}{end}" for name in MEANINGS for end in ("_total", "_bucket")}
    for text in (RULES.read_text(), GRAFANA.read_text()):
        named = set(re.findall(r"\bresilient_[a-z_]+", re.sub(r"resilient_[a-z]+\.", "", text)))
        assert named, "it shows something"
        assert named <= known


def test_the_dashboard_shows_most_metrics():
    panels = json.loads(GRAFANA.read_text())["panels"]
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    unshown = {name for name in MEANINGS if name not in text}
    assert unshown == {
        "resilient_jobs_enqueued", "resilient_database_up", "resilient_exporter", "resilient_build_info",
        "resilient_jobs_cut_off", "resilient_connections", "resilient_outbox_oldest_age_seconds",
        "resilient_schedule_last_success_timestamp_seconds",
    }  # fmt: skip
