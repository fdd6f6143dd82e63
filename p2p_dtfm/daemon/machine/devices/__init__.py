"""Several devices of one machine: which they are, what each one's daemon is told, and how all are
begun as one. Begin with `several.py`; imported by `cli`."""
