"""Adapters over a frozen model, and the frozen model's files. Begin with `adapted`."""
