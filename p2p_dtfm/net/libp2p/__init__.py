"""One libp2p daemon (p2pd): its start, its connections, and single calls over them.

Imports `contacts`; for `streams`, `nat`, `directory` and the daemon. Begin with `host`.
"""
