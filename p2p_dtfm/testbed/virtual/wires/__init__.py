"""What is between the daemons: bytes on links, hosts in the place of libp2p, and a directory.

links       how long bytes take from one host to another, and what cuts them off
streams     the ends of a stream
host        what `net.libp2p.host.Host` is over libp2p
network     who is connected to whom, and what goes over that
directory   in the place of the DHT: one shelf that everybody reaches
"""
