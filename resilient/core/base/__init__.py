"""Words that all rooms share: instants, errors, resource keys, requests and answers as values, text made safe.

May use: Nothing of the project.

Begin with: `errors.py`, `resource_key.py`, `exchange.py`.
"""
