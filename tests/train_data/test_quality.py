"""Which documents are taken: signals, rules about them, duplicates, and files that others made."""

import errno
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data import Manifest, Skipped, Wish, parse_manifest, prepare
from p2p_dtfm.train.data.documents import read_documents
from p2p_dtfm.train.data.quality import choosing
from p2p_dtfm.train.data.quality.expression import parse_rules
from p2p_dtfm.train.data.quality.signals import COMPUTED, Text, compute
from p2p_dtfm.train.data.quality.work_file import WORK_NAME, WorkFile

POEM = "The cat sat. The cat ran... #1\nNO MORE {of} the cat sat the cat!\n"


def text_of(seed: int, words: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"w{chance.randrange(5000)}" for _ in range(words))


def write_rows(path: Path, texts: list[str], field: str = "raw_content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = "".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        payload = gzip.compress(payload, 1)
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(payload) // 2  # two frames, one after the other
        press = zstandard.ZstdCompressor().compress
        payload = press(payload[:half]) + press(payload[half:])
    path.write_bytes(payload)
    return path


def write_signals(path: Path, rows: list[dict[str, list]], first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"2023-06/0000/en_head.json.gz/{number}", "quality_signals": row})
        for number, row in enumerate(rows, first)
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def learnt(out: Path, manifest: Manifest) -> set[str]:
    stream = b"".join((out / "blobs" / shard.digest).read_bytes() for shard in manifest.shards)
    return set(stream.decode()[:-1].split("\0"))


def counted(manifest: Manifest) -> dict[str, int]:
    assert manifest.selection
    return {each.rule: each.documents for each in manifest.selection.left_out}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # the cat sat the cat ran 1 no more of the cat sat the cat
        ("rps_doc_word_count", 15),
        ("rps_doc_mean_word_length", 42 / 15),
        ("rps_doc_num_sentences", 3),
        # The cat sat . The cat ran ... # 1 NO MORE { of } the cat sat the cat !
        ("rps_doc_symbol_to_word_ratio", 2 / 21),
        ("rps_doc_frac_unique_words", 8 / 15),
        ("rps_doc_frac_all_caps_words", 2 / 21),
        ("rps_doc_frac_lines_end_with_ellipsis", 0.0),
        ("rps_doc_curly_bracket", 2 / len(POEM)),
        ("rps_doc_lorem_ipsum", 0.0),
        ("rps_doc_frac_chars_top_2gram", 6 * 4 / 42),
        ("rps_doc_frac_chars_dupe_5grams", 30 / 42),
    ],
)
def test_signals_are_what_can_be_counted_by_hand(name: str, value: float) -> None:
    assert compute(name, Text(POEM)) == pytest.approx(value, abs=1e-8)


def test_repeated_runs_count_each_character_once() -> None:
    text = Text("a b c d e f a b c d e f zz")
    assert compute("rps_doc_frac_chars_dupe_5grams", text) == pytest.approx(12 / 14)
    assert compute("rps_doc_frac_chars_dupe_7grams", text) == 0.0
    for name in COMPUTED:
        assert compute(name, Text("")) in (0, None), name
        assert isinstance(compute(name, Text("# ... \n\n über")), int | float), name


@pytest.mark.parametrize(
    ("text", "x", "y", "holds"),
    [
        ("x > 1 and y < 2", 2, 1, True),
        ("x > 1 and y < 2", 2, 3, False),
        ("x > 1 or y > 1 and y > 5", 2, 3, True),
        ("(x > 1 or y > 1) and y > 5", 2, 3, False),
        ("not x == 1 and not (y != 3 or x >= 3)", 2, 3, True),
        ("-1e1 < x <= 2.5", -9.5, 0, True),
        ("1 < x < y", 2, 2, False),
        ("x > 1", None, 0, False),
        ("not x > 1", None, 0, False),
        ("x > 1 or y > 1", None, 2, True),
    ],
)
def test_expressions(text: str, x: float | None, y: float, holds: bool) -> None:
    rules = parse_rules(text, ["x", "y"])
    assert (rules.first_failed({"x": x, "y": y}.get) is None) == holds


def test_each_part_joined_by_and_is_a_rule() -> None:
    rules = parse_rules(" x > 1 and (y < 2 or x == 7)  and not y > 3 ", ["x", "y"])
    assert [rule.text for rule in rules.rules] == ["x > 1", "(y < 2 or x == 7)", "not y > 3"]
    assert rules.first_failed({"x": 2, "y": 5}.get) == 1
    assert len(parse_rules("x > 1 and y < 2 or x == 7", ["x", "y"]).rules) == 1


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("x > 1 and rps_words > 2", "no signal 'rps_words' .character 11", "'rps_doc_word_count'"),
        ("x = 1", "'=' means nothing here .character 3", "write =="),
        ("x => 1", "'=' means nothing here .character 3", "write >="),
        ("x \u2264 1", "means nothing here .character 3", "write <="),
        ("RPS_DOC_WORD_COUNT > 1", "no signal", "'rps_doc_word_count'"),
        ("x > 1 && y > 2", "'&' means nothing here .character 7", "write and"),
        ("(x > 1", "never closed .character 1", "add"),
        ("x > 1)", "'.' is not expected here .character 6", "join"),
        ("x", "'x' is not compared", "x >= 0.5"),
        ("x >", "expected, not the end .character 4", "join"),
        ("", "expected, not the end", "join"),
        ("x > 1 and and y > 1", "expected, not 'and' .character 11", "join"),
        ("__import__('os') > 1", "means nothing here .character 12", "use"),
        ("not " * 60 + "x > 1", "nested too deeply", "fewer"),
        ("x > 1 " + "and x > 1 " * 100, "more than 64 rules", "brackets"),
        ("x" * 2001, "more than 2000", "shorten"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_pointed_at(text: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_rules(text, ["x", "y", "rps_doc_word_count"])
    assert fix in caught.value.fixes[0]
    if "character" in message:
        *_, shown, arrow = caught.value.cause.split("\n")
        assert arrow.index("^") < len(shown) + 1


@pytest.mark.parametrize("ending", ["json.gz", "jsonl.zst", "jsonl"])
def test_documents_as_red_pajama_has_them(ending: str, tmp_path: Path) -> None:
    texts = [text_of(seed, 40) for seed in range(30)]
    path = write_rows(tmp_path / f"rows.{ending}", texts)
    out = tmp_path / "out"
    manifest = prepare([path], out)
    assert learnt(out, manifest) == set(texts)
    assert b"selection" not in manifest.to_bytes(), "as it was before there was such a thing"
    if ending != "jsonl":
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match="is not a whole compressed file"):
            prepare([path], tmp_path / "other")


def test_rules_and_duplicates_are_counted_for_those_who_join(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    good = [text_of(seed, 200) for seed in range(40)]
    near = [good[0].rsplit(" ", 2)[0] + " other end", "Well, " + good[1]]
    short = [text_of(seed, 9) for seed in range(100, 105)]
    long_words = [" ".join(["abcdefghijklmnop"] * 60)]
    path = write_rows(tmp_path / "a.jsonl", [*good, *short, *long_words, *near, *good[:7]])
    out = tmp_path / "out"
    wish = Wish("rps_doc_word_count >= 50 and rps_doc_mean_word_length < 10", "near")
    manifest = prepare([path], out, wish=wish)
    assert learnt(out, manifest) == set(good)
    assert counted(manifest) == {
        "duplicate": 7,
        "rps_doc_word_count >= 50": 5,
        "rps_doc_mean_word_length < 10": 1,
        "near duplicate (similarity >= 0.8)": 2,
    }
    assert manifest.totals.documents == 40 and not list(out.glob(".tmp*"))
    assert "40 of 55 documents kept; left out: 7 by duplicate, 5 by" in manifest.describe()
    payload = manifest.to_bytes()
    assert parse_manifest(payload) == manifest
    with pytest.raises(PeerFault, match="leaves out more documents"):
        parse_manifest(payload.replace(b'"documents":7,', b'"documents":7000,'))


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    folder = tmp_path / "old-disk"
    folder.mkdir()
    for number in range(2):
        path = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9-%d.txt" % number))
        path.write_text(text_of(1, 300))
    manifest = prepare([folder], tmp_path / "out", wish=Wish("", "exact"))
    assert counted(manifest) == {"duplicate": 1}


def test_signal_files_count_before_what_the_text_says(tmp_path: Path) -> None:
    texts = [text_of(seed, 40) for seed in range(30)]
    top = tmp_path / "data"
    write_rows(top / "documents" / "2023-06" / "en_head.json.gz", texts)
    rows = [
        {
            "rps_doc_word_count": [[0, 9, 1000.0 if n % 2 else 1.0]],
            "ccnet_perplexity": [[0, 9, None if n in (0, 3) else 300.5]],
            "rps_lines_ending": [[0, 4, 0.0], [4, 9, 1.0]],
        }
        for n in range(30)
    ]
    beside = top / "quality_signals" / "2023-06" / "en_head.signals.json.gz"
    write_signals(beside, rows)
    keep = "rps_doc_word_count > 500 and ccnet_perplexity < 400 and rps_lines_ending == 0.5"
    out = tmp_path / "out"
    manifest = prepare([top], out, wish=Wish(keep))
    assert learnt(out, manifest) == {texts[n] for n in range(30) if n % 2 and n != 3}
    assert list(counted(manifest).values()) == [15, 1, 0]

    first = {name: spans for name, spans in rows[0].items() if name != "ccnet_perplexity"}
    write_signals(beside, [first, *rows[1:]])
    write_rows(top / "documents" / "2023-05" / "en_head.json.gz", texts[:3])
    bare = [{"rps_doc_word_count": [[0, 9, 1000.0]]} for _ in range(3)]
    write_signals(top / "quality_signals" / "2023-05" / "en_head.signals.json.gz", bare)
    again = prepare([top], tmp_path / "again", wish=Wish(keep))
    assert learnt(tmp_path / "again", again) == learnt(out, manifest)

    write_signals(beside, rows, first=1)
    with pytest.raises(UserError, match=r"line 1 .* is about document 1, not about 0"):
        prepare([top], tmp_path / "b", wish=Wish(keep))
    write_signals(beside, rows[:-1])
    with pytest.raises(UserError, match="has no line 30"):
        prepare([top], tmp_path / "b", wish=Wish(keep))
    write_rows(top / "documents" / "more.jsonl", texts)
    with pytest.raises(UserError, match="ccnet_perplexity, which only a signals file can tell"):
        prepare([top], tmp_path / "b", wish=Wish("ccnet_perplexity > 3"))


def test_text_files_are_judged_as_wholes(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(text_of(1, 30_000))
    (folder / "b.txt").write_text(text_of(1, 30_000))
    (folder / "c.txt").write_text("short")
    out = tmp_path / "out"
    manifest = prepare([folder], out, wish=Wish("rps_doc_word_count > 9", "exact"))
    assert counted(manifest) == {"duplicate": 1, "rps_doc_word_count > 9": 1}
    assert "".join(sorted(learnt(out, manifest), key=text_of(1, 30_000).find)) == text_of(1, 30_000)
    with pytest.raises(UserError, match=r"no document is left: 0 of 3 .* 3 by rps_doc_word_count"):
        prepare([folder], tmp_path / "b", wish=Wish("rps_doc_word_count > 1e9"))
    with pytest.raises(UserError, match="no signal"):
        prepare([folder], tmp_path / "c", wish=Wish("rps_words > 1"))
    assert not (tmp_path / "c").exists(), "nothing is begun with a rule that means nothing"


def test_a_text_file_can_be_held_out_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [text_of(seed, 4000) for seed in range(10, 16)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    found = {}
    for by_document in (False, True):
        out = tmp_path / str(by_document)
        manifest = prepare([folder], out, held_out_fraction=0.3, held_out_by_document=by_document)
        found[by_document] = learnt(out, manifest)
    assert found[True] == set(texts)
    assert found[False] != set(texts), "parts of one text lie on either side"


KILLED = """
import os, signal, sys
from pathlib import Path
from p2p_dtfm.train.data import Wish, prepare
from p2p_dtfm.train.data.quality import choosing, work_file

work_file.COMMIT_EVERY_DOCUMENTS = 50
judged = 0
said = choosing.Choosing._verdict

def verdict(self, document, signals):
    global judged
    judged += 1
    if judged == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return said(self, document, signals)

choosing.Choosing._verdict = verdict
prepare([Path(sys.argv[1])], Path(sys.argv[2]),
        wish=Wish("rps_doc_word_count >= 20 and rps_doc_frac_unique_words > 0.1", "exact"))
print(judged)
"""


@pytest.mark.parametrize("files", [2, 400])
def test_a_killed_run_goes_on_where_it_was(files: int, tmp_path: Path) -> None:
    texts = [text_of(seed % 300, 10 + seed % 25) for seed in range(400)]
    folder = tmp_path / "in"
    for number in range(files):
        rows = 400 // files
        write_rows(folder / f"{number}.json.gz", texts[rows * number : rows * (number + 1)])
    out = tmp_path / "out"

    def run(end_at: int, target: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(folder), str(target), str(end_at)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run(320, out).returncode == -signal.SIGKILL
    assert (out / WORK_NAME).exists()
    ended = run(100_000, out)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= 400 - 300, "what was committed is not judged again"
    keep = "rps_doc_word_count >= 20 and rps_doc_frac_unique_words > 0.1"
    prepare([folder], tmp_path / "whole", wish=Wish(keep, "exact"))
    for name in ("manifest.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_many_small_files_do_not_wait_for_the_disk_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred thousand that took the better part of an hour."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number}.txt").write_text(text_of(number % 150, 40))
    commit, commits = WorkFile._commit, []

    def counting(work: WorkFile) -> None:
        commits.append(1)
        commit(work)

    monkeypatch.setattr(WorkFile, "_commit", counting)
    manifest = prepare([folder], tmp_path / "out", wish=Wish(duplicates="exact"))
    assert counted(manifest) == {"duplicate": 50} and len(commits) < 5


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [text_of(seed, 40) for seed in range(30)])
    with pytest.raises(UserError, match="cannot write to /proc/nowhere/out: No such file"):
        prepare([path], Path("/proc/nowhere/out"), wish=Wish(duplicates="exact"))


def test_another_wish_begins_anew(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [text_of(seed, 40) for seed in range(30)])
    out = tmp_path / "out"
    with pytest.raises(UserError, match="no document is left"):
        prepare([path], out, wish=Wish("rps_doc_word_count > 50"))
    assert (out / WORK_NAME).exists()
    assert counted(prepare([path], out, wish=Wish("rps_doc_word_count > 5"))) == {
        "rps_doc_word_count > 5": 0
    }
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / WORK_NAME).write_bytes(b"no database, whatever its name says" * 99)
    prepare([path], tmp_path / "torn", wish=Wish("rps_doc_word_count > 5"))


def test_documents_that_are_others_by_now_are_not_taken_by_what_was_found_of_the_old_ones(
    tmp_path: Path,
) -> None:
    """The manifest told of documents that nobody had judged."""
    texts = [text_of(seed, 40 if seed % 2 else 5) for seed in range(60)]
    path = write_rows(tmp_path / "a.jsonl", texts)

    def spoil(done_bytes: int, total_bytes: int, stage: str) -> None:
        if stage == "choosing" and done_bytes == total_bytes:
            write_rows(path, texts[1:])

    wish = Wish("rps_doc_word_count > 9")
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was being read"):
        prepare([path], tmp_path / "out", wish=wish, progress=spoil)
    manifest = prepare([path], tmp_path / "out", wish=wish)
    assert learnt(tmp_path / "out", manifest) == set(texts[1::2])


def failing_once(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """A file's disk fails after so many of its pieces, when documents are judged."""
    failed = []

    def read(file, *rest):
        for number, piece in enumerate(read_documents(file, *rest)):
            if file.path.name == name and number == after and not failed:
                failed.append(name)
                raise OSError(errno.EIO, "Input/output error", str(file.path))
            yield piece

    monkeypatch.setattr(choosing, "read_documents", read)


def test_a_disk_that_fails_while_documents_are_judged_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was left out, and what others share with it was taken for a duplicate of it."""
    texts = [text_of(seed, 40) for seed in range(60)]
    write_rows(tmp_path / "in" / "a.jsonl", texts[:40])
    write_rows(tmp_path / "in" / "b.jsonl", texts)
    failing_once(monkeypatch, "a.jsonl", 30)
    wish = Wish(duplicates="exact")
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl: Input/output error"):
        prepare([tmp_path / "in"], tmp_path / "out", wish=wish)
    manifest = prepare([tmp_path / "in"], tmp_path / "out", wish=wish)
    assert learnt(tmp_path / "out", manifest) == set(texts)
    assert counted(manifest) == {"duplicate": 40}


def test_documents_that_nobody_has_judged_are_not_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken whatever --keep said of them, and the manifest did not count them."""
    texts = [text_of(seed, 40 if seed % 2 else 5) for seed in range(60)]
    write_rows(tmp_path / "in" / "a.jsonl", texts[:20])
    write_rows(tmp_path / "in" / "b.jsonl", texts[20:])
    failing_once(monkeypatch, "a.jsonl", 0)
    skipped, wish = Skipped(), Wish("rps_doc_word_count > 9")
    manifest = prepare([tmp_path / "in"], tmp_path / "out", wish=wish, skipped=skipped)
    assert learnt(tmp_path / "out", manifest) == set(texts[21::2])
    assert skipped.unreadable == 1


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Five times the text takes no more, but for some bytes for each document."""
    peaks = []
    for size in (300, 900):
        path = tmp_path / f"{size}.json.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            block = io.StringIO()
            for seed in range(size):
                block.write(json.dumps({"text": f"{seed} " + "word and more " * 400}) + "\n")
            file.write(block.getvalue())
            del block
        tracemalloc.start()
        prepare([path], tmp_path / f"out{size}", wish=Wish("rps_doc_word_count > 5", "exact"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    text_bytes = 600 * 5600
    assert peaks[1] - peaks[0] < text_bytes / 10, peaks


def test_tokens_can_be_learnt_of_chosen_documents(tmp_path: Path) -> None:
    """The library that learns them reads in a thread of its own."""
    path = write_rows(tmp_path / "a.jsonl", [text_of(seed, 40) for seed in range(60)])
    wish = Wish("rps_doc_word_count > 5", "exact")
    assert prepare([path], tmp_path / "out", wish=wish, vocabulary=300).vocabulary == 300
