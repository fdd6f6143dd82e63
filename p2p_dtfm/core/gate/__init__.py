"""Decides who may say what, how often and how large: asked before anything that arrives is handled.

Imports `units` alone. Begin with `gate_table`.
"""
