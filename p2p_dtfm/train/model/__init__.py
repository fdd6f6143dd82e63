"""A GPT as layers that are held, moved and saved one by one, its optimizer and its files.

Imports `data` (where files lie) at most. Begin with `gpt` and `layer_state`.
"""
