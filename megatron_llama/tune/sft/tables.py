"""Rows of parquet and Arrow files as JSON objects.

A column of structs gives every row the fields of all rows, with null for missing ones. Null in a
struct therefore counts as a missing field, at every depth, as in TRL's ``remove_none_values``. Null
in an array, in a map, and in JSON text of a column belongs to the example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_llama.errors import DataError, describe
from megatron_llama.tune.sft.json_text import parsed
from megatron_llama.tune.sft.problems import UnusableError

PARQUET = ".parquet"
ARROW = (".arrow", ".feather")
TABLES = (PARQUET, *ARROW)
ROWS = 1024
"""Rows that become Python objects at a time."""
_ARROW_FILE = b"ARROW1"
"""The first bytes of the Arrow format that can be read in any order. Files without them are
streams, which ``save_to_disk`` of ``datasets`` writes."""
_EXTENSION = b"ARROW:extension:name"
_JSON = "arrow.json"
"""Text that is JSON: how ``datasets`` keeps objects whose fields have no common type."""
_DAMAGES = (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)
"""Errors of damaged files beside pyarrow's own: of dates and numbers that Python does not have, and
of nested types."""
Reader = Callable[[Any], Any]
"""A function from a value that is not null to JSON."""


def table_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any] | UnusableError]]:
    """Yield the number of each row, from 1, and the row. Raises DataError without pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        do = "pip install '.[parquet]' in the clone"
        raise DataError(
            describe(
                str(file),
                got="no pyarrow",
                expected="pyarrow, which reads parquet and Arrow",
                do=do,
            )
        ) from error
    row = 0
    try:
        with ExitStack() as stack:
            schema, batches = _opened(file, stack)
            names = list(schema.names)
            if again := next((name for name in names if names.count(name) > 1), None):
                raise UnusableError(
                    "repeated column",
                    field=again,
                    got="two columns of this name",
                    expected="each name once",
                    do="rename one of them",
                )
            readers = [_reader(field) for field in schema]
            for batch in batches:
                # pyarrow trusts the offsets of texts in an Arrow file without this check.
                batch.validate(full=True)
                for first in range(0, batch.num_rows, ROWS):
                    columns = [column.to_pylist() for column in batch.slice(first, ROWS).columns]
                    for cells in zip(*columns, strict=True):
                        row += 1
                        yield row, _row(names, readers, cells)
    except UnusableError as problem:
        yield row + 1, problem
    except (*_DAMAGES, pyarrow.ArrowException) as error:
        kind = "parquet" if file.suffix == PARQUET else "Arrow"
        yield (
            row + 1,
            UnusableError(
                f"damaged {kind}",
                got=(str(error).splitlines() or [type(error).__name__])[0],
                expected=f"{'a' if kind == 'parquet' else 'an'} {kind} file",
                do="copy the file again",
            ),
        )


def _opened(file: Path, stack: ExitStack) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a file and its batches of rows."""
    from pyarrow import OSFile, ipc, parquet

    if file.suffix == PARQUET:
        table = stack.enter_context(parquet.ParquetFile(file))
        return table.schema_arrow, table.iter_batches(batch_size=ROWS)
    source = stack.enter_context(OSFile(str(file)))
    begin = source.read(len(_ARROW_FILE))
    source.seek(0)
    if begin == _ARROW_FILE:
        reader = stack.enter_context(ipc.open_file(source))
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    stream = stack.enter_context(ipc.open_stream(source))
    return stream.schema, iter(stream)


def _row(
    names: list[str], readers: list[Reader], cells: tuple[Any, ...]
) -> Mapping[str, Any] | UnusableError:
    try:
        return {
            name: read(cell)
            for name, read, cell in zip(names, readers, cells, strict=True)
            if cell is not None
        }
    except UnusableError as problem:
        return problem


def _reader(field: Any) -> Reader:
    """Return the reader of a column, or of a part of one."""
    import pyarrow
    from pyarrow import types

    kind = field.type
    extension = getattr(kind, "extension_name", None)
    if _JSON in (extension, (field.metadata or {}).get(_EXTENSION, b"").decode()):
        return parsed
    if types.is_dictionary(kind):
        return _reader(pyarrow.field(field.name, kind.value_type))
    if extension is not None:
        return _reader(pyarrow.field(field.name, kind.storage_type))
    if types.is_struct(kind):
        return _struct_reader(kind)
    if types.is_map(kind):
        return _map_reader(_reader(kind.item_field))
    if hasattr(kind, "value_field"):  # a list of any kind
        return _list_reader(_reader(kind.value_field))
    return _refuse_union if types.is_union(kind) else _same


def _same(value: Any) -> Any:
    return value


def _struct_reader(kind: Any) -> Reader:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    readers = {field.name: _reader(field) for field in fields}
    return lambda value: {
        name: readers[name](content) for name, content in value.items() if content is not None
    }


def _list_reader(read: Reader) -> Reader:
    return lambda value: [None if element is None else read(element) for element in value]


def _map_reader(read: Reader) -> Reader:
    def as_object(value: list[tuple[Any, Any]]) -> dict[str, Any]:
        entries = {name: None if content is None else read(content) for name, content in value}
        if len(entries) < len(value) or not all(isinstance(name, str) for name in entries):
            raise UnusableError(
                "a map that is no object",
                got=f"the keys {', '.join(repr(name) for name, _ in value)}"[:80],
                expected="different texts as keys",
                do="mend the example",
            )
        return entries

    return as_object


def _refuse_union(value: Any) -> Any:
    raise UnusableError(
        "a column of a union type",
        got=f"a union that holds {value!r}"[:80],
        expected="a column of one type",
        do="write the values as JSON, or leave the column out",
    )
