"""A path that cannot be read or written is refused by its own name, before any work, for every file a user names."""

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import velox_cache as vc
from velox_cache.bench.report import read as read_report
from velox_cache.calibration.artifact import import_published_filters
from velox_cache.cli.calibrate import _read as read_calibration_text
from velox_cache.file_checks import check_folder_of
from velox_cache.harness.texts import text_named
from velox_cache.learning.fusion_candidate import Candidate
from velox_cache.learning.search_progress import begun

CALIBRATION = vc.Calibration([mx.ones((2, 8))], "some/model")
NOTHING = Candidate.__new__(Candidate)  # a search's file is looked at before its candidate

READERS: dict[str, Callable[[Path], Any]] = {
    "load_calibration": vc.load_calibration,
    "import_published_filters": import_published_filters,
    "load_prompt_cache": vc.load_prompt_cache,
    "a search": lambda path: begun(path, {}, NOTHING),
    "a report": read_report,
    "a text to calibrate on": lambda path: read_calibration_text(str(path)),
    "a text to read": lambda path: text_named(str(path)),
}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "save_calibration": lambda path: vc.save_calibration(CALIBRATION, path),
    "save_prompt_cache": lambda path: vc.save_prompt_cache(path, []),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_folder_is_not_read(read: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = tmp_path / "here.safetensors"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"here\.safetensors is a folder.*name a file"):
        read(folder)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_file_that_may_not_be_read_is_refused_with_the_reason(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(b"secret")

    def refuse(self: Path, *_: Any, **__: Any) -> Any:  # the tests may run as root, whom no mode keeps out
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"mine\.safetensors cannot be read \(Permission denied\)"):
        read(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        vc.load_calibration(tmp_path / "pipe")


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_missing_folder_is_named_as_the_user_did(write: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write(tmp_path / "nowhere" / "file.safetensors")
    assert str(raised.value) == f"the folder {tmp_path / 'nowhere'} for file.safetensors does not exist; make it first"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_is_not_written_over(write: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "here.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"here\.safetensors is a folder"):
        write(tmp_path / "here.safetensors")
    assert os.listdir(tmp_path) == ["here.safetensors"]


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=f"the folder {tmp_path} for x.npz may not be written to"):
        check_folder_of(tmp_path / "x.npz")


def npz_with(path: Path, member: str, header: bytes) -> None:
    """The calibration at `path` again, one member of it replaced by an .npy of this header and 64 bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[member] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("shape", ["(1099511627776,)", "(2, 8, 1073741824)", "(1099511627776, 0, 4)"])
@pytest.mark.parametrize("member", ["filter_0000.npy", "header.npy"])
def test_an_array_said_to_be_larger_than_its_file_is_not_allocated(member: str, shape: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.npz"
    vc.save_calibration(CALIBRATION, path)
    npz_with(path, member, f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode())
    with pytest.raises(ValueError, match=r"calibration\.npz"):
        vc.load_calibration(path)


def test_the_number_of_bytes_said_and_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "calibration.npz"
    vc.save_calibration(CALIBRATION, path)
    npz_with(path, "filter_0000.npy", b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}\n")
    with pytest.raises(ValueError, match=r"filter_0000\.npy is said to hold 4398046511104 bytes and there are 64"):
        vc.load_calibration(path)


def test_a_safetensors_header_of_4_tib_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**42) + bytes(100))
    for read in (vc.load_prompt_cache, import_published_filters):
        with pytest.raises(ValueError, match=r"x\.safetensors"):
            read(path)


def test_compressed_calibrations_load(tmp_path: Path) -> None:
    path = tmp_path / "calibration.npz"
    vc.save_calibration(CALIBRATION, path)
    with np.load(path) as content:
        members = {name: content[name] for name in content.files}
    np.savez_compressed(path, **members)
    assert vc.load_calibration(path).model_id == "some/model"
