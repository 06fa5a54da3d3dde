"""Reading and writing the CSV files in results/: one dataclass per file, one record per line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from semisparse.errors import InputError
from semisparse.runtime.cache import write_atomically

Record = TypeVar("Record")


def write_csv(path: Path, records: Sequence[Any]) -> None:
    """Write records of one dataclass atomically. Floats have six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(records[0])], lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(record).items()})
    write_atomically(path, text.getvalue().encode())


def read_csv(path: Path, kind: type[Record]) -> list[Record]:
    """Read records of a dataclass whose fields are str, int or float.

    Raises:
        InputError: the file cannot be read, or a column is missing or has a value of the wrong type.
    """
    types = get_type_hints(kind)
    try:
        with path.open(newline="") as file:
            return [kind(**{name: types[name](row[name]) for name in types}) for row in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} does not hold {kind.__name__} records ({', '.join(types)}): {error!r}") from error
