"""Ticks of recurring jobs and chores, and their accounts.

May use: `db`, `jobs`.

Begin with: `ticks.py`.
"""
