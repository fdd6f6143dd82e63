"""The step as a transaction: all Prepared that fit one another commit it, alike for all.

Begin with `step` and `ledger`.
"""
