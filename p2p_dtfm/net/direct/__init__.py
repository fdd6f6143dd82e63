"""Direct lines: sealed connections between members, beside libp2p, for what is large.

`lines.DirectLines` is the entrance, used by `net.streams`. `card` is what members tell each other
over the control channel, `trust` whom TLS lets in, `reception` who waits at the listener,
`handshake` how a connection begins, `sealed` its records, `line` one connection and its thread,
`line_jobs` what that is given to write and to read.
"""
