"""Which rank this process is, as its launcher says. Needs no mlx, so that `velox --help` stays quick."""

import os

_SET_BY_LAUNCHERS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # mlx.launch; Open MPI; MPICH and Intel MPI


def launched_rank() -> int | None:
    """The rank of this process, or None when no launcher started it."""
    given = next((os.environ[name] for name in _SET_BY_LAUNCHERS if name in os.environ), None)
    return int(given) if given is not None and given.isdecimal() else None


def refuse_stdin(option: str) -> None:
    """Raises ValueError under a launcher. It passes stdin on to its processes but never its end, so they would wait."""
    if launched_rank() is not None:
        raise ValueError(f"{option} reads stdin, which never ends under mlx.launch; give the text itself, or a file")
