"""Several devices of one machine: which they are, what each one's daemon is told, and all begun as
one. Begin with `several.py`; imported by `cli`."""
