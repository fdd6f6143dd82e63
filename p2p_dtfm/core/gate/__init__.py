"""Who may say what, how often and how large: asked before anything that arrives is handled.

For `net` and the daemon; imports `units` alone. Begin with `gate_table`.
"""
