"""The local API of one daemon."""
