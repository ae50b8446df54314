"""A compiler that fuses multiply-adds, as it may where the processor has them, changes no score."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCORES = """
import mlx.core as mx
import numpy as np
from velox_fn import SCORERS, fusion, learned
from velox_fn.engine.store import used_rows
from velox_fn.methods.learned import OF_ROWS


keys, values = (mx.random.normal((1, 2, 40, 64), key=mx.random.key(i)) for i in range(2))
directions, ones = mx.random.normal((2, 64), key=mx.random.key(2)), mx.ones((2, 2))
arrays = {name: mx.random.normal((2, 64), key=mx.random.key(i)) for i, name in enumerate(OF_ROWS)}
methods = {"learned": learned(n_sink=0, **arrays, score_age=0 * ones[0])}
for term in sorted(set(SCORERS) - {"projection", "recency"}):  # recency is exact, and here positions are not those
    taken = {name: directions for one in ("projection", term) for name in SCORERS[one].takes}
    moments = {"means": 0.3 * ones, "deviations": 1.7 * ones, "weights": 0.7 * ones}
    methods[term] = fusion(terms=("projection", term), n_sink=0, **taken, **moments)
for name, method in methods.items():
    block, _ = method.update(method.init(1, 2, 64), keys, values)
    ranks = []
    for t in range(40):  # each the first of its cache, which is scored at once
        token, _ = method.update(method.init(1, 2, 64), keys[:, :, t : t + 1], values[:, :, t : t + 1])
        ranks.append(used_rows(token.store).ranks)
    found, expected = mx.concatenate(ranks, axis=2) >> 32, used_rows(block.store).ranks >> 32
    np.testing.assert_array_equal(np.array(found), np.array(expected), err_msg=name)
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="asks g++ for x86's multiply-add")
def test_single_tokens_score_the_bits_of_a_block_under_a_fusing_compiler(tmp_path):
    if "fma" not in subprocess.run(["cat", "/proc/cpuinfo"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the processor has no fused multiply-add")
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -mfma -ffp-contract=fast "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}  # its own kernels
    run = subprocess.run([sys.executable, "-c", SCORES], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
