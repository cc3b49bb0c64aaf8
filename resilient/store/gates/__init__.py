"""Rows of resources: breaker, cooldown, pause, limits, and the run queue of resources (turns).

May use: `db`.

Begin with: `resources.py`; `circuits.py`: what requests came to; `limits.py`: draws; `turns.py`.
"""
