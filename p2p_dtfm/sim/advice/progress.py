"""How far a search is, for whoever waits for it."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told how many plans are made, and how many there may be."""
