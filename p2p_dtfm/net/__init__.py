"""The only home of hivemind and libp2p; beside `train`, `sim` and `web`, which the daemon joins to
it.

`contacts` knows who and where peers are. `libp2p` is the host and its calls, and `streams` carries
what flows. `direct` has sealed lines of our own beside libp2p, and `nat` gets past routers. In
`directory` peers meet. `shaping` stands in for the world on one machine. Begin with `libp2p.host`;
`hivemind_parts` alone imports hivemind.
"""
