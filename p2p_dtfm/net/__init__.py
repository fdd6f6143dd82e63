"""The only home of hivemind and libp2p: identity, directory, messages, bulk streams, probing."""
