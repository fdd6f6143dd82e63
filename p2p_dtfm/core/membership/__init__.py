"""Who must answer, who may be in a view together, who waits to be let in and who leaves.

Begin with `eligibility`.
"""
