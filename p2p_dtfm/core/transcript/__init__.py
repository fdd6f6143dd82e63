"""What a run leaves behind for those who were not there: who agreed on what, and who did how much.

`entries` has the lines that are written. `checking` reads them with no trust in their writer.
`tallies` adds up what each peer did. `earlier` reads other peers' transcripts for steps that this
peer has not seen. `joining` puts together what several members have kept.
"""
