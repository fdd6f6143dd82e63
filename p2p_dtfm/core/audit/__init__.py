"""Whose work of a step is computed again, by whom, and what comes of it.

Begin with `work`: what is compared; then `draw` and `claim_book`.
"""
