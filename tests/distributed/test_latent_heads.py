"""Latent attention with its heads on two ranks: each holds every row whole, and keeps what the whole model would."""

from pathlib import Path

import numpy as np
from launching import launched, run


def test_ranks_calibrate_and_keep_together_what_the_whole_model_does(tmp_path: Path) -> None:
    alone, together = run(["latent_heads.py", tmp_path, "none"]), launched(2, "latent_heads.py", tmp_path, "heads")
    assert (alone.status, together.status) == (0, 0), alone.err + together.err
    whole = np.load(tmp_path / "none_0.npz")
    for rank in range(2):
        found = np.load(tmp_path / f"heads_{rank}.npz")
        assert "heads of a layer together" in str(found["refused"])
        for name in set(whole.files) - {"refused"}:
            np.testing.assert_allclose(found[name], whole[name], atol=1e-5, err_msg=name)
    assert str(whole["refused"]) == ""
