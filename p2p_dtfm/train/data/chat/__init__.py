"""Conversations as training data: who says what, in a model's own form, and which tokens count.

Imports the rest of `data`. Begin with `prepare_chat`.
"""
