"""Requests of jobs: admitted, sent, classified, reported; connections, redaction, hosts.

May use: core.

Begin with: `flow.py`: one call as steps; `call.py` and `client.py`: what handlers use;
`hooks.py`: what the engine does around each request; `request_log.py`: the requests of one execution.
"""
