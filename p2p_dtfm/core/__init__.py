"""Pure and deterministic: what peers agree on, and how. Events in, actions out.

No clock, chance, I/O, logging, torch or numpy; integers wherever bytes must be equal. Everything
else may import it. Its rooms, from the ground up; each imports only those below it:

protocol, gate          what is stored and signed; who may say what
messages, schedule      what is said; the order of a stage's tasklets, and who sums what
virtual, cost_model     virtual nanoseconds; how long a step of a placement takes
audit                   whose work is computed again, by whom, and what comes of it
planner, commit         from a snapshot to a plan; the step as a transaction
recovery                views, and what outlives one
liveness, membership    who holds others up; who may be in a view
transcript              what a run leaves behind, and how it is checked
consensus               the agreement on a view

Begin with `protocol.plan` and `protocol.snapshot`, then `consensus.agreement`.
"""
