"""Prompt caches as files: mlx_lm's own safetensors form, checked on the way in and replaced whole on the way out."""

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import mlx.core as mx
import mlx_lm.models.cache as mlx_caches

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.tiered import TieredKVCache
from velox_cache.file_checks import check_folder_of, check_readable

FILE_VERSION = 2  # 1: without a digest
_VERSION_KEY = "velox_kv_file"
_DIGEST_KEY = "velox_kv_sha256"
_NO_DIGEST = "0" * 64
_SUFFIX = ".safetensors"
_AT_ONCE = 2**20  # bytes


def register_with_mlx_lm() -> None:
    """Let mlx_lm's own `load_prompt_cache`, and caches inside its CacheList, read evicting caches back.

    mlx_lm looks the class of a saved cache up by name in its module of caches, so ours are entered there. Calling it
    again does nothing new.
    """
    for name, cls in (EvictingKVCache.kinds() | TieredKVCache.kinds()).items():
        setattr(mlx_caches, name, cls)


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: Iterable[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a prompt cache, evicting and other caches mixed, to a .safetensors file (the suffix is added).

    The file takes its name only when it is complete, so an interrupted save leaves an older file whole. Bytes on disk
    are those of the rows held, and a digest covers each. mlx_lm's `load_prompt_cache` reads it too, after
    `register_with_mlx_lm`.

    Raises FileNotFoundError when the folder does not exist, and ValueError when the name is that of a folder.
    """
    path = _with_suffix(file_name)
    check_folder_of(path)
    caches = list(cache)
    labels = dict(metadata or {}) | {_VERSION_KEY: str(FILE_VERSION), _DIGEST_KEY: _NO_DIGEST}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:  # the file: as umask has it
        aside = os.path.join(folder, path.name)
        mlx_caches.save_prompt_cache(aside, caches, labels)
        with open(aside, "r+b") as file:
            place, digest = _digest(file)
            file.seek(place)
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)


@overload
def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: Literal[False] = False) -> list[Any]: ...
@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[True]
) -> tuple[list[Any], dict[str, str]]: ...
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """The caches of a file written by `save_prompt_cache`, each going on bit for bit where it stood.

    return_metadata: return the pair (caches, metadata).

    Raises FileNotFoundError, and ValueError for a file that cannot be read, that is truncated or damaged in any bit,
    that is no prompt cache of ours, or that a velox-kv of another version wrote.
    """
    path = _with_suffix(file_name)
    _check_file(path)
    register_with_mlx_lm()
    try:
        caches, metadata = mlx_caches.load_prompt_cache(str(path), return_metadata=True)
        mx.eval([cache.state for cache in caches])  # mlx reads lazily: nothing may be left to a file that changes
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} holds a prompt cache that this velox-kv cannot rebuild: {error}") from error
    for label in (_VERSION_KEY, _DIGEST_KEY):
        metadata.pop(label)
    return (caches, metadata) if return_metadata else caches


def _check_file(path: Path) -> None:
    """ValueError unless `path` is a whole safetensors file with our mark, a version that we know and its own digest."""
    check_readable(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_size = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if header_size > size - 8:
            raise ValueError(f"{path} is truncated, or no safetensors file")
        try:
            header = json.loads(file.read(header_size))
            labels = header.pop("__metadata__", {})
            version, digest = (labels.get(f"0.{key}") for key in (_VERSION_KEY, _DIGEST_KEY))
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file: its header cannot be read") from error
        if size < 8 + header_size + end:
            raise ValueError(f"{path} is truncated: it holds {size} bytes of {8 + header_size + end}; save it again")
        whole = digest is not None and _digest(file)[1] == digest
    if version is None:
        raise ValueError(
            f"{path} was not written by velox_cache.save_prompt_cache; for a prompt cache of mlx_lm's own use "
            "mlx_lm.models.cache.load_prompt_cache"
        )
    if version == "1":
        raise ValueError(
            f"{path} has version 1, of an older velox-kv, which has no digest to tell whether the file is whole; "
            "compute the cache again from its prompt"
        )
    if version != str(FILE_VERSION):
        raise ValueError(f"{path} has version {version}, this velox-kv reads version {FILE_VERSION}; upgrade velox-kv")
    if not whole:
        raise ValueError(
            f"{path} is damaged: its contents are not those that were saved; copy it again, or compute the cache again "
            "from its prompt"
        )


def _digest(file: BinaryIO) -> tuple[int, str]:
    """Where a file has its digest, and what it must be: SHA-256 of the whole file with zeros in that place."""
    file.seek(0)
    start = file.read(8)
    start += file.read(struct.unpack("<Q", start)[0])
    label = f'"0.{_DIGEST_KEY}":"'.encode()
    place = start.find(label) + len(label)
    found = hashlib.sha256(start[:place] + _NO_DIGEST.encode() + start[place + len(_NO_DIGEST) :])
    while part := file.read(_AT_ONCE):
        found.update(part)
    return place, found.hexdigest()


def _with_suffix(file_name: str | os.PathLike[str]) -> Path:
    path = Path(file_name)
    return path if path.suffix == _SUFFIX else path.with_name(path.name + _SUFFIX)
