"""Accounts at the provider: access tokens that end soon, refresh tokens that rotate, and a log of every exchange.

A refresh token of an account whose name begins with ``once`` is dead as soon as it was used; of any other, the one
before the last lives until its successor is used. What becomes of a token is decided when the request arrives; the
answer comes up to `HOLD` seconds later, whether anybody still waits for it or not. Lines of the log, each with ``t``
(epoch seconds), account and number ``n`` of the exchange: ``connected`` (with the first pair), ``asked`` (process,
refresh token, status, new access token) and ``answered``.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from urllib.parse import parse_qsl

from starlette.responses import JSONResponse

LIFETIME = 6.0  # seconds of an access token
USES = 3  # it ends with as many requests, too: that comes as often on a slow machine
HOLD = 0.4  # seconds
SINGLE_USE = "once"


class Accounts:
    """All of them."""

    def __init__(self, log):
        self.log = Path(log).open("a")  # noqa: SIM115 - as long as the process
        self.current, self.previous, self.access = {}, {}, {}
        self._numbers, self._dice = 0, random.Random(1)

    def refuses(self, account, header):
        """Whether a request of this account lacks a good token; what has never connected needs none."""
        if account not in self.current:
            return False
        token = self.access.get((header or "").removeprefix("Bearer "))
        if token is None or token["of"] != account or token["until"] < time.time() or not token["uses"]:
            return True
        token["uses"] -= 1
        return False

    def connect(self, account):
        """A person grants access (again)."""
        pair = self._pair(account)
        self.previous[account] = None
        self._note("connected", self._numbers, account)
        return pair

    async def token(self, request):
        token = dict(parse_qsl((await request.body()).decode()))["refresh_token"]
        account = token.split(".")[0]
        body, status = {"error": "invalid_grant"}, 400
        if token == self.current[account] or (token == self.previous[account] and not account.startswith(SINGLE_USE)):
            self.current[account] = token  # if it is the one before: its successor never arrived
            body, status = self._pair(account), 200
        self._numbers += 1
        n, process = self._numbers, int(request.headers["x-process"])
        access = body.get("access_token")
        self._note("asked", n, account, process=process, refresh_token=token, status=status, token=access)
        await asyncio.sleep(self._dice.uniform(0.02, HOLD))
        self._note("answered", n, account)
        return JSONResponse(body, status_code=status)

    def _pair(self, account):
        self._numbers += 1
        self.previous[account] = self.current.get(account)
        self.current[account], token = f"{account}.refresh.{self._numbers}", f"{account}.access.{self._numbers}"
        self.access[token] = {"of": account, "until": time.time() + LIFETIME, "uses": USES}
        return {"access_token": token, "refresh_token": self.current[account], "expires_in": LIFETIME}

    def _note(self, event, n, account, **more):
        line = {"t": time.time(), "event": event, "n": n, "account": account, **more}
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
