"""What is looked at while a seed is played.

waits        whoever waits longer than it may
nudges       whoever waits and was not woken
suspicions   who is held to be stuck
words        what nobody may log, and the last words of each
moments      what is said, at which faults begin
copies       whether what guardians wait for is on its way
hours        who takes part outside of its hours
owed         whether a replica goes on with what it keeps to itself
kept_out     who is in no view while others are
crowd        who of many is not let in, says not why it is spare, or does not go
together     whether all are in one view
wakers       who has just woken, and what it makes of that
endings      who ends though nobody has told it to
"""
