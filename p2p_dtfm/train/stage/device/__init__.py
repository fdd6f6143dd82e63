"""What a device is, beside what layers take on it.

For `stage.measure`. Begin with `facts`.
"""
