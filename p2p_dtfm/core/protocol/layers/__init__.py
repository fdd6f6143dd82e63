"""Layers that a run lists one by one, since they are of unlike kinds.

Begin with `listed`; `timings` says how long a device takes for a layer.
"""
