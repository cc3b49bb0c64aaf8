"""The worker: a claimed job's way to its written end, and the services beside it.

May use: every room below it: all but `app`.

Begin with: `pipeline.py`, a job's way from top to bottom; `worker.py`, which wires; `executor.py`: slots.
"""
