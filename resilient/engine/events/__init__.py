"""`app.outbox`, `app.inbox`, inbound webhooks, open connections to brokers. Events are sent by `run/relay.py`.

May use: `ground`, `jobs`.

Begin with: `outbox.py`; `webhooks.py`; `inbox.py`.
"""
