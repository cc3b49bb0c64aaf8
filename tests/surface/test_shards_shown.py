"""What people and Prometheus see of a program with several shards."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client import generate_latest

from resilient import Job, Provider, SetupError, Shards, handler, web
from resilient.surface.metrics import registry
from resilient.surface.probes import Probes
from tests.helpers import until
from tests.surface.dashboards import OURS, browser


@handler("push")
async def push(job: Job[None]) -> None: ...


def region(account):
    return "us" if account.split("/")[-1].startswith("u") else "eu"


@pytest.fixture
async def shards(empty_urls):
    urls = {"eu": empty_urls(), "us": empty_urls()}
    async with Shards(urls, of=region, handlers=[push], providers=[Provider(name="crm")], upgrade=True) as made:
        yield made


async def test_the_first_page_looks_at_all_shards_and_leads_to_the_pages_of_each(shards):
    job = await shards.enqueue(push, resource_key="crm/u1")
    ann = browser(shards)
    first = await ann.get("/")
    assert [one for one in first.links if "/shard/" in one] == ["/shard/eu/", "/shard/us/"] * 2
    assert "Nothing is stopped; no worker runs." in first.text
    us = await ann.get("/shard/us/jobs")
    assert f"/shard/us/jobs/{job.id}" in us.links
    assert {"/", "/shard/eu/", "/shard/us/"} <= {*us.links}
    assert ("a", {"href": "/shard/us/", "aria-current": "true"}) in us.tags
    page = await ann.get(f"/shard/us/jobs/{job.id}")
    done = await ann.submit(page.form("/do/job", "cancel"), "cancel")
    assert "cancelled" in done.text
    assert (await shards["us"].jobs.get(job.id)).state == "cancelled"
    await ann.get(f"/shard/eu/jobs/{job.id}", status=404)
    await ann.get("/shard/asia/", status=404)
    await ann.get("/jobs", status=404)


async def test_a_form_of_one_shard_is_none_of_another(shards):
    """Also where all have one secret, as the processes of a deployment do."""
    job = await shards.enqueue(push, resource_key="crm/u1")
    ann = browser(shards, secret="a secret of 32 characters or more")
    forms = [(await ann.get(f"/shard/{name}/jobs?state=ready")).forms for name in ("eu", "us")]
    tokens = [value for form in forms[1] for name, value in form.fields if name == "token"][:1]
    page = await ann.get("/shard/eu/accounts")
    tokens += [value for form in page.forms for name, value in form.fields if name == "token"][:1]
    statuses = []
    for token in reversed(tokens):
        form = {"id": str(job.id), "verb": "cancel", "token": token}
        statuses.append((await ann.client.post("/shard/us/do/job", data=form, headers=OURS)).status_code)
    assert statuses == [403, 303]
    note = (await ann.client.post("/shard/us/do/job", data=form, headers=OURS)).headers["location"].partition("?")[2]
    assert [
        any(attrs.get("class", "").startswith("note") for _, attrs in (await ann.get(f"/shard/{name}/?{note}")).tags)
        for name in ("us", "eu")
    ] == [True, False], "nor are the words that a page shows afterwards"


async def test_a_form_of_one_shard_takes_no_job_for_an_account_of_another(shards):
    ann = browser(shards)
    form = (await ann.get("/shard/eu/enqueue?kind=push&resource=crm/u1")).form("/do/enqueue")
    answer = await ann.client.post(form.action, data=dict(form.fields), headers=OURS)
    assert (answer.status_code, "crm/u1 lives in shard &#39;us&#39;" in answer.text) == (422, True), answer.text
    assert [await shards[name].jobs.count() for name in shards] == [0, 0]


async def test_the_first_page_asks_who_looks(shards):
    for stranger, status in ((browser(shards, rights=None), 401), (browser(shards, rights=["jobs"]), 403)):
        for address in ("/", "/shard/eu/"):
            page = await stranger.get(address, status)
            assert "no worker runs" not in page.text


async def test_a_shard_whose_database_is_away_is_told_beside_the_others(tmp_path):
    urls = {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/nowhere/2.db"}
    async with Shards(urls, of=region, handlers=[push], upgrade=True) as shards:
        ann = browser(shards)
        first = (await ann.get("/")).text
        assert "us ✕ cannot be read its database does not answer" in first
        assert "eu ! not well Nothing is stopped; no worker runs." in first
        away = await ann.get("/shard/us/", 503)
        assert {"/", "/shard/eu/"} <= {*away.links}
        text = generate_latest(registry(shards)).decode()
        assert 'resilient_database_up{shard="eu"} 1.0' in text
        assert 'resilient_database_up{shard="us"} 0.0' in text


async def test_a_name_that_an_address_would_change_is_refused(tmp_path):
    urls = {"e/u": f"sqlite:///{tmp_path}/1.db"}
    async with Shards(urls, of=lambda _: "e/u", handlers=[push]) as shards:
        with pytest.raises(SetupError, match="'e/u' cannot be part of an address"):
            web.dashboard(shards, operator=lambda _: None)


async def test_every_series_says_its_shard(shards):
    await shards.enqueue(push, resource_key="crm/u1")
    await shards.worker().drain()
    for name in shards:
        await shards.enqueue(push, resource_key=f"crm/{name[0]}2")
    text = generate_latest(registry(shards)).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if 'shard="eu"' not in line and 'shard="us"' not in line] == []
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len({*heads}), "a family begins once, as Prometheus wants it"
    assert 'resilient_jobs_enqueued_total{kind="push",shard="us"} 2.0' in lines
    assert 'resilient_jobs_enqueued_total{kind="push",shard="eu"} 1.0' in lines
    assert 'resilient_jobs{kind="push",provider="crm",shard="eu",state="ready"} 1.0' in lines


async def test_a_worker_of_several_is_ready_while_one_is_served(tmp_path):
    urls = {"eu": f"sqlite:///{tmp_path}/1.db", "us": f"sqlite:///{tmp_path}/nowhere/2.db"}
    async with Shards(urls, of=region, handlers=[push], upgrade=True) as shards:
        workers = shards.worker(concurrency=3)
        probes = Probes(shards, {name: (shards[name], one) for name, one in workers.workers.items()})
        (server,) = probes.open(metrics="0", health="0")
        try:
            text = probes.readyz().text.decode()
            assert {"eu database does not answer", "us database does not answer"} <= {*text.splitlines()}
            running = asyncio.create_task(workers.run(signals=False))
            await until(lambda: probes.readyz().status == 200)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.address[1]}") as client:
                assert 'resilient_worker_slots{shard="eu"} 3.0' in (await client.get("/metrics")).text
            workers.stop()
            assert {"eu worker is draining", "us worker is draining"} <= {*probes.readyz().text.decode().splitlines()}
            await running
        finally:
            await asyncio.to_thread(probes.close)
