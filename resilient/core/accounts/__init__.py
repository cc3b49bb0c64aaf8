"""Tokens: when they are refreshed, what a token endpoint's answer means, when many deaths are doubted.

May use: `base`, `provider`.

Begin with: `tokens.py`.
"""
