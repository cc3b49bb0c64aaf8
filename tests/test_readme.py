"""The README cannot rot: its code runs, its diagram is the state table, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import resilient
from resilient import testing
from resilient.core.jobs.states import mermaid

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


async def test_the_ten_lines_push_a_contact(tmp_path):
    source = BLOCKS[0].replace("sqlite:///app.db", f"sqlite:///{tmp_path}/app.db")
    names = {"__name__": "readme"}
    exec(compile(source, "README.md", "exec"), names)  # noqa: S102 - that is the test
    app, push, contact = names["app"], names["push"], names["Contact"](name="Ada", email="ada@example.com")
    done = await app.enqueue(push, contact, resource_key="crm/acct-7")
    assert (await app.jobs.get(done.id)).state == "ready"
    sent = []

    def answer(request):
        sent.append((request.method, request.url.path, request.content))
        return httpx.Response(200)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="https://api.crm.example")
    await push(testing.job(contact, client=client))
    assert sent == [("POST", "/contacts", b'{"name":"Ada","email":"ada@example.com"}')]
    await app.close()


def test_the_diagram_is_the_table_of_states():
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", README, re.DOTALL)
    assert diagram.strip() == mermaid()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_it_fits_on_a_few_screens():
    assert README.count("\n") < 300


def test_every_public_name_exists_and_is_documented():
    for name in resilient.__all__:
        assert getattr(resilient, name).__doc__, name
