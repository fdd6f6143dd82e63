"""What peers say to one another while they agree on views and commit steps, signed and bounded.

For all rooms above it and for the daemon; imports `protocol`. Begin with `agreement_messages`.
"""
