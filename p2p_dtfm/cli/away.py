"""The small program that a daemon becomes for the time of a pause; see `daemon.away`."""

import sys

from p2p_dtfm.cli.run import go_on
from p2p_dtfm.core.errors import UserError
from p2p_dtfm.daemon.away import received


def main() -> int:
    """The exit code."""
    try:
        return go_on(received(int(sys.argv[1])))
    except UserError as error:
        print(f"error: {error.render()}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
