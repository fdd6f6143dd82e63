"""Machines behind routers: nobody can call them, and others pass on what is for them. Begin with
`ways_in`.

circuits       connections through a relay, as p2pd has them
sockets        what a daemon asks of its event loop to see who can be called
ways_in        who is behind a router, and how anybody is called
meeting_point  a node that anybody can call, for founders that are behind a router
lost_relays    the peer that relays for the most others, and how they lose it

What a daemon makes of its router is its own: `daemon.peers.reachability` and `net.nat`.
"""
