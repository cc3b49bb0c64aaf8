"""`resilient doctor`, and pruning.

May use: `ground`.

Begin with: `doctor.py`; `retention.py`.
"""
