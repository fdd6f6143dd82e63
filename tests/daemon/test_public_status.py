"""The page of a node that trains nothing: whom the node asks, whom it believes, and what it says
when nobody answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.bootstrap_node import public_page
from p2p_dtfm.daemon.peers.facts import public_status
from p2p_dtfm.daemon.peers.facts.public_status import StatusHeard, StatusTeller
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.web.public_facts import (
    DOTS_LIMIT,
    TEXT_LIMIT,
    TOLD_LIMIT_BYTES,
    Dot,
    PublicFacts,
    facts_told,
    nothing_heard,
)
from p2p_dtfm.web.public_page import public_html
from p2p_dtfm.web.state import Sample
from tests.net.net_support import hosts, run, until

RUN = "ab" * 32
LINE = "p2p-dtfm --initial-peers NODE --run-digest RUN"


def told(**changes: Any) -> PublicFacts:
    """The answer of a member that trains."""
    facts = msgspec.structs.replace(
        nothing_heard(RUN, "p2p-dtfm --invite of-the-member", ""), run="a-run", state="training"
    )
    return msgspec.structs.replace(facts, **changes)


class Shelf:
    """A directory in which these hosts are present, in a run whose spec the first one has signed.
    The digest names the signed content, and not its signer."""

    def __init__(self, peers: Sequence[Host]) -> None:
        self.peers = list(peers)

    async def fetch_run(self, run_digest: str) -> Signed:
        return Signed(self.peers[0].peer_id, "run", b"", b"")

    async def present_peers(self, run_digest: str) -> list[Presence]:
        return [Presence(it.peer_id, 1, await it.addresses(), RUN) for it in self.peers]


def test_it_shows_the_middle_word_and_says_when_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_status, "MADE_ANEW_S", 0.0)

    async def play() -> None:
        async with hosts(tmp_path, 5) as (node, signer, *members):
            heard = StatusHeard(node, Shelf([signer, *members]), RUN, LINE)  # type: ignore[arg-type]
            await heard.ask()
            page = public_html(heard.facts())
            assert "--tell-status" in page and RUN[:16] in page, "nobody allows it yet"
            assert "<progress" not in page and " of 0" not in page, "no figures of what nobody told"
            tellers = [
                await StatusTeller(host, lambda step=step: told(step=step, note="buy this")).ready()  # type: ignore[misc]
                for host, step in zip(members, (700, 10**9, 720), strict=True)
            ]
            await heard.ask()
            facts = heard.facts()
            assert (facts.step, facts.note) == (720, ""), "who invents a step is at one end"
            assert facts.join_line == LINE, "and no member's address is shown"
            own = await StatusTeller(signer, lambda: told(step=710)).ready()
            await heard.ask()
            assert heard.facts().step == 720, "who has signed the run spec may be anybody"
            for teller in (*tellers, own):
                await teller.close()
            monkeypatch.setattr(public_status, "STALE_S", 0.0)
            facts = heard.facts()
            assert facts.state == "nobody answers" and facts.step == 720
            assert "0 s old" in public_html(facts), "it is shown with its age"

    run(play())


def test_an_address_that_is_none_does_not_stop_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a bug stop the page: each time the members are asked anew."""
    monkeypatch.setattr(public_status, "ASK_EVERY_S", 0.05)

    async def play() -> None:
        async with hosts(tmp_path, 2) as (node, founder):
            shelf = Shelf([founder])
            stranger = Identity.load_or_create(tmp_path / "stranger.key").peer_id
            bad = Presence(stranger, 1, ("/ip4/203.0.113.7/tcp/0000019999999",), RUN)
            asked = 0

            async def present_peers(run_digest: str) -> list[Presence]:
                nonlocal asked
                asked += 1
                if asked == 1:
                    raise KeyError("a bug")
                return [bad, Presence(founder.peer_id, 1, await founder.addresses(), RUN)]

            shelf.present_peers = present_peers  # type: ignore[method-assign]
            await StatusTeller(founder, lambda: told(step=7, peers=1)).ready()
            heard = StatusHeard(node, shelf, RUN, LINE)  # type: ignore[arg-type]
            keeping = asyncio.create_task(heard.keep())
            await until(lambda: asked > 3, "it goes on to ask")
            assert heard.facts().step == 7 and not keeping.done()
            keeping.cancel()

    run(play())


def test_whom_it_asks_is_bounded_and_changes(tmp_path: Path) -> None:
    """Of a thousand members few allow it. The node asks again those that answered, and others by
    lot."""

    async def play() -> None:
        async with hosts(tmp_path, 1) as (node,):
            heard = StatusHeard(node, Shelf([node]), RUN, LINE)  # type: ignore[arg-type]
            present = [Presence(f"peer-{at}", 1, (), RUN) for at in range(1000)]
            heard._tellers = [f"peer-{at}" for at in (*range(20, 40), 7)]
            chosen = [peer.peer_id for peer in heard._chosen(present)]
            assert len(set(chosen)) == public_status.ASKED_LIMIT
            assert sum(peer in heard._tellers for peer in chosen[:4]) == 4
            others = {peer.peer_id for _ in range(20) for peer in heard._chosen(present)[4:]}
            assert len(others) > 40

    run(play())


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "cd" * 32},
        {"step": -1},
        {"tokens_per_s": 1e300},
        {"losses": (1.0,)},
        {"loss_steps": (1,) * 401, "losses": (1.0,) * 401},
        {"held_out_steps": (10**18,), "held_out_losses": (1.0,)},
        {"dots": (Dot(0.0, 7.0, 0),)},
        {"dots": (Dot(0.0, 0.0, -1),)},
        {"dots": (Dot(0.0, 0.0, 0),) * (DOTS_LIMIT + 1)},
        {"samples": (Sample(1, "x" * (TEXT_LIMIT + 1)),)},
        {"samples": (Sample(1, "x"),) * 4},
        {"marks": ("x",) * 9},
        {"run": "x" * TOLD_LIMIT_BYTES},
    ],
)
def test_what_cannot_be_is_not_drawn(changes: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        facts_told(msgspec.json.encode(told(**changes)), RUN)


def test_a_number_beyond_all_is_the_fault_of_who_says_it() -> None:
    """One of the members asked together gave such a number. It ended the question, and the page
    stood still."""
    digits = b"1" + b"0" * 400
    body = msgspec.json.encode(told(step=77)).replace(b'"step":77', b'"step":' + digits)
    assert digits in body
    with pytest.raises(PeerFault, match="a number"):
        facts_told(body, RUN)


def test_what_is_no_status_is_a_fault_and_the_rest_is_text() -> None:
    for body in (b"", b"[" * 100_000, b"{}", b'{"run": 1}', b"\xff"):
        with pytest.raises(PeerFault):
            facts_told(body, RUN)
    script = "<script>alert(1)</script>"
    facts = facts_told(
        msgspec.json.encode(
            told(run=script, state=script, marks=(script,), samples=(Sample(3, script),))
        ),
        RUN,
    )
    assert "<script" not in public_html(facts)


def test_the_page_needs_the_run_that_it_is_of() -> None:
    assert public_page(0, "") is None
    page = public_page(8080, RUN.upper())
    assert page is not None and page.run_digest == RUN
    for digest in ("", RUN[:16], "g" * 64):
        with pytest.raises(UserError, match="of one run"):
            public_page(8080, digest)


def test_many_questions_make_one_answer(tmp_path: Path) -> None:
    async def play() -> None:
        made = []

        def facts() -> PublicFacts:
            made.append(1)
            return told()

        async with hosts(tmp_path, 1) as (host,):
            teller = StatusTeller(host, facts)
            await asyncio.gather(*(teller._answer("somebody", b"") for _ in range(50)))
        assert len(made) == 1

    run(play())
