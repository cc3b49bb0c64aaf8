"""docs/accounts.md: its programs run, and its tables name everything there is."""

import re
from pathlib import Path

import httpx

from resilient import GrantState
from tests.serving import production

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "accounts.md").read_text()


async def test_its_programs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = {"__name__": "accounts"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/accounts.md", "exec"), program)  # noqa: S102 - our own text
    async with production(program["server"]) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/connect/github/start")).status_code == 401
        sent = await client.get("/connect/github/start", headers={"Cookie": "user=ann"})
        assert sent.headers["location"].startswith("https://github.com/login/oauth/authorize?")
        assert (await client.post("/webhooks/github", content=b"{}")).status_code == 401
        assert program["hook"]({}, b"{}", "https://shop.example/webhooks/github")[1] == 401


def test_every_state_and_kind_is_there():
    operating = (DOCS / "operating.md").read_text()
    assert {state for state in GrantState if f"`{state.value}`" not in operating} == set()
