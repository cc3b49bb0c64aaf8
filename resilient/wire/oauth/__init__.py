"""Requests to token endpoints, consent addresses, signed assertions.

May use: core, `requests`.

Begin with: `endpoints.py`.
"""
