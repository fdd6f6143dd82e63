"""Whose work of a step is computed again, by whom, and what comes of it.

For `commit` and the daemon. Begin with `work`: what is compared; then `draw` and `claim_book`.
"""
