"""The small program that a daemon becomes for the time of a pause; see `daemon.machine.away`."""

import sys

from p2p_dtfm.cli.commands.run import go_on
from p2p_dtfm.cli.terminal.plain import harmless_lines
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.away import received
from p2p_dtfm.ports.ctrl_c import heed_as_the_first


def main() -> int:
    """The exit code."""
    heed_as_the_first()
    try:
        return go_on(received(int(sys.argv[1])))
    except UserError as error:
        print(harmless_lines(f"error: {error.render()}"), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
