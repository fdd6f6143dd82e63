"""What changes a layer's parameters: AdamW, Muon, and the sums that they need, over flat buffers.

Imports `core` alone. Begin with `layer_update.LayerUpdate`.
"""
