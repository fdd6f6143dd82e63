"""The agreement on a view, without a leader: what is gathered, what is promised, and the takeover.

The top of `core`: for `sim` and `daemon`. Begin with `agreement` and `docs/agreement.md`.
"""
