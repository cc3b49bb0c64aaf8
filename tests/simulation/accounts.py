"""The simulated token endpoint: refresh tokens rotate, and the old one lives until the new one is used."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl

LIFETIME = 1.5  # seconds


class Accounts:
    """One account, its tokens, and what was asked for them."""

    def __init__(self, time):
        self._time, self._numbers = time, 0
        self.tokens = {}  # token -> until
        self.current, self.previous = "refresh-0", None
        self.refreshes, self.refused, self.open, self.most_open = 0, 0, 0, 0

    def is_good(self, header):
        """Whether a request's token may be used."""
        return self.tokens.get(header.removeprefix("Bearer "), 0.0) > self._time()

    def made(self):
        """A new pair of tokens."""
        self._numbers += 1
        self.previous, self.current = self.current, f"refresh-{self._numbers}"
        token = f"token-{self._numbers}"
        self.tokens[token] = self._time() + LIFETIME
        return {"access_token": token, "refresh_token": self.current, "expires_in": LIFETIME, "token_type": "bearer"}

    def answer(self, body):
        """(status, body) of the token endpoint."""
        given = dict(parse_qsl(body.decode()))["refresh_token"]
        if given not in (self.current, self.previous):
            self.refused += 1
            return 400, json.dumps({"error": "invalid_grant"}).encode()
        if given == self.previous:  # its successor never arrived: replayed
            self.current = self.previous
        self.refreshes += 1
        return 200, json.dumps(self.made()).encode()
