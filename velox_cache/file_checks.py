"""What a user's path must be, before it is read or work is done whose result is to go there."""

import os
from pathlib import Path


def check_folder_of(path: str | os.PathLike[str]) -> None:
    """Raise unless a file can go to `path`.

    FileNotFoundError when its folder does not exist; ValueError when `path` is a folder, or its folder takes no files.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {target.parent} for {target.name} does not exist; make it first")
    if target.is_dir():
        raise ValueError(f"{target} is a folder, and a file is to be written; name a file in it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"the folder {target.parent} for {target.name} may not be written to; allow it, or name another"
        )


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise unless there is a file at `path` that can be read: FileNotFoundError, or ValueError with the reason."""
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"no file {source}")
    if not source.is_file():
        kind = "a folder" if source.is_dir() else "no regular file"
        raise ValueError(f"{source} is {kind}, and a file is to be read; name a file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise ValueError(f"{source} cannot be read ({error.strerror}); allow it, or name another file") from error


def file_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file. Raises as `check_readable`, and ValueError when it holds something else."""
    check_readable(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
