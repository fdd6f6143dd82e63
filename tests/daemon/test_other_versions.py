"""A peer that was asked speaks another protocol: the next one is asked, and the user is told what
to do."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.node.other_versions import UNLIKE_TOLD
from p2p_dtfm.daemon.peers import discovery
from p2p_dtfm.daemon.peers import messenger as real_messenger
from p2p_dtfm.daemon.peers.home_memory import Acquaintance, acquaintance
from p2p_dtfm.daemon.peers.run_source import AnotherRun, NobodyTrains, OtherProtocol, ask_welcome
from p2p_dtfm.daemon.peers.wire import Hello, Welcome
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now
from tests.core.builders import run_spec
from tests.daemon.test_false_leads import seeker
from tests.daemon.test_memory import memory_of, peer_ids

AT = "/ip4/192.0.2.7/tcp/4001"
NEWER, OLDER = PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1


class Later(msgspec.Struct):
    """The welcome of a later version."""

    protocol_version: int
    run_spec: Signed
    what_nobody_says_yet: int = 7


class MuchLater(msgspec.Struct):
    protocol_version: int
    runs: tuple[str, ...] = ("this one", "that one")


class Messenger:
    """A messenger that answers by `says`, by peer id. Peers that are not in it do not answer."""

    me = "me"

    def __init__(self, says: dict[str, Any]) -> None:
        self.says = says
        self.asked: list[str] = []
        self.passed_over: dict[str, UserError] = {}
        self.pass_over = self.passed_over.__setitem__

    async def ask(self, peer_id: str, hello: Hello, deadline_s: float) -> bytes:
        self.asked.append(peer_id)
        if peer_id not in self.says:
            raise Unreachable(peer_id, "nobody is there")
        return encode(self.says[peer_id])

    async def look_up(self, peer_id: str, *rest: object) -> None:
        return


@pytest.fixture
def ours(tmp_path: Path) -> Signed:
    return memory_of(tmp_path).signed_spec


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dtfm.daemon.peers.run_source.WELCOME_PATIENCE_S", 0.0)
    monkeypatch.setattr(discovery, "LOOK_FOR_S", 0.0)


def ask(messenger: Messenger, *peers: str, digest: str = "") -> Any:
    return asyncio.run(ask_welcome(messenger, [*peers], (), digest))  # type: ignore[arg-type]


def test_of_several_peers_the_next_one_is_asked(ours: Signed) -> None:
    """The first peer of an older version in a line ended the search."""
    welcomes = {"old": Welcome(OLDER, ours, (), 1), "ours": Welcome(PROTOCOL_VERSION, ours, (), 1)}
    messenger = Messenger(welcomes)
    assert ask(messenger, "old", "ours")[0] == "ours"
    assert isinstance(messenger.passed_over["old"], OtherProtocol)
    ask(messenger, "old", "ours")
    assert messenger.asked == ["old", "ours", "ours"]


@pytest.mark.parametrize("version", [OLDER, NEWER])
@pytest.mark.parametrize("in_the_same_form", [True, False])
def test_whoever_is_older_is_to_be_updated(
    ours: Signed, version: int, in_the_same_form: bool
) -> None:
    """A service that ended with 5 was not started again after the update."""
    welcome = Welcome(version, ours, (), 1) if in_the_same_form else Later(version, ours)
    for peers in (("other",), ("gone", "other")):
        with pytest.raises(OtherProtocol, match=f"speaks protocol {version}, this") as error:
            ask(Messenger({"other": welcome}), *peers)
        older = "this program" if version == NEWER else "the other daemon"
        assert f"update {older}" in error.value.fixes[0] and error.value.exit_code == UNREACHABLE


def test_who_trains_another_run_in_another_version_trains_another_run(ours: Signed) -> None:
    with pytest.raises(AnotherRun):
        ask(Messenger({"other": Welcome(NEWER, ours, (), 1)}), "other", digest="00ff")


@pytest.mark.parametrize("trains_ours", [True, False])
def test_a_run_is_told_from_another_whatever_is_new_in_a_welcome(
    ours: Signed, trains_ours: bool
) -> None:
    """With one new field in its welcome, a peer that had moved to another run counted as a member
    of this run. A home waited for it, and --new was refused with the advice to type --new."""
    there = ours if trains_ours else Signed(ours.peer_id, "run", b"as nobody reads it", b"")
    welcome, digest = Later(NEWER, there), digest_bytes(ours.payload)
    with pytest.raises(OtherProtocol if trains_ours else AnotherRun):
        ask(Messenger({"other": welcome}), "other", digest=digest)


def test_who_says_of_its_run_what_nobody_can_read_is_of_another_version() -> None:
    with pytest.raises(OtherProtocol):
        ask(Messenger({"other": MuchLater(NEWER)}), "other", digest="00ff")


def test_nothing_is_kept_of_what_strangers_have_answered(ours: Signed) -> None:
    """Answers of up to 1 MiB, by hundreds of keys, stayed for as long as the daemon lived, as a
    kept error held on to its place of origin. The same peer asked again gives the same result."""
    messenger: Any = Messenger({"old": Welcome(OLDER, ours, (), 1)})
    messenger.pass_over = partial(real_messenger.Messenger.pass_over, messenger)
    for _ in range(2):
        with pytest.raises(OtherProtocol):
            ask(messenger, "old")
        kept = messenger.passed_over["old"]
        assert isinstance(kept, OtherProtocol) and "update the other" in kept.render()
        assert kept.__traceback__ is kept.__context__ is kept.__cause__ is None
    assert messenger.asked == ["old"]


def test_where_nobody_is_there_nothing_is_said_of_versions() -> None:
    with pytest.raises(NobodyTrains):
        ask(Messenger({}), "gone")


@pytest.mark.parametrize("says_so", ["initial peer", "met", "stranger"])
def test_who_comes_by_an_invitation_is_told_to_update(ours: Signed, says_so: str) -> None:
    """As all invited peers name the run, the user was told to ask whether the run is still trained.
    Strangers in the directory cannot make the program advise an update instead."""
    digest = run_spec().digest()
    present = SimpleNamespace(peer_id="there", addresses=())
    answer = Welcome(NEWER, ours, (), 1)

    class Directory:
        nodes = ()

        async def present_by_node(self, peer_ids: list[str], run_digest: str) -> list[list[Any]]:
            return [[present] if says_so != "initial peer" else []]

        async def present_peers(self, run_digest: str) -> list[Any]:
            return []

        async def fetch_run(self, run_digest: str) -> Signed:
            return ours

    messenger = Messenger({"given" if says_so == "initial peer" else "there": answer})
    finding = discovery.find_run(
        messenger,  # type: ignore[arg-type]
        Directory(),  # type: ignore[arg-type]
        ["given"],
        (),
        digest,
        lambda text: None,
        lambda peer_id: peer_id == "given" or says_so == "met",
    )
    with pytest.raises(UserError) as error:
        asyncio.run(finding)
    is_stranger = says_so == "stranger"
    assert isinstance(error.value, OtherProtocol) is not is_stranger
    assert "update this program" in error.value.fixes[-1], "what a stranger says is a hint"
    assert ("ask whoever invited you" in error.value.fixes[0]) is is_stranger


def test_nobody_is_told_to_name_the_run_to_who_speaks_otherwise(ours: Signed) -> None:
    """That advice is of use where the address is a bootstrap node's."""
    messenger: Any = Messenger({"old": Welcome(OLDER, ours, (), 1)})
    with pytest.raises(UserError) as error:
        asyncio.run(discovery.find_run(messenger, cast(Any, None), ["old"], (), "", str, bool))
    assert len(error.value.fixes) == 1


def test_of_those_that_it_met_only_half_of_the_last_view_keep_it_from_founding(
    tmp_path: Path,
) -> None:
    """One key that was a member once, or that the first answering peer named, was enough, for
    good."""
    peers = peer_ids(tmp_path, 4)
    daemon = seeker(tmp_path, {}, run="tiny")
    memory = memory_of(tmp_path).met(acquaintance(it, [AT], 5) for it in peers)
    daemon._acquaintances.memory = memory.met(acquaintance(it, [AT], 9) for it in peers[:3])
    messenger = daemon._network.messenger
    messenger.greeted_s = {}
    for unlike in (peers[0], peers[3]):  # of four known ones two, of its last fellows one
        messenger.pass_over(unlike, OtherProtocol(unlike, 99))
    daemon.require_nobody_known()
    daemon._acquaintances.say_nobody_answers("12" * 32, 4.0)
    ((_, fix),) = daemon._acquaintances._local.status.troubles.present()
    assert "update this program" in fix and "start one of them" in fix and "--apart" not in fix
    messenger.pass_over(peers[1], OtherProtocol(peers[1], 99))
    with pytest.raises(UserError, match="none can be joined") as error:
        daemon.require_nobody_known()
    assert "--apart" in error.value.fixes[1]
    for could_go_apart in (True, False):
        daemon._acquaintances.say_nobody_answers("12" * 32, 4.0, could_go_apart=could_go_apart)
        ((_, fix),) = daemon._acquaintances._local.status.troubles.present()
        assert ("start this one again with --apart" in fix) is could_go_apart


@pytest.mark.parametrize("fellows", [1, 3, 100])
def test_those_of_the_last_view_that_it_can_hear_of_keep_it_from_founding(
    tmp_path: Path, fellows: int
) -> None:
    """A home remembers 48 of a hundred peers, and asks 32; of a view of its own alone it knows
    nobody. This version may not be able to read its file of views. The daemon went on beside its
    swarm."""
    peers = [f"peer-{number}" for number in range(fellows + 9)]
    daemon = seeker(tmp_path, {}, run="tiny")
    memory = memory_of(tmp_path).met(Acquaintance(it, (AT,), 99) for it in peers[fellows:])
    memory = memory.met(Acquaintance(it, (AT,), 5) for it in peers[:fellows])  # its clock was set
    daemon._acquaintances.memory = memory.met(())  # as in a view of its own alone
    messenger = daemon._network.messenger
    messenger.greeted_s = {}
    for unlike in peers[: min(fellows, 32)]:
        messenger.pass_over(unlike, OtherProtocol(unlike, 99))
    assert daemon._acquaintances.turned_away() is not None


def test_where_peers_are_given_all_of_those_that_answer_have_to_be_of_another_version(
    tmp_path: Path,
) -> None:
    one, other = peer_ids(tmp_path, 2)
    given = tuple(f"{AT}/p2p/{it}" for it in (one, other))
    for settings, greeted, holds in (
        ({}, (), True),
        ({}, (other,), False),
        ({"apart": True}, (), False),
        ({"new": True}, (), False),
    ):
        daemon = seeker(tmp_path, {}, run="tiny", initial_peers=given, **settings)
        daemon._network.messenger.greeted_s = {it: now.monotonic_s() for it in greeted}
        daemon._network.messenger.pass_over(one, OtherProtocol(one, 99))
        assert (daemon._acquaintances.turned_away() is not None) is holds


def test_a_given_peer_of_this_version_that_could_not_be_followed_has_answered(
    tmp_path: Path,
) -> None:
    """The owner was told to update this program, and not why the peer could not be followed."""
    one, other = peer_ids(tmp_path, 2)
    given = tuple(f"{AT}/p2p/{it}" for it in (one, other))
    daemon = seeker(tmp_path, {}, run="tiny", initial_peers=given)
    messenger = daemon._network.messenger
    messenger.greeted_s = {}
    messenger.pass_over(one, OtherProtocol(one, 99))
    messenger.pass_over(other, reason := UserError("the run cannot be learnt"))
    assert daemon._acquaintances.turned_away() is reason


@pytest.mark.parametrize("apart", [True, False])
def test_who_goes_on_apart_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, apart: bool
) -> None:
    """A service keeps the setting: at the next protocol version it went on alone without a word."""
    (fellow,) = peer_ids(tmp_path, 1)
    daemon = seeker(tmp_path, {}, apart=apart)
    memory = memory_of(tmp_path).met([acquaintance(fellow, [AT], 5)])
    daemon._acquaintances.memory = memory
    daemon._network.messenger.greeted_s = {}
    versions = daemon._acquaintances.other_versions
    versions.say_apart(memory)
    assert not caplog.text, "nobody keeps it from anything"
    daemon._network.messenger.pass_over(fellow, OtherProtocol(fellow, 99))
    versions.say_apart(memory)
    assert ("goes on apart" in caplog.text and "take apart out" in caplog.text) is apart


def test_strangers_of_another_version_keep_no_known_one_out_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (known,) = peer_ids(tmp_path, 1)
    daemon = seeker(tmp_path, {}, run="tiny", initial_peers=(f"{AT}/p2p/{known}",))
    messenger = daemon._network.messenger
    for peer in (*(f"stranger-{number}" for number in range(99)), known):
        messenger.pass_over(peer, OtherProtocol(peer, 99))
    for _ in range(2):
        daemon._acquaintances.other_versions.say()
    assert caplog.text.count("stranger-") == UNLIKE_TOLD and caplog.text.count(known) == 1
