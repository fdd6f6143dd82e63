"""Making way for whoever owns this machine: `sights` looks, `yields` judges.

Imported by who stays while a daemon is away, so it knows nothing of torch or libp2p.
"""
