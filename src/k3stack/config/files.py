"""Files that a user names, read and written with errors that name the file: whatever is wrong with one is a UserError.

JSON of any depth, bytes that are no text, folders in place of files and full disks all end here, so that a verb's work
is neither lost nor mistaken for a bug.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3stack.errors import UserError

Pairs = Callable[[list[tuple[str, Any]]], Any]


def why(error: OSError) -> str:
    """What the operating system says, without the path that the message names already."""
    return error.strerror or str(error)


def read_text(path: str | Path, *, param: str | None = None, error: type[UserError] = UserError, flag: str = "") -> str:
    """The text of a UTF-8 file. Raises ``error`` with the path, and ``flag`` in front of it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise error(f"{flag}{path}: {why(e)}", param=param) from None
    except UnicodeDecodeError as e:
        raise error(f"{flag}{path}: not a text file (byte {e.start:,} is no UTF-8)", param=param) from None


def read_json(
    path: str | Path, *, param: str | None = None, error: type[UserError] = UserError, pairs: Pairs | None = None
) -> Any:
    """The JSON value in a file; ``pairs`` builds its objects. Raises ``error`` with the path and the place."""
    return parse_json(read_text(path, param=param, error=error), str(path), param=param, error=error, pairs=pairs)


def parse_json(
    text: str | bytes, where: str, *, param: str | None = None, error: type[UserError] = UserError,
    pairs: Pairs | None = None,
) -> Any:  # fmt: skip
    """The JSON value in ``text``. Raises ``error`` with ``where`` and the place."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as e:
        raise error(f"{where}: not valid JSON (line {e.lineno}, column {e.colno}: {e.msg})", param=param) from None
    except RecursionError:
        raise error(f"{where}: not read: its JSON is nested too deep", param=param) from None
    except ValueError as e:  # bytes that are no text, a number of thousands of digits
        raise error(f"{where}: not valid JSON ({e})", param=param) from None


@contextmanager
def writing(path: str | Path, flag: str) -> Iterator[None]:
    """What fails to be written inside is a UserError that names ``flag`` and ``path``."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{flag} {path}: {why(e)}", param=flag) from None


def check_writable(path: str | Path, flag: str) -> None:
    """Raises UserError where no file can be written at ``path``; leaves what is there as it is.

    For what is written at the end of a long run. Pipes and devices are left for that time.
    """
    file = Path(path)
    with writing(path, flag):
        if file.exists() and not file.is_file() and not file.is_dir():
            return
        new = not file.exists()
        with file.open("ab"):
            pass
        if new:
            file.unlink()
