"""What this peer finds out of itself and others, for its record.

Begin with `own_place`.
"""
