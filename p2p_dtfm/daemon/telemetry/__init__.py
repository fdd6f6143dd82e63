"""What is noted of a daemon's life, and said of it in words and figures.

Imports `peers` and `machine`. Begin with `status`.
"""
