"""The gate of one worker: may this job start, may this request be sent, what came of it; `app.resources`.

May use: `ground`, `jobs`.

Begin with: `gate.py`; `drawing.py`: request limits; `api.py`.
"""
