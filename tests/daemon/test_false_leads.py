"""A peer that says falsely that a run is complete, or withholds it, ends no seeker: others are
asked."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.signed import Sign, Signed, signing_in
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.node.acquaintances import SHOWS_END
from p2p_dtfm.daemon.node.join import leads as following
from p2p_dtfm.daemon.node.join.leads import Leads
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.peers import run_source
from p2p_dtfm.daemon.peers.home_memory import acquaintance
from p2p_dtfm.daemon.peers.member_search import Found
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.daemon.peers.run_source import (
    RunComplete,
    ask_welcome,
    fault_of_end,
    require_joinable,
)
from p2p_dtfm.daemon.peers.wire import PeerAddress, Welcome
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import run_spec
from tests.core.liars import self_made_view
from tests.daemon.test_coming_back_parts import acquaintances_of, network_of, settings_of
from tests.daemon.test_memory import memory_of, peer_ids, place_of
from tests.train.saved_layers import save_layers

SPEC = run_spec()
PAYLOAD = Signed("founder", "run", SPEC.canonical_bytes(), b"")
MEMBERS = (Member("a", 1), Member("b", 1))


def sign_in(run_digest: str, peer_id: str) -> Sign:
    return signing_in(run_digest, sign_for(peer_id))


def complete(
    said_by: str = "a",
    last_step: int = SPEC.total_steps,
    run_digest: str = SPEC.digest(),
    agreed_in: str = SPEC.digest(),
    trained_in: str = SPEC.digest(),
) -> Welcome:
    """The answer of a member of a swarm that has taken all steps, and shows that."""
    certificate = self_made_view(MEMBERS, 8, MEMBERS, lambda peer: sign_in(agreed_in, peer))
    commit = tuple(
        sign_prepared(
            Prepared(certificate.view, last_step, m.peer_id, {}, 0.0, 0, 0.0, 0, None),
            sign_in(trained_in, m.peer_id),
        )
        for m in MEMBERS
    )
    sender = Member(said_by, 1)
    said = Standing(sender, certificate, True, SPEC.total_steps + 1, run_digest, (), commit)
    standing = stated(said, sign_in(run_digest, said_by))
    return Welcome(2, PAYLOAD, (), SPEC.total_steps + 1, 2, standing=standing)


@pytest.fixture(autouse=True)
def other_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "verify", verify)


def test_that_a_run_is_complete_is_shown_by_what_its_members_have_signed() -> None:
    assert isinstance(fault_of_end("a", complete(), SPEC), RunComplete)
    true = complete()
    assert true.standing is not None
    certificate = true.standing.certificate
    for false in (
        msgspec.structs.replace(true, standing=None),
        complete(last_step=SPEC.total_steps - 3),
        complete(said_by="stranger"),
        complete(run_digest="of another run"),
        msgspec.structs.replace(
            true, standing=msgspec.structs.replace(true.standing, signature=b"x")
        ),
        msgspec.structs.replace(
            true,
            standing=stated(
                msgspec.structs.replace(
                    true.standing,
                    certificate=msgspec.structs.replace(certificate, ready=certificate.ready[:1]),
                ),
                sign_in(SPEC.digest(), "a"),
            ),
        ),
    ):
        fault = fault_of_end("a", false, SPEC)
        assert fault is not None and not isinstance(fault, RunComplete)
    assert fault_of_end("b", true, SPEC) is not None, "of whom it is not"
    under_way = msgspec.structs.replace(true, step=SPEC.total_steps, standing=None)
    assert fault_of_end("a", under_way, SPEC) is None


@pytest.mark.parametrize("can_show", [True, False])
def test_whoever_cannot_show_the_end_names_those_that_can(
    monkeypatch: pytest.MonkeyPatch, can_show: bool
) -> None:
    """The asked peer became a member after the last step. A member that came back to it was told to
    try elsewhere (seed 501049)."""
    others = (PeerAddress("a", ()), PeerAddress("b", ()))
    says_so = msgspec.structs.replace(complete("c"), standing=None, peers=others)
    shown = complete("b") if can_show else msgspec.structs.replace(complete("b"), standing=None)
    learnt: list[PeerAddress] = []
    monkeypatch.setattr(run_source, "open_run", lambda *signed: None)

    async def ask(peer_id: str, hello: Any, deadline_s: float) -> bytes:
        if peer_id == "a":
            raise Unreachable("a", "gone")
        return encode_for_wire(shown)

    messenger: Any = SimpleNamespace(ask=ask, passed_over={}, learn_named=learnt.extend)
    with pytest.raises(UserError) as told:
        asyncio.run(require_joinable(messenger, "c", says_so, SPEC))
    assert isinstance(told.value, RunComplete) is can_show
    assert learnt == list(others)


def test_the_end_of_another_run_is_none_of_this_one() -> None:
    """A home has one key in all its runs, and a signature did not name its run. One member of two
    runs showed the end of the shorter one in the run under way. Peers that asked it were told that
    nothing was left to do."""
    other = "of another run"
    for false in (complete(agreed_in=other, trained_in=other), complete(trained_in=other)):
        fault = fault_of_end("a", false, SPEC)
        assert fault is not None and not isinstance(fault, RunComplete)
    assert isinstance(fault_of_end("a", complete(), SPEC), RunComplete)


class Seeker(Leads):
    """A seeker. `leads` names the peers that answer, and why each cannot be followed. None: it
    can."""

    leads: dict[str, UserError | None]
    asked: list[str]

    async def _join_found(self, peer_id: str, welcome: Welcome) -> Any:
        self.asked.append(peer_id)
        error = self.leads[peer_id]
        if error is not None:
            raise error
        return f"run through {peer_id}"

    async def look(self) -> Found | None:
        left = [peer for peer in self.leads if peer not in self._network.messenger.passed_over]
        return Found(left[0], complete(), "somewhere") if left else None


def seeker(home: Path, leads: dict[str, UserError | None], **settings: object) -> Seeker:
    network = network_of()
    passed_over = network.messenger.passed_over = {}
    network.messenger.pass_over = passed_over.__setitem__
    known = acquaintances_of(home, network, Past([], None), **settings)
    made = Seeker(Local(settings_of(home, **settings), DashboardHost()), network, known)
    made.leads, made.asked = leads, []
    return made


WITHHELD = UserError("the run cannot be learnt", exit_code=6)
COMPLETE = RunComplete("12", SPEC.total_steps)


def test_the_next_who_answers_is_followed(tmp_path: Path) -> None:
    liars = {"false": COMPLETE, "withholds": WITHHELD, "unshown": UserError("says so", exit_code=5)}
    daemon = seeker(tmp_path, {**liars, "member": None})
    assert asyncio.run(daemon.follow_first(daemon.look)) == "run through member"


def test_where_nobody_else_is_only_those_who_are_known_end_it(tmp_path: Path) -> None:
    known, stranger = peer_ids(tmp_path, 2)
    daemon = seeker(tmp_path, {stranger: COMPLETE})
    met = [acquaintance(known, ["/ip4/192.0.2.7/tcp/1"], 5)]
    daemon._acquaintances.memory = memory_of(tmp_path).met(met)
    assert asyncio.run(daemon.follow_first(daemon.look)) is None
    daemon._acquaintances.say_nobody_answers("12" * 32, 4.0, daemon.complete_by)
    told = daemon._acquaintances._local.status.reason
    assert stranger in told and SHOWS_END in told, "it waited without a word of that (501275)"
    daemon.require_nobody_known()
    daemon.leads = {known: COMPLETE}
    with pytest.raises(RunComplete):
        asyncio.run(daemon.follow_first(daemon.look))
    daemon._network.messenger.passed_over.clear()
    daemon.leads = {known: WITHHELD}
    assert asyncio.run(daemon.follow_first(daemon.look)) is None
    with pytest.raises(UserError, match="none can be joined: the run cannot be learnt"):
        daemon.require_nobody_known()


@pytest.mark.parametrize("could_go_on", [False, True])
def test_who_could_go_on_from_its_own_disk_is_told_how(tmp_path: Path, could_go_on: bool) -> None:
    """A volunteer's unit names the founder, who does not come back: the run stood still."""
    daemon = seeker(tmp_path, {})
    daemon._acquaintances.say_nobody_answers("12" * 32, 4.0, could_go_on=could_go_on)
    ((_, fix),) = daemon._acquaintances._local.status.troubles.present()
    assert ("without --initial-peers: it goes on from its own disk" in fix) is could_go_on


@pytest.mark.parametrize("is_service", [False, True])
@pytest.mark.parametrize("is_invited", [False, True])
def test_who_could_go_on_is_told_of_the_option_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_service: bool, is_invited: bool
) -> None:
    """A user who had typed `--invite` was told to leave out `--initial-peers`. Where all members
    ran a service, nobody was told where the service's option stands."""
    monkeypatch.setattr("p2p_dtfm.daemon.node.other_versions.is_a_service", lambda: is_service)
    (there,) = peer_ids(tmp_path, 1)
    given: dict[str, object] = {"initial_peers": (f"/ip4/192.0.2.7/tcp/4001/p2p/{there}",)}
    for typed, option in (("p2pi1-line", "invite"), ("", "initial_peers")):
        daemon = seeker(tmp_path, {}, invite=typed, **given)
        if is_invited:
            invited = run_spec(admission={"mode": "invited", "key": "ab" * 32, "founder": "x" * 52})
            daemon._acquaintances.memory = memory_of(tmp_path, invited)
        daemon._acquaintances.say_nobody_answers("12" * 32, 4.0, could_go_on=True)
        ((_, fix),) = daemon._acquaintances._local.status.troubles.present()
        if is_service:
            assert f"take {option} out of ~/.config/p2p-dtfm/service.toml" in fix
            assert "systemctl --user restart p2p-dtfm: it goes on from its own disk" in fix
        else:
            assert f"without --{option.replace('_', '-')}: it goes on from its own disk" in fix


def test_in_a_run_by_invitation_nobody_is_told_to_name_an_address(tmp_path: Path) -> None:
    """In such a run nobody is let in by an address."""
    daemon = seeker(tmp_path, {})
    invited = run_spec(admission={"mode": "invited", "key": "ab" * 32, "founder": "x" * 52})
    daemon._acquaintances.memory = memory_of(tmp_path, invited)
    for complete_by, could_go_on in (("", False), ("", True), ("somebody", False)):
        daemon._acquaintances.say_nobody_answers("12" * 32, 4.0, complete_by, could_go_on)
        ((_, fix),) = daemon._acquaintances._local.status.troubles.present()
        assert "--invite" in fix and "--initial-peers" not in fix


def test_who_comes_back_to_a_complete_run_is_told_that_the_model_is_here(tmp_path: Path) -> None:
    """The user was told to ask a member for a model that lay in the user's own home. Who was away
    at the end was not told of the older one that is there."""
    (known,) = peer_ids(tmp_path, 1)
    memory = memory_of(tmp_path, SPEC).met([acquaintance(known, ["/ip4/192.0.2.7/tcp/1"], 5)])
    over = RunComplete(memory.run_digest[:16], SPEC.total_steps)

    def told(home: Path, **settings: object) -> str:
        daemon = seeker(home, {known: over}, **settings)
        daemon._acquaintances.memory = memory
        with pytest.raises(RunComplete, match="is complete: all") as error:
            asyncio.run(daemon.follow_first(daemon.look))
        return str(error.value)

    assert "ask a member for the model" in told(tmp_path / "was away")
    home = tmp_path / "home"
    states = [LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))]
    root = place_of(home, memory) / "checkpoints"
    for step in (SPEC.total_steps - 1, SPEC.total_steps):
        for state in states:
            state.version = step
        save_layers(root, SPEC, step, 0, states)
        fixes = told(home, run="my-run.toml")
        if step < SPEC.total_steps:
            assert "ask a member for the model" in fixes
            assert f"after step {step} is here: p2p-dtfm export --home {home}" in fixes
    assert "ask a member" not in fixes
    assert f"the whole model is here: p2p-dtfm generate --home {home}" in fixes
    assert f"p2p-dtfm --home {home} --run my-run.toml --new" in fixes


def test_of_several_initial_peers_one_that_lies_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = peer_ids(tmp_path, 2)
    given = tuple(f"/ip4/192.0.2.7/tcp/{n}/p2p/{peer}" for n, peer in enumerate(names, 1))

    async def find_run(messenger: Any, *rest: object) -> tuple[str, Welcome]:
        left = [peer for peer in names if peer not in messenger.passed_over]
        if not left:
            raise UserError("no initial peer said which run it trains", exit_code=6)
        return left[0], complete()

    async def addresses() -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(following, "find_run", find_run)
    leads = {names[0]: COMPLETE, names[1]: None}
    for lead in (COMPLETE, WITHHELD):
        daemon = seeker(tmp_path, {**leads, names[0]: lead}, initial_peers=given)
        daemon._network.host = SimpleNamespace(addresses=addresses)  # type: ignore[assignment]
        assert asyncio.run(daemon.ask_which_run("")) == f"run through {names[1]}"
    daemon.leads = dict.fromkeys(names, COMPLETE)
    daemon._network.messenger.passed_over.clear()
    with pytest.raises(RunComplete):
        asyncio.run(daemon.ask_which_run(""))


def test_who_was_passed_over_is_not_asked_again() -> None:
    class Messenger:
        def __init__(self) -> None:
            self.passed_over = {"false": UserError("says that the run is complete")}

        async def ask(self, peer_id: str, *rest: object) -> bytes:
            raise AssertionError(peer_id)

    with pytest.raises(UserError, match="false: says that the run is complete"):
        asyncio.run(ask_welcome(Messenger(), ["false"], (), ""))  # type: ignore[arg-type]
