"""What decides whether a daemon that comes back founds, joins or waits: without any network."""

import asyncio
import contextvars
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import AdmissionSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.machine.world import Machine
from p2p_dtfm.daemon.node.acquaintances import Acquaintances
from p2p_dtfm.daemon.node.daemon import Daemon
from p2p_dtfm.daemon.node.join.own_disk import why_not_alone
from p2p_dtfm.daemon.node.join.run_joining import RunJoining
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.node.returning import to_come_back
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL
from p2p_dtfm.daemon.peers.home_memory import (
    Memory,
    acquaintance,
    read_memory,
    write_memory,
)
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.recall import Past, recall
from p2p_dtfm.daemon.peers.run_source import is_here
from p2p_dtfm.daemon.peers.wire import Hello, Welcome
from p2p_dtfm.net.errors import Refused
from p2p_dtfm.ports import chance
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.train.data import BlobStore
from tests.core.builders import run_spec
from tests.daemon.test_memory import memory_of, peer_ids, place_of

INVITED = AdmissionSpec(mode="invited", founder="1" * 52, key="00" * 32)


def settings_of(home: Path, **settings: object) -> Settings:
    return Settings(home=home, dashboard="off", **settings)


def acquaintances_of(home: Path, network: Any, past: Past, **settings: object) -> Acquaintances:
    local = Local(settings_of(home, nearby=False, **settings), DashboardHost())
    directory: Any = SimpleNamespace(call_again_at=lambda addresses: None)
    return Acquaintances(local, network, past, directory)


def network_of(me: str = "me", connected: tuple[str, ...] = ()) -> Any:
    async def connected_peers() -> tuple[str, ...]:
        return connected

    host = SimpleNamespace(addresses=None, connected_peers=connected_peers)
    messenger = SimpleNamespace(where=lambda peer_id: ("/ip4/192.0.2.7/tcp/4001",))
    me_, come_to = SimpleNamespace(peer_id=me), lambda run_digest: None
    return SimpleNamespace(me=me_, host=host, messenger=messenger, come_to=come_to)


def network_of_contacts(*addresses: str) -> Any:
    network = network_of()
    network.first_contacts = addresses
    return network


def remember(home: Path, memory: Memory) -> Path:
    directory = place_of(home, memory)
    write_memory(directory, memory)
    return directory


def test_a_bare_daemon_recalls_the_run_that_it_was_in_last(tmp_path: Path) -> None:
    older, newer = (
        memory_of(tmp_path, run_spec(seed=seed), used_s) for seed, used_s in ((1, 5), (2, 9))
    )
    remember(tmp_path, older)
    remember(tmp_path, newer)
    assert recall(settings_of(tmp_path)).recalled == newer
    digest = older.run_digest
    assert recall(settings_of(tmp_path, run_digest=digest[:12])).recalled == older
    with pytest.raises(UserError, match="does not remember run 00ff"):
        recall(settings_of(tmp_path, run_digest="00ff"))


def test_the_run_that_was_used_last_is_recalled_though_the_clock_was_ahead_before(
    tmp_path: Path,
) -> None:
    """The clock had said 2030 while one of two runs was written. Until 2030 a bare daemon recalled
    that run."""
    ahead = memory_of(tmp_path, run_spec(seed=1), used_s=4_000_000_000)
    remember(tmp_path, ahead)
    later = memory_of(tmp_path, run_spec(seed=2))
    run: Any = SimpleNamespace(digest=later.run_digest, signed_spec=later.signed_spec)
    network = network_of()
    network.first_contacts = ()
    known = acquaintances_of(tmp_path, network, recall(settings_of(tmp_path)))

    async def used() -> list[int]:
        await known.begin_to_remember(run)
        times_s = []
        for _ in range(2):
            recalled = recall(settings_of(tmp_path)).recalled
            assert recalled is not None and recalled.run_digest == later.run_digest
            times_s.append(recalled.used_s)
            await known.remember(None)
        return times_s

    first_s, second_s = asyncio.run(used())
    assert first_s == second_s, "it runs away from no clock"


def test_whoever_was_told_what_to_do_needs_no_past(tmp_path: Path) -> None:
    at = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWM4Tq2kcoqm7cK6wfTyt6ycm2EBUmoDZ5mYb9biyQ69cP"
    assert recall(settings_of(tmp_path, run="tiny")).recalled is None
    assert recall(settings_of(tmp_path, initial_peers=(at,))).recalled is None
    with pytest.raises(UserError, match="nothing says what to do") as error:
        recall(settings_of(tmp_path))
    assert error.value.exit_code == 2 and len(error.value.fixes) == 4
    assert "--invite LINE" in error.value.fixes[0], "what volunteers were given"


def test_a_run_that_there_is_not_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run spec 'tny'"):
        recall(settings_of(tmp_path / "new", run="tny"))
    assert not (tmp_path / "new").exists()


def test_who_names_a_spec_comes_back_to_a_run_of_that_spec_or_to_none(tmp_path: Path) -> None:
    """The founder of another run has nothing to say to the members of its earlier run."""
    tiny = read_run_spec("tiny")
    data = tiny.data.model_copy(update={"manifest": "00" * 32, "source": "as it was prepared"})
    known = tiny.model_copy(update={"data": data, "founding": "00112233aabbccdd"})
    invited = run_spec(seed=8, admission=INVITED)
    for spec, used_s in ((known, 5), (invited, 9)):
        remember(tmp_path, memory_of(tmp_path, spec, used_s))
    assert recall(settings_of(tmp_path)).recalled == memory_of(tmp_path, invited, 9)
    assert recall(settings_of(tmp_path, run="tiny")).recalled == memory_of(tmp_path, known, 5)
    assert recall(settings_of(tmp_path, run="digits")).recalled is None


def test_who_names_peers_comes_back_to_a_run_in_which_it_met_one_of_them_or_to_none(
    tmp_path: Path,
) -> None:
    """A user gave a friend's address of another run while the friend was out of reach. The daemon
    trained its last run again, with one log line. It also came to members of an older run by
    invitation with the invitation of the newest run."""
    member, node, friend, other = peer_ids(tmp_path, 4)
    at = {peer: f"/ip4/192.0.2.7/tcp/4001/p2p/{peer}" for peer in (member, node, friend, other)}
    older = memory_of(tmp_path, run_spec(seed=8, admission=INVITED), 5)
    older = older.met([acquaintance(friend, (at[friend],), 5)])
    newer = memory_of(tmp_path, run_spec(seed=9), 9).met([acquaintance(member, (at[member],), 9)])
    newer = msgspec.structs.replace(newer, meeting_points=(at[node],))
    for memory in (older, newer):
        remember(tmp_path, memory)

    def recalled(*given: str, **settings: object) -> Memory | None:
        return recall(settings_of(tmp_path, initial_peers=given, **settings)).recalled

    moved = f"/dns4/there.example.org/tcp/9/p2p/{member}"
    relayed = f"{at[other]}/p2p-circuit/p2p/{member}"
    for line in ((at[member],), (moved,), (relayed,), (at[node],), (at[other], at[member])):
        assert recalled(*line) == newer, "the usual line, after a power cut"
    assert recalled(at[friend]) == older
    assert recalled(at[other]) is None
    assert recalled(at[other], run_digest=newer.run_digest) == newer, "the run is named"


def test_who_comes_by_a_new_address_remembers_whom_it_met_in_that_run(tmp_path: Path) -> None:
    """The newcomer follows the members that it met, whoever has told it of the run."""
    (there,) = peer_ids(tmp_path, 1)
    memory = memory_of(tmp_path)
    given = f"/ip4/192.0.2.7/tcp/4001/p2p/{there}"
    settings = {"initial_peers": (given,)}
    network = network_of()
    known = acquaintances_of(tmp_path, network, Past([memory], None), **settings)
    joining = RunJoining(Local(settings_of(tmp_path, **settings), DashboardHost()), network, known)
    answers = [memory.run_digest, run_spec(seed=9).digest()]

    async def ask_which_run(run_digest: str) -> Any:
        return SimpleNamespace(digest=answers.pop(0))

    joining._leads.ask_which_run = ask_which_run  # type: ignore[method-assign]
    asyncio.run(joining.enter_run())
    assert known.memory == memory
    known.memory = None
    asyncio.run(joining.enter_run())
    assert known.memory is None, "of this one it remembers nobody"


def test_who_names_a_spec_is_introduced_to_no_other_run(tmp_path: Path) -> None:
    """Members can tell the newcomer that it is not let in only once the run's digest is known."""
    invited = run_spec(seed=8, admission=INVITED)
    memory, (me, other) = memory_of(tmp_path, invited), peer_ids(tmp_path, 2)
    chain = Signed("founder", "link", b"", b"")
    directory = place_of(tmp_path, memory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "guests.json").write_bytes(msgspec.json.encode({"chain": [chain]}))

    async def turned_away(peer_id: str) -> str:
        return "not invited: somebody took it back"

    def network() -> Network:
        found = Network.__new__(Network)
        messenger = SimpleNamespace(introduction=None, turned_away=turned_away)
        host = SimpleNamespace(identity=SimpleNamespace(peer_id=me))
        found.messenger, found.host = cast(Any, messenger), cast(Any, host)
        found.first_contacts = (f"/ip4/192.0.2.7/tcp/4001/p2p/{other}",)
        found.invitation, found.refusal = None, ""
        return found

    past = Past([memory], memory)

    async def comes(settings: Settings) -> Network:
        found = network()
        await found._introduce(Local(settings, DashboardHost()), past)
        return found

    with pytest.raises(UserError, match="do not let this peer in"):
        asyncio.run(comes(settings_of(tmp_path)))
    founds = settings_of(tmp_path, run="tiny")
    known = asyncio.run(comes(founds))
    assert known.messenger.introduction is not None
    with pytest.raises(UserError, match="do not let this peer in") as refused:
        known.come_to(memory.run_digest)
    assert refused.value.exit_code == 5
    known.come_to(run_spec(seed=9).digest())
    assert known.invitation is None and known.messenger.introduction is None


@pytest.mark.parametrize("is_node_there", [False, True])
def test_who_was_reached_at_two_addresses_refuses_once(tmp_path: Path, is_node_there: bool) -> None:
    """Its invitation is shown to a peer once. A line has two addresses of its maker, and the second
    was taken for another peer, which has no objection: a guest whose line was taken back was told
    to update its program, or to try again in a minute. A bootstrap node has no say in it."""
    memory, me = memory_of(tmp_path, run_spec(seed=8, admission=INVITED)), "me"
    other, node = peer_ids(tmp_path, 2)
    directory = place_of(tmp_path, memory)
    directory.mkdir(parents=True, exist_ok=True)
    chain = Signed("founder", "link", b"", b"")
    (directory / "guests.json").write_bytes(msgspec.json.encode({"chain": [chain]}))

    async def refused(peer_id: str, *call: object) -> bytes:
        await asyncio.sleep(0)
        raise Refused(REFUSAL if peer_id == node else "not invited: somebody took it back", peer_id)

    async def comes() -> None:
        host: Any = SimpleNamespace(peer_id=me, identity=SimpleNamespace(peer_id=me))
        network = Network.__new__(Network)
        control: Any = SimpleNamespace(call=refused)
        network.host, network.messenger = host, Messenger(host, control, life=1)
        network.first_contacts = tuple(
            f"/ip4/{at}/tcp/4001/p2p/{other}" for at in ("5.9.0.1", "192.168.1.2")
        )
        if is_node_there:
            network.first_contacts += (f"/ip4/5.9.0.3/tcp/4001/p2p/{node}",)
        network.invitation, network.refusal = None, ""
        past = Past([memory], memory)
        await network._introduce(Local(settings_of(tmp_path), DashboardHost()), past)

    with pytest.raises(UserError, match="do not let this peer in"):
        asyncio.run(comes())


def test_the_same_line_goes_on_with_the_newest_founding_of_its_spec(tmp_path: Path) -> None:
    spec = run_spec()
    marked = spec.model_copy(update={"founding": "00112233aabbccdd"})
    for known, used_s in ((spec, 5), (marked, 9), (run_spec(seed=8), 12)):
        remember(tmp_path, memory_of(tmp_path, known, used_s))
    again = joining_of(tmp_path)
    assert again._which_founding(spec) == marked
    assert again._acquaintances.memory is not None
    assert again._acquaintances.memory.spec == marked
    assert again._which_founding(run_spec(seed=9)) == run_spec(seed=9)
    assert again._acquaintances.memory is None, "of that run nobody was met"
    new = joining_of(tmp_path, new=True)
    founded = new._which_founding(spec)
    assert founded.unmarked == spec and founded not in (spec, marked)
    assert new._acquaintances.memory is None, "nobody is asked"
    assert new._which_founding(spec) != founded


def test_a_run_that_is_founded_afresh_has_the_same_name_whenever_its_world_is_played(
    tmp_path: Path,
) -> None:
    def founded(seed: int) -> str:
        chance.live_by(random.Random(seed))
        return joining_of(tmp_path, new=True)._which_founding(run_spec()).digest()

    one, again, other = (contextvars.copy_context().run(founded, seed) for seed in (1, 1, 2))
    assert one == again != other


def test_who_has_changed_a_run_spec_is_told_that_it_is_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The changed run began at step 0, without a word about the existing run."""
    memory = memory_of(tmp_path, run_spec())
    remember(tmp_path, memory)
    longer = run_spec().model_copy(update={"total_steps": run_spec().total_steps + 80})
    assert joining_of(tmp_path)._which_founding(longer) == longer
    steps = run_spec().total_steps
    assert f"(total_steps is {steps + 80}, was {steps})" in caplog.text
    assert f"p2p-dtfm --home {tmp_path} --run-digest {memory.run_digest[:16]}" in caplog.text
    caplog.clear()
    joining_of(tmp_path)._which_founding(longer.model_copy(update={"name": "another"}))
    joining_of(tmp_path)._which_founding(run_spec())
    assert not caplog.text


def test_a_founder_whose_data_were_moved_is_told_that_its_home_has_them(tmp_path: Path) -> None:
    """The line that had founded the run was refused, and the only advice was to prepare the data
    again."""
    file = tmp_path / "mine.toml"
    text = find_run_spec("tiny").read_text()
    file.write_text(re.sub(r"(?m)^source = .*$", 'source = "moved"', text))
    spec = read_run_spec(str(file))
    data = spec.data.model_copy(update={"manifest": "00" * 32, "source": "My texts"})
    memory = memory_of(tmp_path, spec.model_copy(update={"data": data}))
    directory = remember(tmp_path, memory)

    def fixes(**settings: object) -> tuple[str, ...]:
        made = settings_of(tmp_path, run=str(file), **settings)
        with pytest.raises(UserError, match="no prepared data in") as refused:
            asyncio.run(Daemon(made, DashboardHost()).run(recall(made)))
        return refused.value.fixes

    told = f"p2p-dtfm --home {tmp_path} --run-digest {memory.run_digest[:16]} goes on with run"
    assert not any(told in fix for fix in fixes()), "they are not in it"
    (directory / "blobs").mkdir()
    assert told in fixes()[0] and "p2p-dtfm prepare" in fixes()[1]
    assert not any(told in fix for fix in fixes(new=True))


def test_a_home_that_has_lost_its_memory_looks_before_it_founds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory file was torn: the same line would have founded the same run a second time."""
    looked: list[str] = []

    async def look(run_digest: str) -> None:
        looked.append(run_digest)

    async def found() -> tuple[bool, str]:
        joining = joining_of(tmp_path)
        monkeypatch.setattr(joining._acquaintances, "look_before_going_alone", look)
        monkeypatch.setattr(joining._acquaintances, "turned_away", lambda: None)
        with pytest.raises(AttributeError, match="identity"):  # as far as the stand-ins go
            await joining._found_run()
        return joining.founds, caplog.text

    prepared = (run_spec(), None)
    monkeypatch.setattr("p2p_dtfm.daemon.node.join.run_joining.prepare_run", lambda *args: prepared)
    _, said = asyncio.run(found())
    assert not looked and "is gone" not in said, "whoever founds for the first time asks nobody"
    was_in = KnownView(ViewId(3, "00"), (Member("me", 1),), "plan")
    history = ViewHistory(tmp_path, run_spec().digest())
    history.keep((was_in,))
    history.write()
    founds, said = asyncio.run(found())
    assert looked == [run_spec().digest()] and "what it remembered of it is gone" in said
    assert founds, "nobody answered"


def test_who_founds_beside_a_member_of_another_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After `--run F --initial-peers A`, where A trains another run, the user heard "no member
    answers"."""
    there = peer_ids(tmp_path, 1)[0]
    given = f"/ip4/192.0.2.7/tcp/4001/p2p/{there}"
    theirs = memory_of(tmp_path, run_spec(seed=9)).signed_spec

    async def ask(peer_id: str, hello: Hello, deadline_s: float) -> bytes:
        return encode(Welcome(PROTOCOL_VERSION, theirs, (), 1, 1))

    async def addresses() -> tuple[str, ...]:
        return ()

    async def nobody(*who: object) -> list[Any]:
        return []

    network = network_of()
    network.messenger = SimpleNamespace(
        me="me", passed_over={}, ask=ask, learn=lambda *it: None, forget=lambda it: None
    )
    network.host.addresses, network.first_contacts = addresses, (given,)
    settings = settings_of(tmp_path, nearby=False, run="tiny", initial_peers=(given,))
    directory = SimpleNamespace(present_by_node=nobody, present_peers=nobody, nodes=())
    local = Local(settings, DashboardHost())
    looking = Acquaintances(local, network, Past([], None), cast(Any, directory))
    ours, digest = run_spec().digest(), run_spec(seed=9).digest()
    assert asyncio.run(looking.look_for_members(ours)) is None
    trains_another = f"the swarm of {there} trains run {digest[:16]}, not {ours[:16]}"
    assert f"{trains_another}; without --run this joins that one" in caplog.text


def test_a_peer_that_was_named_at_two_addresses_is_looked_for_at_both(tmp_path: Path) -> None:
    """An invitation tells two of its maker. Of these the last took the place of the first, as a
    rule one of its own network in the place of one that can be called from elsewhere."""
    (peer_id,) = peer_ids(tmp_path, 1)
    named = tuple(f"/ip4/{host}/tcp/4001/p2p/{peer_id}" for host in ("5.9.0.1", "192.168.1.2"))
    looking = acquaintances_of(tmp_path, network_of_contacts(), Past([], None), initial_peers=named)
    assert looking._sought("00" * 32).met == ((peer_id, named),)


def test_a_home_remembers_where_a_member_has_gone_since_the_view_was_agreed_on(
    tmp_path: Path,
) -> None:
    ada = "12D3KooWM4Tq2kcoqm7cK6wfTyt6ycm2EBUmoDZ5mYb9biyQ69cP"
    at, was_at = (f"/ip4/192.0.2.{host}/tcp/4001/p2p/{ada}" for host in (7, 6))
    record = SimpleNamespace(peer_id=ada, addresses=(was_at, at))
    view: Any = SimpleNamespace(snapshot=SimpleNamespace(records=(record,)))
    seen = acquaintances_of(tmp_path, network_of(), Past([], None))._seen_members(view)
    assert [item.addresses for item in seen] == [(at, was_at)]


def joining_of(home: Path, **settings: object) -> RunJoining:
    past = recall(settings_of(home, run="tiny", **settings))
    network = network_of()
    acquaintances = acquaintances_of(home, network, past, run="tiny", **settings)
    local = Local(settings_of(home, run="tiny", **settings), DashboardHost())
    return RunJoining(local, network, acquaintances)


def test_who_cannot_go_on_alone_says_what_its_disk_lacks(tmp_path: Path) -> None:
    """Somebody had removed the files of a run by hand. Its founder looked for others for ever, and
    named no other reason."""
    data = {"source": "python-standard-library", "manifest": "ab" * 32}
    home, memory = Home(tmp_path), memory_of(tmp_path, run_spec(data=data))
    store = BlobStore(place_of(tmp_path, memory) / "blobs")
    assert "another founded it" in why_not_alone(home, "me", memory, store)
    said = why_not_alone(home, memory.signed_spec.peer_id, memory, store)
    assert str(store.root) in said and "p2p-dtfm --run FILE" in said


def test_a_damaged_manifest_is_put_aside_and_not_a_bug(tmp_path: Path) -> None:
    """A founder was told "this is a bug", and a peer that joined again blamed the others."""
    manifest = tmp_path / "manifest"
    manifest.write_bytes(b"{}")
    memory = memory_of(tmp_path)
    store = BlobStore(place_of(tmp_path, memory) / "blobs")
    digest = store.put_file(manifest)
    data = {"source": "python-standard-library", "manifest": digest}
    memory = memory_of(tmp_path, run_spec(data=data))
    store.held(digest).write_bytes(b"{")
    assert is_here(memory.signed_spec, store) is False
    assert store.path(digest) is None, "and so it is fetched again"


def test_a_full_disk_costs_the_memory_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = peer_ids(tmp_path, 1)
    known = acquaintances_of(tmp_path, network_of(), Past([], memory_of(tmp_path)), run="tiny")
    known.members_named = (one,)

    def is_full(directory: Path, memory: Memory) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("p2p_dtfm.daemon.node.acquaintances.write_memory", is_full)
        asyncio.run(known.remember(None))
        known._memory_lock = asyncio.Lock()
        asyncio.run(known.remember(None))
    assert caplog.text.count("cannot write down whom it met") == 1
    known._memory_lock = asyncio.Lock()
    asyncio.run(known.remember(None))
    assert known.memory is not None
    found = read_memory(place_of(tmp_path, known.memory))
    assert found is not None and [item.peer_id for item in found.members] == [one]
    assert list(tmp_path.glob("runs/*/memory*.json"))


def test_of_several_that_start_at_once_the_first_goes_first(tmp_path: Path) -> None:
    low, high = sorted(peer_ids(tmp_path, 2))
    for me, other, waits in ((high, low, True), (low, high, False)):
        met = [acquaintance(other, ["/ip4/192.0.2.7/tcp/4001"], 5)]
        past = Past([], memory_of(tmp_path).met(met))
        known = acquaintances_of(tmp_path, network_of(me, (other,)), past, run="tiny")
        assert asyncio.run(known._goes_another_first()) is waits


def test_who_looks_before_it_goes_alone_can_be_found_by_those_that_it_has_met(
    tmp_path: Path,
) -> None:
    """Two peers that come back at once on new ports know each other, and nobody else who is there
    yet."""
    other, stranger = peer_ids(tmp_path, 2)
    answered: list[tuple[str, int, bool]] = []
    known_ones: list[bool] = []

    async def addresses() -> tuple[str, ...]:
        return ("/ip4/127.0.0.1/tcp/4001",)

    async def answer(
        run_digest: str, port: int, knows: Callable[[str], bool], *, only_known: bool
    ) -> None:
        answered.append((run_digest, port, only_known))
        known_ones.extend(map(knows, (other, stranger)))

    async def nobody(run_digest: str) -> None:
        assert answered, "it can be found before it looks"

    network = network_of()
    network.host.addresses = addresses
    met = [acquaintance(other, ["/ip4/192.0.2.7/tcp/4001"], 5)]
    known: Any = acquaintances_of(tmp_path, network, Past([], memory_of(tmp_path).met(met)))
    known._nearby, known.look_for_members = SimpleNamespace(answer=answer), nobody
    asyncio.run(known.look_before_going_alone("digest"))
    assert answered == [("digest", 4001, True)] and known_ones == [True, False]


def test_after_a_pause_it_comes_back_as_it_was_started(tmp_path: Path) -> None:
    met = ("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWM4Tq2kcoqm7cK6wfTyt6ycm2EBUmoDZ5mYb9biyQ69cP",)
    digest = "ab" * 32
    founder = to_come_back(Settings(home=tmp_path, run="tiny", new=True), met, digest)
    assert founder.run == "tiny" and not founder.new and not founder.initial_peers
    given = ("/ip4/192.0.2.8/tcp/1/p2p/12D3KooWKjKpe6EK24MqLPDpteHmy8Wc6Lt9csQ9x3RkQcxe322p",)
    joiner = to_come_back(Settings(home=tmp_path, initial_peers=given), met, digest)
    assert joiner.initial_peers == (*given, *met) and joiner.run_digest == digest
    bare = to_come_back(Settings(home=tmp_path), met, digest)
    assert not bare.initial_peers and bare.run_digest == digest


@pytest.mark.parametrize("becomes", ["changed", "removed"])
def test_after_a_pause_a_founder_comes_back_to_its_run_and_not_to_the_file(
    tmp_path: Path, becomes: str
) -> None:
    """A founder edited its run spec by day, and in the evening the daemon founded another run at
    step 0. Where the file was gone the daemon ended."""
    memory = memory_of(tmp_path)
    remember(tmp_path, memory)
    file = tmp_path / "mine.toml"
    if becomes == "changed":
        file.write_bytes(find_run_spec("tiny").read_bytes())
    settings = settings_of(tmp_path, run=str(file), new=True)
    founder = to_come_back(settings, (), memory.run_digest)
    assert not founder.run and not founder.new
    assert recall(founder).recalled == memory


def test_who_paused_before_it_took_part_comes_back_as_it_was_started(tmp_path: Path) -> None:
    """The daemon forgot that it was to found a new run, and which run it was to join."""
    for settings in (
        settings_of(tmp_path, run="tiny", new=True),
        settings_of(tmp_path, run_digest="ab" * 32),
    ):
        assert to_come_back(settings, (), "") == settings


def test_remembered_peers_that_are_no_nodes_of_the_directory_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that knew no such peer began a directory of its own, and then met the peers that it
    reached."""
    at = f"/ip4/192.0.2.7/tcp/4001/p2p/{peer_ids(tmp_path, 1)[0]}"
    met: list[str] = []

    class OwnDirectory:
        async def meet(self, peer_ids: list[str]) -> None:
            met.extend(peer_ids)

    async def start(
        self: Machine, host: object, contacts: tuple[str, ...], serves: bool
    ) -> OwnDirectory:
        if contacts:
            raise UserError("could not join the directory through it", "none", exit_code=6)
        return OwnDirectory()

    monkeypatch.setattr(Machine, "start_directory", start)
    network = network_of()
    elsewhere = at.replace("192.0.2.7", "192.168.1.2")
    network.first_contacts = (at, elsewhere)
    network.reachability = SimpleNamespace(is_behind_router=False)
    network.invitation = None

    async def not_said(error: UserError) -> UserError:
        return error

    network.why_turned_away = not_said
    learnt: list[tuple[str, tuple[str, ...]]] = []
    network.messenger.learn = lambda peer_id, addresses: learnt.append((peer_id, addresses))
    bare, told = (
        Local(settings_of(tmp_path, nearby=False, **given), DashboardHost())
        for given in ({}, {"initial_peers": (at,)})
    )
    begun = asyncio.run(Acquaintances.start(bare, network, Past([], None)))
    assert isinstance(begun.directory, OwnDirectory)
    assert met == [at.split("/")[-1]]
    assert learnt == [(met[0], (at, elsewhere))], "the last is not better than the first"
    with pytest.raises(UserError, match="could not join"):
        asyncio.run(Acquaintances.start(told, network, Past([], None)))


@pytest.mark.parametrize("founded_it", [True, False])
def test_who_founded_a_run_is_not_told_to_remove_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, founded_it: bool
) -> None:
    """A user who moves a home is told once. A founder's rights would go with its key for good."""
    memory = memory_of(tmp_path)
    me = memory.signed_spec.peer_id if founded_it else "me"
    network = network_of(me)
    network.first_contacts = ()
    run: Any = SimpleNamespace(
        digest=memory.run_digest, signed_spec=memory.signed_spec, spec=memory.spec
    )
    known = acquaintances_of(tmp_path, network, Past([memory], memory))
    asyncio.run(known.begin_to_remember(run))
    assert "last used on another machine" in caplog.text
    assert ("remove" in caplog.text) is not founded_it


def test_a_copied_home_does_not_speak_as_the_same_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    original, copy = Home(tmp_path / "original"), Home(tmp_path / "copy")
    original.acquire()
    copy.root.mkdir()
    shutil.copy(original.identity, copy.identity)
    who = rf"speaks as this very peer \(process \d+, in {original.root}\)"
    with pytest.raises(UserError, match=who) as error:
        copy.acquire()
    assert error.value.exit_code == 3 and str(copy.identity) in error.value.fixes[0]
    copy.identity.unlink()
    copy.acquire()  # as another peer
    copy.release()
    shutil.copy(original.identity, copy.identity)
    original.release()
    copy.acquire()  # moved
    copy.release()
