"""p2p-dtfm: ordinary computers train one GPT together, peer to peer, with no leader."""

__version__ = "0.1.0"
