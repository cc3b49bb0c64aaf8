"""A provider process for the tests: ``provider.py LOG``; its first line of output is its port.

``POST /push/{account}`` stores one thing per Idempotency-Key and logs every arrival: ``t`` (epoch seconds), account,
key, n, status and whether it was new. ``POST /control`` with ``{"down": account or "*", "seconds": s}`` makes an
account answer 503, with ``{"throttle": account, "answers": n}`` its next n answers 429 (Retry-After 1 s). With
``{"connect": account}`` an account has tokens from then on (`token_endpoint.py`; the answer holds the first pair), and
its requests are refused without a good one. It ends when its standard input closes, which it does when the test dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parent))
from token_endpoint import Accounts


class Memory:
    def __init__(self, log):
        self.log = Path(log).open("a")  # noqa: SIM115 - as long as the process
        self.stored, self.down, self.throttled = {}, {}, {}
        self.accounts = Accounts(f"{log}-tokens")

    async def push(self, request):
        account, key = request.path_params["account"], request.headers.get("idempotency-key")
        now, n, authorization = time.time(), (await request.json())["n"], request.headers.get("authorization")
        status, new = 200, False
        if self.accounts.refuses(account, authorization):
            status = 401
        elif now < max(self.down.get(account, 0), self.down.get("*", 0)):
            status = 503
        elif self.throttled.get(account):
            status = 429
            self.throttled[account] -= 1
        elif key not in self.stored or key is None:
            status, new, self.stored[key] = 201, True, n
        line = {"t": now, "account": account, "key": key, "n": n, "status": status, "new": new}
        if authorization:
            line["token"] = authorization.removeprefix("Bearer ")
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        headers = {"Retry-After": "1"} if status == 429 else None
        return JSONResponse({"n": self.stored.get(key)}, status_code=status, headers=headers)

    async def control(self, request):
        word = await request.json()
        if "connect" in word:
            return JSONResponse(self.accounts.connect(word["connect"]))
        if "throttle" in word:
            self.throttled[word["throttle"]] = word["answers"]
        else:
            self.down[word["down"]] = time.time() + word["seconds"]
        return JSONResponse({})


def main():
    memory = Memory(sys.argv[1])
    app = Starlette(
        routes=[
            Route("/push/{account}", memory.push, methods=["POST"]),
            Route("/token", memory.accounts.token, methods=["POST"]),
            Route("/control", memory.control, methods=["POST"]),
        ]
    )
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)  # noqa: T201
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))

    async def serve():
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), gone)
        await server.serve(sockets=[listening])

    def gone():
        if not os.read(sys.stdin.fileno(), 64):
            os._exit(0)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
