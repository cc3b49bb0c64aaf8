"""Events and webhooks as values: their form, their signatures, what people are shown of them.

May use: `base`, `jobs`.

Begin with: `message.py`: what goes out; `webhook.py`: what comes in.
"""
