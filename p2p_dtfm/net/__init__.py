"""The only home of hivemind and libp2p; beside `train`, `sim` and `web`, which the daemon joins to
it.

`contacts` is who and where peers are, `libp2p` the host and what it says in calls, `streams` what
flows, `direct` sealed lines of our own beside libp2p, `nat` how routers are passed, `directory`
where peers meet; `shaping` stands in for the world on one machine. Begin with `libp2p.host`;
`hivemind_parts` alone imports hivemind.
"""
