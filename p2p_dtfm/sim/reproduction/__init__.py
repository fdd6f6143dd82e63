"""The paper's claims, computed anew: bars with their source, convergence, pictures, one page.

Imports the other rooms of `sim`; for `cli` and benchmarks. Begin with `page` and `bars`.
"""
