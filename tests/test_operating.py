"""docs/operating.md: its programs run, its tables name everything there is."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import certifi

from resilient import Alerting, Notice, Schedule
from resilient.core.alerts.rules import NAMES, Finding
from resilient.core.inspect.retention import SPANS

TEXT = (Path(__file__).parent.parent / "docs" / "operating.md").read_text()


def section(title):
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_its_programs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(certifi.where(), "ours.pem")
    program = {"__name__": "operating"}
    for block in blocks("python"):
        exec(compile(block, "docs/operating.md", "exec"), program)  # noqa: S102 - our own text
        program["app"].ready_sync()
        program["app"].database.close_sync()


def test_the_webhooks_document_has_its_shape():
    (block,) = blocks("json")
    shown = json.loads(block)
    assert set(shown) == {"text", *(f.name for f in fields(Notice) if f.name != "text")}
    finding = Finding("dead", "issues.sync", {}, ("permanent", "http_422"))
    assert len(shown["alert"]["fingerprint"]) == len(finding.fingerprint)


def test_every_alert_is_there():
    assert set(re.findall(r"^\| `(\w+)` \|", section("Alerts"), re.MULTILINE)) == NAMES


def test_every_setting_is_there():
    for settings, title in ((SPANS, "Retention"), ([f.name for f in fields(Alerting)], "Alerts")):
        assert {name for name in settings if name not in section(title)} == set()
    options = {f.name for f in fields(Schedule)} - {"handler", "payload", "ticks", "resource_key"}
    assert {name for name in options if f"`{name}`" not in section("Recurring jobs")} == set()
