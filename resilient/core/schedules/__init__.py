"""When recurring jobs tick.

May use: `base`, `jobs`.

Begin with: `schedule.py`; `cron.py`.
"""
