"""The step as a transaction: all Prepared that fit one another commit it, alike for all.

For `recovery`, `consensus` and the daemon. Begin with `step` and `ledger`.
"""
