"""A volunteer is told of each door that a daemon opens, and what closes it."""

import pytest

from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net.contacts import nearby
from p2p_dtfm.net.libp2p.p2pd import flags_of
from tests.documentation.pages import ROOT

PAGE = (ROOT / "docs" / "volunteer.md").read_text()
DOORS = PAGE[PAGE.index("## What it may do, and what not") :]


@pytest.mark.parametrize(
    "option", ["listen", "direct_lines", "nearby", "dashboard", "port_mapping"]
)
def test_each_is_named_with_the_setting_that_opens_or_closes_it(option: str) -> None:
    assert option in Settings.model_fields
    name = option.replace("_", "-")
    assert f"`--{name}" in DOORS or f"`--no-{name}`" in DOORS


def test_the_port_on_the_local_network_is_that_of_the_program() -> None:
    assert f"UDP port {nearby.PORT}" in DOORS


def test_what_the_router_is_asked_for_is_said() -> None:
    """p2pd asks the router to forward a port, unless nobody has to call this peer, or its user does
    not want that."""
    beyond = flags_of(ROOT, ["/ip4/0.0.0.0/tcp/0"], [], 1)
    alone = flags_of(ROOT, ["/ip4/127.0.0.1/tcp/0"], [], 1)
    unasked = flags_of(ROOT, ["/ip4/0.0.0.0/tcp/0"], [], 1, maps_port=False)
    assert "-natPortMap=1" in beyond and "-natPortMap=0" in alone and "-natPortMap=0" in unasked
    assert "UPnP" in DOORS and "listens on loopback alone" in DOORS
