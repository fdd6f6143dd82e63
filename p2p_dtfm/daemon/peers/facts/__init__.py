"""What this peer finds out of itself and others, for its record.

For `peers.self_record` and whoever asks for a figure. Begin with `own_place`.
"""
