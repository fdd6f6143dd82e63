"""Making way for whoever owns this machine: `sights` looks, `yields` judges.

A process that stays while a daemon is away imports this, so it knows nothing of torch or libp2p.
"""
