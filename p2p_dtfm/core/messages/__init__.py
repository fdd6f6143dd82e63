"""What peers say to one another while they agree on views and commit steps, signed and bounded.

Imports `protocol`. Begin with `agreement_messages`.
"""
