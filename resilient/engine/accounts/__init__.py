"""`app.connections`, credentials for requests, refreshes, consent, the fuse.

May use: `ground`, `jobs`, `gates`, `alerts`.

Begin with: `grants.py`: a refresh; `access.py`: reading credentials; `connections.py`.
"""
