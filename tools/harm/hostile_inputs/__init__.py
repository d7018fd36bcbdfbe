"""Small inputs that try to take the machine, to lie, or to reach what is not theirs.

Each module declares cases of one kind. A case is a whole material with one change.
"""
