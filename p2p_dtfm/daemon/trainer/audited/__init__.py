"""Audits of a step, between its work and its Prepared.

Begin with `audits`; `recomputing` does another's work again, `late_words` is said while that takes
long, `stopped_steps` is what was claimed in a view that ended before anybody had judged it.
Decisions 56, 72 and 75 say why; `core.audit` has the list.
"""
