"""Direct lines: sealed connections between members, beside libp2p, for what is large.

`lines.DirectLines` is the entrance, used by `net.streams`. `card` is what members tell each other
over the control channel. `trust` says whom TLS lets in, and `reception` looks after those who wait
at the listener. `handshake` begins a connection, and `sealed` has its records. `line` is one
connection and its thread, and `line_jobs` what a line is given to write and to read.
"""
