"""How a daemon comes to a run: it founds one, learns of one from those who train it, or takes up
the last one.

Begin with `run_joining`; `leads` follows the peers that answer, `own_disk` says what the disk has
without them, `measuring` what this machine can do in the run.
"""
