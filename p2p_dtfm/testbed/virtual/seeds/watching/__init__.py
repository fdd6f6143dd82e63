"""What is looked at while a seed is played.

waits        tasks that wait longer than they may
nudges       tasks that wait and were not woken
suspicions   peers that are held to be stuck
words        what nobody may log, and the last words of each
moments      what is said, at which faults begin
copies       whether what guardians wait for is on its way
hours        peers that take part outside of their hours
owed         whether a replica goes on with what it keeps to itself
kept_out     peers in no view while others are in one
crowd        newcomers that are not let in, spares that do not say why, and leavers that stay
together     whether all are in one view
wakers       what a peer that has just woken makes of its sleep
endings      daemons that end though nobody has told them to
"""
