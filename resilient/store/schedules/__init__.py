"""Ticks of recurring jobs and chores, their accounts, and the programs that declare them.

May use: `db`, `jobs`.

Begin with: `ticks.py`; `programs.py`: who declares what; `earlier.py`: jobs that overlap the next one.
"""
