"""Which documents are worth learning: quality signals, rules about them, and duplicates.

`choosing` reads every document once and notes a verdict on each in a `work_file`; later readings
follow the verdicts. Only `data.prepare` may import from here.
"""
