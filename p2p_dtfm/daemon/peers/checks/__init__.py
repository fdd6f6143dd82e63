"""What the doctor looks at: `check` is one finding, `this_machine`, `kernel` and `ports` find some.

Used by `daemon.peers.doctor` alone.
"""
