"""What a placement problem is made of: layers, by what they take; links, by what they carry.

Plain integers, indexed by layer and by peer; begin with `link_tables`.
"""
