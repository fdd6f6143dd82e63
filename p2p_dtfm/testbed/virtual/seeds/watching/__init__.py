"""What is looked at while a seed is played.

waits        whoever waits longer than it may
nudges       whoever waits and was not woken
suspicions   who is held to be stuck
words        what nobody may log, and the last words of each
moments      what is said, at which faults begin
kept_out     who is in no view while others are
together     whether all are in one view
wakers       who has just woken, and what it makes of that
endings      who ends though nobody has told it to
"""
