"""Destinations of the outbox and of alerts: one module a broker; none is imported before it is needed.

May use: core, `requests`.

Begin with: `base.py`.
"""
