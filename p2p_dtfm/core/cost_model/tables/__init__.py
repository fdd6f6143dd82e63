"""The tables of a placement problem: what layers take, and what links carry.

Plain integers, indexed by layer and by peer; begin with `link_tables`.
"""
