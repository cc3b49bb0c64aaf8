"""`Resilient`: wiring and the public face.

May use: every room.

Begin with: `app.py`; `handler.py`: what a user declares.
"""
