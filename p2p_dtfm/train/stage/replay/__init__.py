"""A stage's work once more, bit for bit: for audits.

Begin with `work`.
"""
