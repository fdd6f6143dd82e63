"""Getting the state of layers from those who hold them, while all go on training.

Begin with `follower`; `replaying` rolls what has come forward, `giving` says how long a donor is
waited for.
"""
