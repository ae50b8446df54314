"""Where this project keeps what it fetched or made and can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$VELOX_CACHE_DIR`, else `$XDG_CACHE_HOME/velox-kv`, else `~/.cache/velox-kv`."""
    if own := os.environ.get("VELOX_CACHE_DIR"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "velox-kv"
