"""Where files are to go."""

import os
from pathlib import Path


def check_folder_of(path: str | os.PathLike[str]) -> None:
    """FileNotFoundError, before any work is done, when a file cannot go to `path` because its folder is missing."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {target.parent} for {target.name} does not exist; make it first")
