"""What people are told: rules, words, which alerts stand for others, and the state of everything at a glance.

May use: all other rooms of the floor.

Begin with: `rules.py`.
"""
