"""The paper's claims, computed anew: bars with their source, convergence, pictures, one page.

Imports the other rooms of `sim`. Begin with `page` and `bars`.
"""
