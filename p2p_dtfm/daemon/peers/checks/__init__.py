"""What the doctor looks at: `check` is one finding, `this_machine` and `ports` find some each.

Used by `daemon.peers.doctor` alone.
"""
