"""The text column of Parquet and Arrow files, a few rows at a time. Needs pyarrow.

No file is mapped into memory: if one was cut meanwhile, or its disk failed, that would end the
process at once. So of an Arrow file one batch is in memory at a time, as its writer has cut them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from p2p_dtfm.train.data.text_files import NoTextField, TextRow

_ROWS_AT_ONCE = 256
_INDEXED = b"ARROW1"
"""How an Arrow file with an index begins."""
_VIEW = "string_view"
"""The type of texts that lie elsewhere, as polars writes them; older pyarrow cannot name it."""


def read_column(path: Path, parquet: bool, field: str, size_bytes: int) -> Iterator[TextRow]:
    """A column's texts in order. Raises `NoTextField`, `pyarrow.ArrowException` and OSError."""
    if parquet:
        with pyarrow.parquet.ParquetFile(path) as table:
            _text_place(path, table.schema_arrow, field)
            done, rows = 0, max(1, table.metadata.num_rows)
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[field]):
                done += batch.num_rows
                column = batch.column(_text_place(path, batch.schema, field))
                yield from _texts(column, size_bytes * done // rows)
        return
    with pyarrow.OSFile(str(path)) as source:
        schema, batches = _arrow_batches(source)
        place = _text_place(path, schema, field)
        for batch in batches:
            column = batch.column(place)
            for first in range(0, len(column), _ROWS_AT_ONCE):
                yield from _texts(column.slice(first, _ROWS_AT_ONCE), source.tell())


def read_rows(path: Path, parquet: bool, fields: set[str]) -> Iterator[dict[str, Any]]:
    """Those of the fields that the file has, row by row. Raises `pyarrow.ArrowException` and
    OSError."""
    if parquet:
        with pyarrow.parquet.ParquetFile(path) as table:
            wanted = [name for name in table.schema_arrow.names if name in fields]
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted):
                yield from _first_of_each(batch, fields).to_pylist()
        return
    with pyarrow.OSFile(str(path)) as source:
        _, batches = _arrow_batches(source)
        for batch in batches:
            chosen = _first_of_each(batch, fields)
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from chosen.slice(first, _ROWS_AT_ONCE).to_pylist()


def _first_of_each(batch: pyarrow.RecordBatch, fields: set[str]) -> pyarrow.RecordBatch:
    """The columns of these names; of several of one name, the first."""
    names = batch.schema.names
    return batch.select(sorted(names.index(name) for name in fields & {*names}))


def _arrow_batches(
    source: pyarrow.NativeFile,
) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    """The schema and batches. `datasets` writes streams; others write files with an index.

    A reader of streams would take the first letters of an indexed one for a length, make room for
    1.3 GB, and read as much of the file.
    """
    is_indexed = source.read(len(_INDEXED)) == _INDEXED
    source.seek(0)
    if is_indexed:
        indexed = pyarrow.ipc.open_file(source)
        numbers = range(indexed.num_record_batches)
        return indexed.schema, (indexed.get_batch(number) for number in numbers)
    reader = pyarrow.ipc.open_stream(source)
    return reader.schema, iter(reader)


def _texts(column: pyarrow.Array, read_bytes: int) -> Iterator[TextRow]:
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    large = pyarrow.types.is_large_string(column.type) or str(column.type) == _VIEW
    # as bytes: nobody has checked yet that they are UTF-8
    for text in column.cast(pyarrow.large_binary() if large else pyarrow.binary()).to_pylist():
        yield TextRow(text, read_bytes)


def _text_place(path: Path, schema: pyarrow.Schema, field: str) -> int:
    """The column's number; of several of one name, that of the first with text. The library knows
    these by one name no more: it gives -1, which is the last column. Raises `NoTextField`."""
    texts = [(place, column.name) for place, column in enumerate(schema) if _is_text(column.type)]
    for place, name in texts:
        if name == field:
            return place
    raise NoTextField(path, field, [name for _, name in texts])


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    return bool(is_text or str(kind) == _VIEW)
