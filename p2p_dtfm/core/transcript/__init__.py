"""What a run leaves behind for those who were not there: who agreed on what, and who did how much.

`entries` is what is written, one line each; `checking` reads it with no trust in whoever wrote it;
`tallies` adds up what each peer did; `earlier` reads others' for steps that this peer has not seen,
and `joining` puts together what several members have kept.
"""
