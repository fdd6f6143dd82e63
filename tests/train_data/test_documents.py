"""Rows as documents: JSON lines, Parquet, Arrow, and what Hugging Face's datasets saved."""

import builtins
import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from data_examples import make_text

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.data import Manifest, Skipped, Wish, prepare, stated_licence
from p2p_dtfm.train.data.formats.compressed import open_lines
from p2p_dtfm.train.data.formats.tables import read_column, read_rows
from p2p_dtfm.train.data.saved_data_sets import data_set_files

SAVED = Path(__file__).parent / "saved_data_set"
"""Written by `DatasetDict.save_to_disk` of datasets 5.2.0: 40 rows in two files, and 8."""
TEXTS = [make_text(400, number).strip() for number in range(60)]


def documents(out: Path, manifest: Manifest) -> dict[str, list[str]]:
    found = {}
    for split in ("train", "held_out"):
        shards = [shard for shard in manifest.shards if shard.split == split]
        stream = b"".join((out / "blobs" / shard.digest).read_bytes() for shard in shards)
        found[split] = stream.decode()[:-1].split("\0")
    return found


def write(form: str, folder: Path, field: str = "text", texts: list[str] | None = None) -> Path:
    texts = TEXTS if texts is None else texts
    folder.mkdir(exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    path = folder / f"rows.{form.split()[0]}"
    if form == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    elif form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=25)
    elif form == "arrow stream":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=25)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=25)
    return path


FORMS = ["jsonl", "parquet", "arrow stream", "arrow file"]


@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_a_document_in_every_form(form: str, tmp_path: Path) -> None:
    path = write(form, tmp_path, "body")
    out = tmp_path / "out"
    manifest = prepare([path], out, text_field="body", held_out_fraction=0.1)
    found = documents(out, manifest)
    assert sorted(found["train"] + found["held_out"]) == sorted(TEXTS)
    assert found["train"] == [text for text in TEXTS if text in set(found["train"])], "in order"
    assert manifest.totals.documents == 60
    assert 3 <= len(found["held_out"]) <= 12
    plain = prepare([write("jsonl", tmp_path, "body")], tmp_path / "b", text_field="body",
                    held_out_fraction=0.1)  # fmt: skip
    assert found == documents(tmp_path / "b", plain), "the form makes no difference"


READS = """
import os, sys
from pathlib import Path
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.documents import Form, pyarrow_needed
from p2p_dtfm.train.data.formats.tables import read_column

path = Path(sys.argv[1])
try:
    with pyarrow_needed(path, Form.ARROW):
        for number, _ in enumerate(read_column(path, False, "text", path.stat().st_size)):
            if number == 0:
                os.truncate(path, path.stat().st_size // 2)
except UserError as error:
    print(error.cause)
"""


@pytest.mark.parametrize("form", ["arrow stream", "arrow file"])
def test_a_table_that_is_cut_while_it_is_read_is_told(form: str, tmp_path: Path) -> None:
    """It was mapped into memory, so the process ended at once, by a signal and without a word."""
    path = write(form, tmp_path, texts=[text * 100 for text in TEXTS])
    command = [sys.executable, "-c", READS, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "is not a whole Arrow file" in ended.stdout


@pytest.mark.parametrize("form", ["arrow stream", "arrow file"])
def test_of_a_table_one_batch_is_in_memory_at_a_time(form: str, tmp_path: Path) -> None:
    """Once it was no longer mapped, room was made for 1.3 GB, and as much was read, only to find
    that a file with an index is no stream. A small machine had no room for it."""
    path = write(form, tmp_path)
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        rows = list(read_column(path, False, "text", path.stat().st_size))
    finally:
        pyarrow.set_memory_pool(before)
    assert [(row.text or b"").decode() for row in rows] == TEXTS
    assert pool.max_memory() < 1 << 20


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_texts_that_lie_elsewhere_in_a_table_are_texts(form: str, tmp_path: Path) -> None:
    """As polars writes them."""
    table = pyarrow.table({"text": pyarrow.array([*TEXTS, None], pyarrow.string_view())})
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    manifest = prepare([path], tmp_path / "out")
    found = documents(tmp_path / "out", manifest)
    assert sorted(found["train"] + found["held_out"]) == sorted(TEXTS)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_of_columns_of_one_name_the_first_with_text_is_read(form: str, tmp_path: Path) -> None:
    """Of an Arrow file the last column was read, whatever it was called."""
    columns = [[{"text": 1}] * 3, [1, 2, 3], ["a", "b", "c"], ["d", "e", "f"], ["no", "no", "no"]]
    names = ["a", "a.text", "a.text", "a.text", "label"]
    table = pyarrow.Table.from_arrays([*map(pyarrow.array, columns)], names=names)
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    found = read_column(path, form == "parquet", "a.text", path.stat().st_size)
    assert [row.text for row in found] == [b"a", b"b", b"c"]
    rows = list(read_rows(path, form == "parquet", {"label", "a.text"}))
    assert rows[0] == {"a.text": 1, "label": "no"}


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_field_is_named_with_those_that_there_are(form: str, tmp_path: Path) -> None:
    path = write(form, tmp_path / "in", "body")
    with pytest.raises(UserError, match=r"no text field 'text'.*body") as caught:
        prepare([path], tmp_path / "out")
    assert "--field body" in caught.value.fixes[0]
    (tmp_path / "in" / "plain.txt").write_text(make_text(9000))
    skipped = Skipped()
    assert prepare([tmp_path / "in"], tmp_path / "out", skipped=skipped).totals.documents == 1
    assert skipped.without_field == 1 and "1 without the text field" in str(skipped)


def test_lines_are_rows_under_the_name_that_data_sets_have(tmp_path: Path) -> None:
    """As they lie in `.json.gz`, where they are rows: braces and names of fields were learnt."""
    path = write("jsonl", tmp_path, "body")
    path = path.rename(tmp_path / "rows.json")
    manifest = prepare([path], tmp_path / "out", text_field="body")
    found = documents(tmp_path / "out", manifest)
    assert sorted(found["train"] + found["held_out"]) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"rows\.json have no text field 'text'.*body"):
        prepare([path], tmp_path / "other")
    for text in (json.dumps({"body": "x" * 9000}), json.dumps([{"body": "x" * 999}] * 9, indent=1)):
        path.write_text(text)
        assert prepare([path], tmp_path / f"{len(text)}").totals.text_bytes == len(text)
        with pytest.raises(UserError, match=r"--field body names a field.*no file .*rows\.json"):
            prepare([path], tmp_path / "other", text_field="body")


@pytest.mark.parametrize(
    "row, option",
    [({"messages": []}, "--chat"), ({"prompt": "a", "completion": "b"}, "--conversations")],
)
def test_conversations_are_known_by_their_fields(row: dict, option: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="no text field 'text'") as caught:
        prepare([tmp_path / "rows.jsonl"], tmp_path / "out")
    assert option in caught.value.fixes[0]


def test_first_rows_without_the_field_cost_nothing_but_themselves(tmp_path: Path) -> None:
    path = write("jsonl", tmp_path / "in")
    path.write_text('{"id": 1}\n{"meta": {}}\n' + path.read_text())
    skipped = Skipped()
    manifest = prepare([tmp_path / "in"], tmp_path / "out", skipped=skipped)
    assert manifest.totals.documents == 60
    assert (skipped.rows_without_text, skipped.without_field) == (2, 0)
    kept = prepare([path], tmp_path / "kept", wish=Wish("rps_doc_word_count >= 1"))
    assert kept.totals == manifest.totals
    path.write_text('{"id": "1", "n": 2}\n' * 1000 + path.read_text())
    with pytest.raises(UserError, match="no text field 'text'; their fields: id, n") as caught:
        prepare([path], tmp_path / "late")
    assert "--field id" in caught.value.fixes[0]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_that_is_too_long_is_a_broken_one_and_a_mark_of_byte_order_none(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_dtfm.train.data.documents.LINE_LIMIT_BYTES", 2000)
    rows = write("jsonl", tmp_path / "in").read_bytes().splitlines(keepends=True)
    long = json.dumps({"text": "x" * 5000}).encode() + b"\n"
    content = b"\xef\xbb\xbf" + b"".join([*rows[:30], long, *rows[30:], long.strip()])
    path = tmp_path / f"long.jsonl{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    skipped = Skipped()
    manifest = prepare([path], tmp_path / "out", skipped=skipped)
    assert manifest.totals.documents == 60 and skipped.broken_lines == 2
    assert "line 31" in str(skipped) and "line 62" in str(skipped)


def test_what_grows_very_much_is_read_in_the_time_of_its_length(tmp_path: Path) -> None:
    """What was left was copied for each 8 KiB of it: minutes for a row of 64 MiB."""
    zstandard = pytest.importorskip("zstandard")
    row = json.dumps({"text": "word " * (1 << 22)}).encode() + b"\n"
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(row * 2))
    began_s = time.process_time()
    with open_lines(path, 1 << 26) as lines:
        assert [len(line) for _, line in lines] == [len(row)] * 2
    assert time.process_time() - began_s < 2


def test_a_number_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text field 'id'"):
        prepare([write("parquet", tmp_path)], tmp_path / "out", text_field="id")


def test_rows_without_text_and_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write("jsonl", tmp_path)
    bad = ['{"text": null}', '{"text": ""}', '{"id": 3}', '{"text": "a\\u0000b"}', '{"text": 5}',
           '{"text": "\\ud800"}', "", '{"text": "cut', "[1, 2]"]  # fmt: skip
    path.write_text(path.read_text() + "\n".join(bad) + "\n")
    skipped = Skipped()
    manifest = prepare([path], tmp_path / "out", skipped=skipped)
    assert manifest.totals.documents == 60
    assert skipped.rows_without_text + skipped.broken_lines == 8
    assert "line 68" in str(skipped), "a broken one is named"


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    for form in ("parquet", "arrow stream"):
        path = write(form, tmp_path)
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(UserError, match="is not a whole") as caught:
            prepare([path], tmp_path / "out")
        assert str(path) in caught.value.cause


def test_without_pyarrow_the_fix_is_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("parquet", tmp_path)
    real = builtins.__import__

    def importing(name: str, *rest: object, **more: object) -> object:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(UserError, match="needs pyarrow") as caught:
        prepare([path], tmp_path / "out")
    assert how_to_install("pyarrow") in caught.value.fixes[0]


def test_a_saved_data_set(tmp_path: Path) -> None:
    mine = tmp_path / "saved"
    shutil.copytree(SAVED, mine)
    (mine / "train" / "cache-1234.arrow").write_bytes(b"of a computation, not of the data set")
    with pytest.raises(UserError, match="several splits: train, validation") as caught:
        prepare([mine], tmp_path / "out")
    assert f"{mine}/train --validation {mine}/validation" in caught.value.fixes[0]
    manifest = prepare([mine / "train"], tmp_path / "out", validation=[mine / "validation"])
    found = documents(tmp_path / "out", manifest)
    assert [text.split(".")[0] for text in found["train"]] == [f"Document {n}" for n in range(40)]
    assert [text.split(".")[0][-2:] for text in found["held_out"]] == list(map(str, range(40, 48)))
    assert stated_licence([mine / "train"]) == "CC0-1.0"
    assert stated_licence([tmp_path, SAVED / "nowhere"]) == ""


@pytest.mark.parametrize(
    "content", ['{"_data_files": [{}, 1, {"filename": []}, {"filename": "a.arrow"}]}', "[" * 10**5]
)
def test_a_saved_data_set_whose_list_is_no_list(content: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(content)
    names = {"state.json", "dataset_info.json", "a.arrow"}
    try:
        assert data_set_files(tmp_path, names) == {"a.arrow"}
    except UserError as error:
        assert "state.json" in error.cause and content.startswith("[")


def test_a_file_named_for_both_is_held_out(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(make_text(900, len(name) + ord(name[0])))
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    manifest = prepare(paths, tmp_path / "out", validation=[tmp_path / "two.txt"], context=64)
    found = documents(tmp_path / "out", manifest)
    assert found == {"train": [paths[0].read_text()], "held_out": [paths[1].read_text()]}


def test_validation_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(make_text(900))
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"no text found in .*none"):
        prepare([tmp_path / "one.txt"], tmp_path / "out", validation=[tmp_path / "none"])


def test_a_long_row_stays_whole_and_on_one_side(tmp_path: Path) -> None:
    long = make_text(300_000)
    path = write("parquet", tmp_path, texts=[*TEXTS, long])
    manifest = prepare([path], tmp_path / "out")
    found = documents(tmp_path / "out", manifest)
    assert (long in found["train"]) != (long in found["held_out"])


def test_progress_moves_within_a_file_and_a_tokenizer_is_learnt_from_rows(tmp_path: Path) -> None:
    texts = [make_text(60, number).strip() for number in range(3000)]
    calls: list[tuple[int, int, str]] = []
    manifest = prepare(
        [write("parquet", tmp_path, texts=texts)],
        tmp_path / "out",
        vocabulary=300,
        progress=lambda *call: calls.append(call),
    )
    assert manifest.vocabulary == 300
    for stage in ("reading", "learning tokens", "writing"):
        done = np.array([call[0] / call[1] for call in calls if call[2] == stage])
        assert len(done) >= 3 and done[0] < 0.5 and done[-1] == 1.0
        assert (np.diff(done) >= 0).all()


def test_notes_are_one_line_for_a_terminal(tmp_path: Path) -> None:
    manifest = prepare(
        [write("jsonl", tmp_path)], tmp_path / "out", name="a\x1b[31m\nb", licence="", source="s"
    )
    assert manifest.notes.describe() == "data a [31m b, licence not stated, source s"
