"""What importing costs, each import in a process of its own, in turn."""

import subprocess
import sys
from functools import partial

from velox_cache.bench.rounds import Call, Comparison, compare

_PAIRS = (
    ("import velox_fn", "mlx, numpy and chex", "import mlx.core, numpy, chex", "import velox_fn"),
    (
        "import velox_cache",
        "mlx_lm and chex",
        "import mlx_lm, mlx_lm.models.cache, chex",
        "import velox_cache; velox_cache.EvictingKVCache",
    ),
)


def import_costs(rounds: int) -> list[Comparison]:
    """Our imports beside those of the libraries that they stand on, and the command's help beside a bare Python."""
    costs = [
        compare(name, "new process", {label: _python(alone), name: _python(ours)}, rounds=rounds)
        for name, label, alone, ours in _PAIRS
    ]
    shown = "from velox_cache.cli.main import main; main(['--help'])"
    arms = {"bare Python": _python("pass"), "velox --help": _python(shown)}
    return [*costs, compare("velox --help", "new process", arms, rounds=rounds)]


def _python(code: str) -> Call:
    return partial(subprocess.run, [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
