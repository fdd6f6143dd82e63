"""Who may say what, how often and how large: asked before anything that arrives is handled.

For `net` and the daemon; imports nothing of ours. Begin with `gate_table`.
"""
