"""Tokens that were written outlive a process that is killed, wherever it is."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from data_examples import make_text

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data import ByteTokenizer, Wish, prepare
from p2p_dtfm.train.data.chat.prepare_chat import prepare_chat
from p2p_dtfm.train.data.chat.template import ChatForm
from p2p_dtfm.train.data.writing import journal as journal_module
from p2p_dtfm.train.data.writing import second_reading
from p2p_dtfm.train.data.writing.journal import JOURNAL_NAME, alone_in

SHARD_TOKENS = 1000

MORTAL = """
import os, signal, sys
from pathlib import Path
from p2p_dtfm.train.data import Wish, prepare
from p2p_dtfm.train.data import byte_pairs, prepare as _
from p2p_dtfm.train.data.writing import journal, second_reading

texts, out, vocabulary = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) or None
journal._EVERY_BYTES, second_reading._BATCH_PIECES = 1500, 3
TRACED = ("writing/journal.py", "writing/second_reading.py", "writing/kept_shards.py",
          "data/shard_files.py", "data/atomic_file.py", "data/prepare.py", "data/blob_store.py")

def child(last_line):
    lines = 0
    def of_line(frame, event, argument):
        nonlocal lines
        lines += 1
        if lines == last_line:
            os.kill(os.getpid(), signal.SIGKILL)
        return of_line
    def of_call(frame, event, argument):
        return of_line if frame.f_code.co_filename.endswith(TRACED) else None
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        said = os.fdopen(read).read()
        status = os.waitpid(process, 0)[1]
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), said,
              flush=True)
        return
    encoded = 0
    whole = second_reading._batches
    def counted(pieces):
        nonlocal encoded
        for batch in whole(pieces):
            encoded += sum(len(each.piece.text) for each in batch)
            yield batch
    second_reading._batches = counted
    told = []
    sys.settrace(of_call)
    try:
        prepare([texts], out, vocabulary=vocabulary, shard_tokens=1000,
                wish=Wish("rps_doc_word_count > 1"), say=told.append)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.settrace(None)
    os.write(write, repr((lines, encoded, told)).encode())
    os._exit(0)

for line in sys.stdin:
    child(int(line))
"""


class Mortal:
    """A process whose children prepare the same data, each to the end or to some line of it."""

    def __init__(self, texts: Path, out: Path, vocabulary: int) -> None:
        command = [sys.executable, "-B", "-c", MORTAL, str(texts), str(out), str(vocabulary)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, last_line: int = 0) -> tuple[int, int, list[str]] | None:
        """None if it was killed at that line; else how many lines it took, how many bytes of text
        it encoded, and what it said."""
        status, said = self._run(last_line)
        if status == signal.SIGKILL:
            return None
        assert status == 0, said
        lines, encoded, told = eval(said)
        return lines, encoded, told

    def to_the_end(self) -> tuple[int, int, list[str]]:
        ended = self.run()
        assert ended is not None
        return ended

    def _run(self, line: int) -> tuple[int, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        status, _, said = self._process.stdout.readline().strip().partition(" ")
        return int(status), said

    def __enter__(self) -> "Mortal":
        return self

    def __exit__(self, *problem: object) -> None:
        self._process.communicate(timeout=60)


def content_of(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("vocabulary", [0, 400])
def test_killed_at_any_line_and_again_it_comes_to_the_same_bytes(
    texts: Path, tmp_path: Path, vocabulary: int
) -> None:
    out, chance = tmp_path / "out", random.Random(vocabulary)
    with Mortal(texts, out, vocabulary) as mortal:
        all_lines, _, told = mortal.to_the_end()
        assert not told
        whole = content_of(out)
        assert len(whole) > 8 and not any(".tmp" in name for name in whole)
        went_on = 0
        for _ in range(6):
            shutil.rmtree(out)
            while (ended := mortal.run(chance.randrange(1, all_lines))) is None:
                if (out / "manifest.json").exists():
                    assert content_of(out).items() >= whole.items(), "nothing of it is missing"
            went_on += any("goes on where it was interrupted" in text for text in ended[2])
            assert content_of(out) == whole
        assert went_on, "some of them had a journal to go on from"


@pytest.mark.parametrize("vocabulary", [0, 400])
def test_what_was_written_is_not_encoded_again(
    texts: Path, tmp_path: Path, vocabulary: int
) -> None:
    with Mortal(texts, tmp_path / "out", vocabulary) as mortal:
        all_lines, text_bytes, _ = mortal.to_the_end()
        shutil.rmtree(tmp_path / "out")
        assert mortal.run(all_lines * 4 // 5) is None
        journal = json.loads((tmp_path / "out" / JOURNAL_NAME).read_text())
        _, encoded, told = mortal.to_the_end()
    assert encoded == text_bytes - journal["place"]["text_bytes"] < text_bytes * 2 // 3
    assert any("goes on where it was interrupted" in text for text in told)
    assert bool(vocabulary) == any("takes the tokens that were learnt" in text for text in told)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_EVERY_BYTES", 1500)
    monkeypatch.setattr(second_reading, "_BATCH_PIECES", 3)


def interrupted(texts: Path, out: Path, vocabulary: int | None = None) -> None:
    def stop(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "writing" and done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([texts], out, shard_tokens=SHARD_TOKENS, progress=stop, vocabulary=vocabulary)
    assert (out / JOURNAL_NAME).exists()


def go_on(texts: Path, out: Path, **options: object) -> list[str]:
    told: list[str] = []
    prepare([texts], out, shard_tokens=SHARD_TOKENS, say=told.append, **options)  # type: ignore[arg-type]
    return told


def test_only_what_fits_is_gone_on_with(texts: Path, tmp_path: Path, often: None) -> None:
    """Other text of the same size and time, another wish, and files that are not as they were."""
    whole = tmp_path / "whole"
    go_on(texts, whole)

    def change_text(out: Path) -> None:
        path = texts / "39.txt"
        status = path.stat()
        path.write_text(make_text(800, 39).replace("peer", "pear"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def damage_open(out: Path) -> None:
        number = json.loads((out / JOURNAL_NAME).read_text())["place"]["train"]["open"]["number"]
        path = out / "blobs" / f".tmp-writing-train-{number:06}"
        path.write_bytes(b"x" + path.read_bytes()[1:])

    def damage_full(out: Path) -> None:
        path = next(each for each in (out / "blobs").iterdir() if not each.name.startswith("."))
        path.write_bytes(b"x" + path.read_bytes()[1:])

    def tear_journal(out: Path) -> None:
        path = out / JOURNAL_NAME
        path.write_bytes(path.read_bytes()[:-9])

    reasons = {
        damage_open: "the open shard of train is damaged",
        damage_full: "is missing or damaged",
        tear_journal: "its journal cannot be read",
        change_text: "it was of other text",
    }
    for number, (change, reason) in enumerate(reasons.items()):
        out = tmp_path / f"out{number}"
        interrupted(texts, out)
        change(out)
        (told,) = go_on(texts, out)
        assert reason in told and "written anew" in told
        if change is change_text:
            shutil.rmtree(whole)
            go_on(texts, whole)
        assert content_of(out) == content_of(whole)
    interrupted(texts, out_of_other := tmp_path / "other")
    assert "other options" in go_on(texts, out_of_other, held_out_fraction=0.2)[0]


def test_what_was_written_of_another_text_is_not_gone_on_with(tmp_path: Path, often: None) -> None:
    """A file changed while its tokens were written, and was then put back as it had been. The
    tokens of the other text stayed among those of the file."""
    path, out, text = tmp_path / "one.txt", tmp_path / "out", make_text(20_000)
    path.write_text(text)
    go_on(path, tmp_path / "whole", held_out_fraction=0.3)

    def spoil(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "reading" and done_bytes == total_bytes:
            path.write_text(text.replace("peer", "pear"))

    with pytest.raises(UserError, match="changed while it was being read"):
        go_on(path, out, held_out_fraction=0.3, progress=spoil)
    path.write_text(text)
    go_on(path, out, held_out_fraction=0.3)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_learnt_tokenizer_that_is_gone_is_learnt_again(
    texts: Path, tmp_path: Path, often: None
) -> None:
    go_on(texts, tmp_path / "whole", vocabulary=400)
    interrupted(texts, out := tmp_path / "out", vocabulary=400)
    (out / "blobs" / json.loads((out / JOURNAL_NAME).read_text())["tokenizer"]).unlink()
    assert "the tokenizer that was learnt" in go_on(texts, out, vocabulary=400)[0]
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_disk_that_fills_up_under_the_journal_loses_nothing(
    texts: Path, tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on(texts, tmp_path / "whole")
    out, saved = tmp_path / "out", 0
    written = journal_module.write_atomically

    def full(path: Path, payload: bytes) -> None:
        nonlocal saved
        saved += 1
        if saved > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, payload)

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "write_atomically", full)
        with pytest.raises(UserError, match="No space left") as caught:
            go_on(texts, out)
    assert "free disk space" in str(caught.value.fixes)
    kept = json.loads((out / JOURNAL_NAME).read_text())["place"]["text_bytes"]
    assert kept > 5000
    assert "goes on where it was interrupted" in go_on(texts, out)[0]
    assert content_of(out) == content_of(tmp_path / "whole")


def test_conversations_in_its_place_leave_nothing_of_it(
    texts: Path, tmp_path: Path, often: None
) -> None:
    interrupted(texts, out := tmp_path / "out")
    rows = [{"prompt": f"what is {n}?", "completion": f"{n} it is"} for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prepare_chat([path], out, ByteTokenizer(), ChatForm(), context=64)
    assert not [name for name in content_of(out) if ".tmp" in name]


def test_what_was_begun_and_given_up_leaves_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many documents it is gigabytes, hidden beside what came after."""
    out, path = tmp_path / "out", tmp_path / "rows.jsonl"
    rows = [{"prompt": f"what is {n}?", "completion": f"{n} it is"} for n in range(600)]
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("p2p_dtfm.train.data.chat.prepare_chat.SHARD_TOKENS", 1000)

    def interrupt(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "writing" and done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    for made in (
        lambda: prepare([texts], out, wish=Wish(duplicates="exact"), progress=interrupt),
        lambda: prepare_chat(
            [path], out, ByteTokenizer(), ChatForm(), context=64, progress=interrupt
        ),
    ):
        with pytest.raises(KeyboardInterrupt):
            made()
        assert content_of(out)
    prepare([texts], out)
    prepare([texts], tmp_path / "calm")
    assert content_of(out) == content_of(tmp_path / "calm")


def test_two_do_not_write_at_once(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with alone_in(out), pytest.raises(UserError, match="another process is preparing data"):
        prepare([texts], out)
    prepare([texts], out)


def test_who_comes_later_does_not_replace_what_came_meanwhile(texts: Path, tmp_path: Path) -> None:
    """Two commands with one --out, which both found it empty: the second took the first one's
    result away without a word."""
    out, path = tmp_path / "out", tmp_path / "rows.jsonl"
    rows = [{"prompt": f"what is {n}?", "completion": f"{n} it is"} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    first: list[dict[str, bytes]] = []

    def meanwhile(done_bytes: int, total_bytes: int, stage: str) -> None:
        if not first and stage == "reading":
            first.append({})
            prepare_chat([path], out, ByteTokenizer(), ChatForm(), context=64)
            first[0] = content_of(out)

    with pytest.raises(UserError, match="holds prepared data already"):
        prepare([texts], out, progress=meanwhile)
    assert content_of(out) == first[0]


def test_conversations_are_not_written_beside_others(tmp_path: Path) -> None:
    """They removed what the other command was writing."""
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_text(json.dumps({"prompt": "what?", "completion": "that"}))
    out.mkdir()
    with alone_in(out), pytest.raises(UserError, match="another process is preparing data"):
        prepare_chat([path], out, ByteTokenizer(), ChatForm(), context=64)
