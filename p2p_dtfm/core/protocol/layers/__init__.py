"""Layers that a run lists one by one, because they are of unlike kinds.

For `RunSpec` and `workload_of` (`listed`), and whoever asks how long a device takes for a layer
(`timings`). Begin with `listed`.
"""
