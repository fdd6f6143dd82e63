"""`python -m p2p_dtfm` is the same program as `p2p-dtfm`."""

from p2p_dtfm.cli import main

main()
