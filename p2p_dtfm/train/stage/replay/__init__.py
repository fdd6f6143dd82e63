"""A stage's work once more, bit for bit: for audits.

For the daemon. Begin with `work`.
"""
