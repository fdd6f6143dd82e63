"""What a device is and can do; what layers take on it is measured elsewhere.

Begin with `facts`.
"""
