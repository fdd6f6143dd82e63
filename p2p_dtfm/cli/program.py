"""The program with all its commands, which register themselves as they are imported."""

from p2p_dtfm.cli.app import app as app
from p2p_dtfm.cli.commands import (  # noqa: F401
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

app.command()(simulate)
