"""Facts about an API, and how its answers are read.

May use: `base`, `gates`, `sync`, `events`.

Begin with: `facts.py`: `Provider`; `classify.py`: what an answer means.
"""
