"""A member that trains: the trainer with all that it works with, and what it asks of the daemon.

Begin with `participant`; `prepared_telling` says who hears of a step and when, `end_of_run` what is
said when all of them are done.
"""
