"""All commands together."""

import sys

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import (  # noqa: F401  (they register their commands)
    bootstrap,
    chaos,
    dashboard,
    data,
    demo,
    doctor,
    invite,
    models,
    plan,
    swarm,
    trace,
)
from p2p_dtfm.cli.commands.here import peer_id, service  # noqa: F401
from p2p_dtfm.cli.commands.offline import (  # noqa: F401
    compare,
    inspect,
    reproduce,
    spec,
    verify,
)
from p2p_dtfm.cli.commands.simulate import simulate
from p2p_dtfm.cli.terminal.plain import harmless_lines
from p2p_dtfm.core.protocol.errors import UserError

app.command()(simulate)


def run() -> None:
    """A `UserError` is shown as its cause and fixes, never as a traceback."""
    try:
        app(prog_name="p2p-dtfm")
    except UserError as error:
        print(harmless_lines(f"error: {error.render()}"), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
