"""One libp2p daemon (p2pd): its start, its connections, and single calls over them.

Imports `contacts`. Begin with `host`.
"""
