"""Pieces of a transcript for other members, and members that give something else."""

import asyncio
import base64
import contextvars
import errno
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.lineage import Lineage
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed, signing_in
from p2p_dtfm.core.protocol.snapshot import founding_snapshot
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.transcript.checking import NotTrue
from p2p_dtfm.core.transcript.earlier import LINE_LIMIT_BYTES, EarlierSteps
from p2p_dtfm.core.transcript.entries import FORMAT, Began, Committed, TookOver, entry_of, line_of
from p2p_dtfm.daemon.peers.wire import TranscriptPiece, TranscriptRequest
from p2p_dtfm.daemon.proof import of_others, transcript_file
from p2p_dtfm.daemon.proof.of_others import StepsOfOthers, answer_with_piece
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, Transcript, TranscriptLines
from p2p_dtfm.daemon.telemetry.contribution import FILE, Contributions
from p2p_dtfm.net.contacts.identity import identity_of_seed, verify
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.ports import disk
from tests.core.builders import WORKLOAD, record, run_spec
from tests.core.planning import Peer, name_of, snapshot

SHOT = snapshot([Peer()])
SPEC = run_spec()
LAYERS = SHOT.workload.layer_count
LAYERS_OF_SPEC = SPEC.model.layer_count


def given(transcript: Transcript, from_byte: int) -> TranscriptPiece:
    reply = asyncio.run(answer_with_piece(transcript, TranscriptRequest(from_byte)))
    return decode(reply, TranscriptPiece)


def test_pieces_are_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_others, "PIECE_BYTES", 100)
    transcript = Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
    whole = (tmp_path / FILE_NAME).read_bytes()
    assert transcript.told_bytes == len(whole) > 100
    pieces = [given(transcript, at) for at in range(0, len(whole), 100)]
    assert b"".join(piece.content for piece in pieces) == whole
    assert {piece.total_bytes for piece in pieces} == {len(whole)}
    for at in (-1, -(1 << 63), len(whole), (1 << 63) - 1):
        assert given(transcript, at) == TranscriptPiece(len(whole), b"")
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("a line that is being written")
    assert given(transcript, len(whole)).content == b"", "only of whole lines"


def test_who_keeps_none_gives_none_though_it_did_once(tmp_path: Path) -> None:
    Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
    assert given(Transcript(tmp_path / FILE_NAME, SPEC, 0), 0) == TranscriptPiece(0, b"")


class Member:
    """A messenger to members that all answer alike."""

    def __init__(self, answer: TranscriptPiece | bytes | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []

    async def ask(self, peer_id: str, message: TranscriptRequest, deadline_s: float) -> bytes:
        self.asked.append((peer_id, message.from_byte))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, bytes) else encode(self.answer)


@pytest.mark.parametrize(
    ("answer", "asked_each"),
    [
        (Unreachable("m", "no answer"), 1),
        (Refused("m", "of another version"), 1),
        (b"\xc1 no message", 1),
        (TranscriptPiece(0, b""), 1),
        (TranscriptPiece(-5, b"x"), 1),
        (TranscriptPiece(1 << 62, b""), 1),
        (TranscriptPiece(1 << 62, b"x"), 1),
        (TranscriptPiece(1 << 62, b"x" * 1000), 10),
        (TranscriptPiece(1 << 62, b"\n" * 1000), 10),
        (TranscriptPiece(1 << 62, b"x" * (1 << 20)), 1),
        (TranscriptPiece(2000, b"AAAA\n" * 200), 2),
    ],
)
def test_what_is_no_transcript_is_given_up_within_bounds(
    answer: Any,
    asked_each: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.0)
    monkeypatch.setattr(of_others, "PIECE_EVERY_S", 0.0)
    monkeypatch.setattr(of_others, "LIMIT_BYTES", 10_000)
    monkeypatch.setattr(of_others, "PIECE_BYTES", 1000)
    contributions = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    contributions.view_took_over(View(SHOT, compute_plan(SHOT)), 7)
    messenger: Any = Member(answer)
    steps = StepsOfOthers(messenger, SPEC, contributions)
    members = [f"member {number}" for number in range(20)]
    with caplog.at_level(logging.INFO, "p2p_dtfm"):
        asyncio.run(asyncio.wait_for(steps.learn(lambda: members, Lineage), 30))
    assert len(messenger.asked) == asked_each * of_others.MEMBERS_ASKED
    assert contributions.missing_steps == 7
    assert not caplog.records, "it gives up quietly"


def test_who_was_there_from_the_beginning_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.0)
    contributions = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    contributions.view_took_over(View(SHOT, compute_plan(SHOT)), 0)
    messenger: Any = Member(TranscriptPiece(0, b""))
    steps = StepsOfOthers(messenger, SPEC, contributions)
    asyncio.run(steps.learn(lambda: ["another"], Lineage))
    assert messenger.asked == []


def test_who_lacks_no_step_asks_whether_those_have_stayed_that_it_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others had done its last steps again, as after a liar's bar, when it was back at one of
    these. It lacked none, asked nobody, and went on counting them for itself."""
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.0)
    view, messenger = View(SHOT, compute_plan(SHOT)), Member(TranscriptPiece(0, b""))
    killed = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    killed.view_took_over(view, 0)
    for step in range(5):
        killed.committed(step, 0, 0)
    killed.write()
    back = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    back.view_took_over(view, 4)
    assert (back.missing_steps, back.unproven_steps) == (0, 4)
    of = StepsOfOthers(cast(Any, messenger), SPEC, back)
    asyncio.run(of.learn(lambda: ["another"], Lineage))
    assert messenger.asked == [("another", 0)]
    back.settle({step: {"another": 1} for step in range(4)})
    assert back.unproven_steps == 0
    asyncio.run(of.learn(lambda: ["another"], Lineage))
    assert len(messenger.asked) == 1, "all is shown"


def test_who_was_away_asks_again_though_its_process_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that had slept never heard who had computed the steps meanwhile."""
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.0)
    view, messenger = View(SHOT, compute_plan(SHOT)), Member(TranscriptPiece(0, b""))
    given = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    given.view_took_over(view, 0)
    of, learnt = StepsOfOthers(cast(Any, messenger), SPEC, given), list[int]()

    async def scene() -> None:
        keeps = asyncio.create_task(
            of.keep(lambda: ["another"], Lineage, lambda: learnt.append(len(messenger.asked)))
        )
        for times in (1, 2):
            while len(learnt) < times:
                await asyncio.sleep(0)
            given.left_views()
            given.view_took_over(view, 7)
        keeps.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert learnt[:2] == [0, 1]


def test_who_comes_back_after_a_while_asks_though_its_old_view_names_others_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its next life a peer knows the members of the view that has gone on without it. It
    looked by these for steps before it was back, found that it lacks none, and asked nobody."""
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.01)
    view, messenger = View(SHOT, compute_plan(SHOT)), Member(TranscriptPiece(0, b""))
    contributions = Contributions(tmp_path / FILE, SPEC, LAYERS, name_of(0))
    contributions.view_took_over(view, 0)
    of, begun = StepsOfOthers(cast(Any, messenger), SPEC, contributions), asyncio.Event()

    async def scene() -> None:
        keeps = asyncio.create_task(of.keep(lambda: ["another"], Lineage, begun.set))
        await begun.wait()
        contributions.left_views()
        await asyncio.sleep(0.2)  # it waits to be let in
        assert messenger.asked == []
        contributions.view_took_over(view, 7)
        while not messenger.asked:
            await asyncio.sleep(0.01)
        keeps.cancel()

    asyncio.run(asyncio.wait_for(scene(), 5))
    assert messenger.asked == [("another", 0)]


def test_a_line_without_an_end_is_given_up_before_it_fills_the_memory() -> None:
    """A member may give 64 MiB. Of these 665 MB were made, and nothing else ran for a second."""
    reader, statements = EarlierSteps(verify, SPEC), (LINE_LIMIT_BYTES // 4) // 7
    empty = encode(Signed("", "", b"", b""))
    head = encode([Committed(())])[:-1] + b"\xdd" + statements.to_bytes(4, "big")
    reader.take(line_of(Began(FORMAT, SPEC.canonical_bytes())).encode() + b"\n")
    whole = base64.b64encode(head + empty * statements)
    assert len(whole) < LINE_LIMIT_BYTES
    for at in range(0, len(whole), of_others.PIECE_BYTES):
        reader.take(whole[at : at + of_others.PIECE_BYTES])
    with pytest.raises(NotTrue, match="no view"):  # it was read as what it is
        reader.take(b"\n")
    reader = EarlierSteps(verify, SPEC)
    with pytest.raises(NotTrue, match="a line of more than"):
        for _ in range(LINE_LIMIT_BYTES // of_others.PIECE_BYTES + 1):
            reader.take(b"A" * of_others.PIECE_BYTES)
    with pytest.raises(NotTrue, match="a line of more than"):
        EarlierSteps(verify, SPEC).take(b"A" * (LINE_LIMIT_BYTES + 1) + b"\n")


def forged_transcript(token_count: int) -> bytes:
    """A transcript by a forger with the keys of both members. Their first step counts so many
    tokens each."""
    founders = [identity_of_seed(bytes([number]) * 32) for number in (1, 2)]
    founders.sort(key=lambda it: it.peer_id)
    half = SPEC.microbatches_per_step // 2
    pipelines = (
        Pipeline((Stage(it.peer_id, 0, LAYERS_OF_SPEC, 1),), number * half, half)
        for number, it in enumerate(founders)
    )
    plan = Plan(tuple(pipelines), (), 1)
    records = [record(it.peer_id) for it in founders]
    run = SPEC.digest()
    shot = founding_snapshot(run, WORKLOAD, records)
    members = members_digest(shot.members)
    ready = [
        stated(Ready(member, shot.view_id, plan.digest(), members), signing_in(run, it.sign))
        for member, it in zip(shot.members, founders, strict=True)
    ]
    terms, sums = terms_of(SPEC), {0: (bytes(16), bytes(16))}
    said = []
    for it in founders:
        held_out = terms.held_out_tokens(0, plan, it.peer_id)
        prepared = Prepared(
            shot.view_id, 0, it.peer_id, {0: 1.0}, 0.0, token_count, 0.0, held_out, None, "", sums
        )
        said.append(sign_prepared(prepared, signing_in(run, it.sign)))
    entries = (
        Began(FORMAT, SPEC.canonical_bytes()),
        TookOver(shot, plan, certified(shot.view_id, shot.members, ready), 0),
        Committed(tuple(said)),
    )
    return "".join(line_of(entry) + "\n" for entry in entries).encode()


def test_a_transcript_that_counts_more_tokens_than_there_are_numbers_is_not_true() -> None:
    """The rest of a failed step may count any part of its tokens, so a transcript's first step was
    not checked. The sum of two such counts had no bytes: the daemon that had asked for it ended."""
    reader = EarlierSteps(verify, SPEC)
    reader.take(forged_transcript(64))
    assert [step.step for step in reader.led.values()] == [0]
    with pytest.raises(NotTrue, match="more than the step has"):
        EarlierSteps(verify, SPEC).take(forged_transcript((1 << 64) - 1))


class _FullNow(disk.MachineDisk):
    """A disk that takes half of a line while `is_full`."""

    is_full = False

    def append(self, path: Path, text: str) -> None:
        if self.is_full:
            super().append(path, text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(path, text)


def test_a_disk_that_was_full_for_a_moment_costs_no_view(tmp_path: Path) -> None:
    """The rest of the view was lost with its line. So was the next line, as it began within what
    was written of that one."""
    machine, path = _FullNow(), tmp_path / FILE_NAME
    began, taken, *steps = map(entry_of, forged_transcript(64).splitlines())
    assert isinstance(taken, TookOver) and isinstance(steps[0], Committed)

    def scene() -> None:
        disk.live_by(machine)
        transcript = Transcript(path, SPEC, 1 << 20)
        machine.is_full = True
        transcript.took_over(View(taken.snapshot, taken.plan, taken.certificate), taken.step)
        transcript.committed(0, steps[0].signed)
        machine.is_full = False
        transcript.committed(0, steps[0].signed)
        assert transcript.size_bytes == path.stat().st_size

    contextvars.copy_context().run(scene)
    lines = TranscriptLines(path)
    assert list(lines.entries()) == [began, taken, *steps]
    assert 0 < lines.damaged <= 2


def test_what_an_earlier_version_has_written_is_put_aside_and_nothing_added_to_it(
    tmp_path: Path,
) -> None:
    """Nobody could have read what came after it either."""
    path = tmp_path / FILE_NAME
    old = line_of(Began(FORMAT - 1, SPEC.canonical_bytes())) + "\nand so on\n"
    path.write_text(old)
    transcript = Transcript(path, SPEC, 1 << 20)
    assert list(TranscriptLines(path).entries()) == [Began(FORMAT, SPEC.canonical_bytes())]
    assert transcript.size_bytes == path.stat().st_size
    assert (tmp_path / "transcript.before").read_text() == old
    again = Transcript(path, SPEC, 1 << 20)
    assert again.size_bytes == transcript.size_bytes, "and once only"


def test_of_a_run_with_audits_what_was_written_before_claims_told_of_norms_is_not_read(
    tmp_path: Path,
) -> None:
    """The transcript was read as if its signers had left out what was due, and these were blamed
    for it. For other runs nothing has changed."""
    audited = run_spec(audit={"rate": 0.5})
    path = tmp_path / FILE_NAME
    path.write_text(line_of(Began(FORMAT, audited.canonical_bytes())) + "\n")
    reader = EarlierSteps(verify, audited)
    with pytest.raises(NotTrue, match="format 2, and this version reads 3"):
        reader.take(path.read_bytes())
    Transcript(path, audited, 1 << 20)
    assert list(TranscriptLines(path).entries()) == [Began(3, audited.canonical_bytes())]
    EarlierSteps(verify, audited).take(path.read_bytes())
    plain = line_of(Began(FORMAT, SPEC.canonical_bytes())).encode() + b"\n"
    EarlierSteps(verify, SPEC).take(plain)


def test_what_a_power_cut_left_of_the_first_line_is_put_aside(tmp_path: Path) -> None:
    """Nobody took for true what came after it, for as long as the run lasted."""
    path = tmp_path / FILE_NAME
    path.write_bytes(forged_transcript(64)[:60])
    Transcript(path, SPEC, 1 << 20)
    assert list(TranscriptLines(path).entries()) == [Began(FORMAT, SPEC.canonical_bytes())]
    assert len((tmp_path / "transcript.before").read_bytes()) == 60
    path.write_bytes(b"")
    Transcript(path, SPEC, 1 << 20)
    assert list(TranscriptLines(path).entries()) == [Began(FORMAT, SPEC.canonical_bytes())]


def test_what_a_full_disk_did_not_take_is_written_before_what_rests_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The beginning was lost, or the view. Nobody, its own user included, took for true what came
    once there was room again."""
    _, took_over, committed = (entry_of(line) for line in forged_transcript(64).splitlines())
    assert isinstance(took_over, TookOver) and isinstance(committed, Committed)
    view = View(took_over.snapshot, took_over.plan, took_over.certificate)
    append, full = disk.append, [True]

    def append_if_there_is_room(path: Path, text: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text)

    monkeypatch.setattr(disk, "append", append_if_there_is_room)
    transcript = Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
    transcript.took_over(view, 0)
    transcript.committed(0, committed.signed)
    assert transcript.told_bytes == 0
    assert caplog.text.count("is not written") == 1, "once: there is a line for each step"
    full.clear()
    transcript.committed(0, committed.signed)
    assert (tmp_path / FILE_NAME).read_bytes() == forged_transcript(64)
    assert transcript.told_bytes == len(forged_transcript(64))
    full.append(True)
    transcript.committed(1, committed.signed)
    assert caplog.text.count("is not written") == 2, "there was room in between"


def test_the_end_of_a_torn_line_is_owed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, took_over, _ = forged_transcript(64).splitlines(keepends=True)
    entry = entry_of(took_over)
    assert isinstance(entry, TookOver)
    (tmp_path / FILE_NAME).write_bytes(began + b"torn")

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "append", refuse)
        transcript = Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
    transcript.took_over(View(entry.snapshot, entry.plan, entry.certificate), 0)
    assert (tmp_path / FILE_NAME).read_bytes() == began + b"torn\n" + took_over


def test_a_disk_that_stays_full_costs_no_more_memory_than_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, took_over, _ = (entry_of(line) for line in forged_transcript(64).splitlines())
    assert isinstance(took_over, TookOver)
    view = View(took_over.snapshot, took_over.plan, took_over.certificate)
    monkeypatch.setattr(transcript_file, "OWED_LIMIT_BYTES", 10_000)

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "append", refuse)
        transcript = Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
        for step in range(20):
            transcript.took_over(view, step)
    transcript.took_over(view, 20)
    assert not (tmp_path / FILE_NAME).exists(), "it ends rather than go on without a view"


def test_a_step_that_others_had_committed_is_written_before_the_next_view(tmp_path: Path) -> None:
    """A peer that had not committed the step when a member failed never wrote it. A stranger could
    not tell that from a step that was left out, and any model could be put in there."""
    began, taken, step = map(entry_of, forged_transcript(64).splitlines())
    assert isinstance(taken, TookOver) and isinstance(step, Committed)
    view = View(taken.snapshot, taken.plan, taken.certificate)
    restart = Restart(prepared=step.signed, rolled_view=view.id)
    transcript = Transcript(tmp_path / FILE_NAME, SPEC, 1 << 20)
    transcript.rolled_forward(restart, 0)  # of a view that it was not in
    transcript.took_over(view, 0)
    transcript.rolled_forward(Restart(prepared=step.signed), 0)  # nothing was
    transcript.rolled_forward(Restart(rolled_view=view.id), 0)  # nobody has shown it
    transcript.rolled_forward(restart, 0)
    transcript.rolled_forward(restart, 0)  # it is there
    assert list(TranscriptLines(tmp_path / FILE_NAME).entries()) == [began, taken, step]
