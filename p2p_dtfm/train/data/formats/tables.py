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
            _require_text(path, table.schema_arrow, field)
            done, rows = 0, max(1, table.metadata.num_rows)
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[field]):
                done += batch.num_rows
                yield from _texts(batch.column(0), size_bytes * done // rows)
        return
    with pyarrow.OSFile(str(path)) as source:
        schema, batches = _arrow_batches(source)
        _require_text(path, schema, field)
        for batch in batches:
            column = batch.column(schema.get_field_index(field))
            for first in range(0, len(column), _ROWS_AT_ONCE):
                yield from _texts(column.slice(first, _ROWS_AT_ONCE), source.tell())


def read_rows(path: Path, parquet: bool, fields: set[str]) -> Iterator[dict[str, Any]]:
    """Those of the fields that the file has, row by row. Raises `pyarrow.ArrowException` and
    OSError."""
    if parquet:
        with pyarrow.parquet.ParquetFile(path) as table:
            wanted = [name for name in table.schema_arrow.names if name in fields]
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted):
                yield from batch.to_pylist()
        return
    with pyarrow.OSFile(str(path)) as source:
        schema, batches = _arrow_batches(source)
        wanted = [name for name in schema.names if name in fields]
        for batch in batches:
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.select(wanted).slice(first, _ROWS_AT_ONCE).to_pylist()


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


def _require_text(path: Path, schema: pyarrow.Schema, field: str) -> None:
    fields = [column.name for column in schema if _is_text(column.type)]
    if field not in fields:
        raise NoTextField(path, field, fields)


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    return bool(is_text or str(kind) == _VIEW)
