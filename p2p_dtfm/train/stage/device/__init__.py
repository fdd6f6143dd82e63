"""What a device is, beside what layers take on it.

Begin with `facts`.
"""
