"""What every feature stands on: `Ground`, kinds, payloads to rows, transactions in four ways.

May use: core, store and wire; no other room.

Begin with: `ground.py`; `kinds.py`: `Kind` and `Handler`; `encoder.py`: from arguments to rows.
"""
