"""A dashboard under test: a browser without scripts, which keeps cookies, reads pages and sends their forms."""

from __future__ import annotations

import html.parser
import re
from dataclasses import dataclass, field

import httpx

from resilient import web
from resilient.surface.web.dashboard import charts, mount

charts.WAIT = 60.0  # a page of a test has its charts, however long the machine stands still
mount.DOUBLE = 0.0  # a test is quicker than a hand, and means what it sends twice
ORIGIN = "http://ops.test"
ALL = ("read", "payloads", "jobs", "resources", "connections")
OURS = {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}
_VOID = {"meta", "link", "input", "br", "wbr", "img"}


@dataclass
class Form:
    action: str
    method: str
    fields: list = field(default_factory=list)  # (name, value)
    buttons: list = field(default_factory=list)  # (name, value)


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: tags with their attributes, text, forms."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.words, self.forms, self.links, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.words.append("" if tag == "wbr" else " ")
        if tag not in _VOID and tag not in ("tr", "td", "th", "li", "dt", "dd", "option", "rect", "path"):
            self._open.append(tag)
        if tag == "form":
            self.forms.append(Form(attrs.get("action", ""), attrs.get("method", "get")))
        if tag == "a":
            self.links.append(attrs["href"])
        if self.forms and tag in ("input", "button", "select", "textarea") and attrs.get("name"):
            pair = (attrs["name"], attrs.get("value", ""))
            checkbox = attrs.get("type") == "checkbox"
            (self.forms[-1].buttons if tag == "button" else [] if checkbox else self.forms[-1].fields).append(pair)
        if self.forms and tag == "option" and "selected" in attrs:
            name = self.forms[-1].fields[-1][0]
            self.forms[-1].fields[-1] = (name, attrs.get("value", ""))

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data):
        self.words.append(data)

    def form(self, action, button=None):
        """The form with that action (and button)."""
        for one in self.forms:
            if one.action.endswith(action) and (button is None or button in [value for _, value in one.buttons]):
                return one
        raise AssertionError(f"no form {action} {button}: {[(f.action, f.buttons) for f in self.forms]}")


class Browser:
    """Somebody at the dashboard, without JavaScript."""

    def __init__(self, client):
        self.client = client

    async def get(self, address, status=200):
        answer = await self.client.get(address)
        assert answer.status_code == status, (address, answer.status_code, Page(answer.text).text)
        return Page(answer.text)

    async def submit(self, form, button=None, **values):
        """Send a form as a browser does, and go where it leads; the page."""
        fields = dict(form.fields) | {name: value for name, value in form.buttons if value == button} | values
        answer = await self.client.request(
            form.method.upper(), form.action, data=fields, headers=OURS, follow_redirects=True
        )
        assert answer.status_code == 200, Page(answer.text).text
        return Page(answer.text)


def browser(app, *, rights=ALL, name="ann", **options):
    """A browser whose person is an operator with these rights; None: a stranger."""
    who = None if rights is None else web.Operator(name, rights)
    asgi = web.dashboard(app, operator=lambda _request: who, **options)
    return Browser(client_of(asgi))


def client_of(asgi, origin=ORIGIN):
    transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=origin)
