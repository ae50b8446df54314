"""Run a script in several processes on this machine, and end all of them whatever happens."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

HERE = Path(__file__).parent
ONE_THREAD = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # ranks share this machine's cores


@dataclass(frozen=True)
class Ended:
    """How a launch came out."""

    status: int | None  # None: it had to be killed
    out: str
    err: str


def launched(n_ranks: int, *command: object, seconds: float = 200) -> Ended:
    """`command` in `n_ranks` processes under mlx.launch. After `seconds` everything it started is killed."""
    return _ended(_under_launcher(n_ranks, command), seconds)


@contextlib.contextmanager
def running(n_ranks: int, *command: object) -> Iterator[None]:
    """`command` in `n_ranks` processes under mlx.launch, killed at the end of the block."""
    process = _started(_under_launcher(n_ranks, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        _kill_group(process.pid)
        process.wait()


def run(command: list[object], *, seconds: float = 200) -> Ended:
    """One Python script by itself."""
    return _ended([sys.executable, *command], seconds)


def each_rank(n_ranks: int, *command: object, seconds: float = 200) -> list[Ended]:
    """`command` in `n_ranks` processes without a launcher, which would end all of them as soon as one fails."""
    first_port = free_ports(n_ranks)
    hosts = [[f"127.0.0.1:{first_port + rank}"] for rank in range(n_ranks)]
    with NamedTemporaryFile("w", suffix=".json") as hostfile, ThreadPoolExecutor(n_ranks) as pool:
        json.dump(hosts, hostfile)
        hostfile.flush()
        environments = [{"MLX_HOSTFILE": hostfile.name, "MLX_RANK": str(rank)} for rank in range(n_ranks)]
        whole = [sys.executable, *command]
        return list(pool.map(lambda more: _ended(whole, seconds, **more), environments))


def _ended(command: list[object], seconds: float, **environment: str) -> Ended:
    process = _started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Ended(None, out, err)
    finally:
        _kill_group(process.pid)
    return Ended(process.returncode, out, err)


def _under_launcher(n_ranks: int, command: Sequence[object]) -> list[object]:
    launcher = Path(sys.executable).with_name("mlx.launch")
    ring = ["--backend", "ring", "-p", free_ports(n_ranks)]
    return [launcher, "-n", n_ranks, *ring, "--", sys.executable, *command]


def _started(command: Sequence[object], *, stdout: int, stderr: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=HERE,
        env=os.environ | ONE_THREAD | environment,
        start_new_session=True,  # a process group, so that nothing outlives it
    )


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on. mlx.launch gives each rank the next one."""
    for start in range(20000 + os.getpid() % 5000 * 2, 60000, count):
        listeners = []
        try:
            for port in range(start, start + count):
                listener = socket.socket()
                listeners.append(listener)
                listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
        return start
    raise RuntimeError("no free ports")
