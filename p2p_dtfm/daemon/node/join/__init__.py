"""How a daemon comes to a run: it founds one, learns of one from those who train it, or takes up
the last one.

Begin with `run_joining`; `leads` follows who answers, `own_disk` is what one has without anybody,
`measuring` what this machine can do in the run.
"""
