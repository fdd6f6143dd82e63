"""Machines behind routers: nobody can call them, and others pass on what is for them. Begin with
`ways_in`.

circuits       connections through a relay, as p2pd has them
sockets        what a daemon asks of its event loop to see who can be called
ways_in        who is behind a router, and how anybody is called
beginning      how a run begins there
meeting_point  a node that anybody can call, for founders that are behind a router
lost_relays    who relays for the most, and how it comes to do so no more

What a daemon makes of it is its own: `daemon.peers.reachability` and `net.nat`.
"""
