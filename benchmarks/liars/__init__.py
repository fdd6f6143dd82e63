"""Experiments that would falsify the design against members that lie, made before the design is
built."""
