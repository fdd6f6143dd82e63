"""What this peer finds out about itself and others, for its record.

Begin with `own_place`.
"""
