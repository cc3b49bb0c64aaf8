"""`app.enqueue`, `app.jobs`, `app.workflows`: writing jobs, also into a caller's transaction, and changing them.

May use: `ground`.

Begin with: `queue.py`, which enqueues; `api.py`; `workflows.py`.
"""
