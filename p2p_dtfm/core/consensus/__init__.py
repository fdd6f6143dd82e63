"""The agreement on a view, without a leader: what is gathered, what is promised, and the takeover.

The top of `core`. Begin with `agreement` and `docs/agreement.md`; `table` says what each message
comes to, `agreement_state` what a peer holds. `attempts` is one try at a view, `views` are those
that are known, `parts` the machines; `overlay` says whom a peer tells in a large swarm.
"""
