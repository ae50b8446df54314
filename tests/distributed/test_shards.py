"""Models spread over two processes: each rank's caches keep what the whole model's would keep there."""

import numpy as np
import pytest
from launching import launched, run
from small_models import CONFIG

RUNS = ["qfilters", "random", "h2o", "budgets", "tiers", "static_tiers", "builder"]
N_RANKS = 2

pytestmark = pytest.mark.slow  # what a rank takes of a model is tested without processes in test_parts_of_a_model.py


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """`kept(spread, run)`: what each rank found, in the order of ranks; spread is none, heads or layers."""
    folder = tmp_path_factory.mktemp("kept")
    alone, together = (
        run(["keep_rows.py", folder, "none"]),
        launched(N_RANKS, "keep_rows.py", folder, "heads", "layers"),
    )
    assert (alone.status, together.status) == (0, 0), alone.err + together.err

    def find(spread, run):
        ranks = range(1 if spread == "none" else N_RANKS)
        return [np.load(folder / f"{spread}_{run}_{rank}.npz") for rank in ranks]

    return find


@pytest.mark.parametrize("run", RUNS)
def test_gathered_heads_keep_what_the_whole_model_keeps(kept, run):
    [whole] = kept("none", run)
    for layer in range(CONFIG["num_hidden_layers"]):
        gathered = np.concatenate([rank[f"kept_{layer}"] for rank in kept("heads", run)])
        np.testing.assert_array_equal(gathered, whole[f"kept_{layer}"])


@pytest.mark.parametrize("run", RUNS)
def test_layers_of_a_pipeline_keep_what_the_whole_model_keeps(kept, run):
    [whole] = kept("none", run)
    later, earlier = kept("layers", run)  # mlx_lm gives rank 0 the last layers
    in_order = [rank[f"kept_{layer}"] for rank, n in ((earlier, 1), (later, 2)) for layer in range(n)]
    for layer, rows in enumerate(in_order):
        np.testing.assert_array_equal(rows, whole[f"kept_{layer}"])


@pytest.mark.parametrize("spread", ["heads", "layers"])
@pytest.mark.parametrize("run", RUNS)
def test_every_rank_predicts_what_the_whole_model_predicts(kept, run, spread):
    [whole] = kept("none", run)
    for rank in kept(spread, run):
        np.testing.assert_allclose(rank["logits"], whole["logits"], atol=1e-5)


def test_a_rank_makes_caches_for_its_own_layers_only(kept):
    assert [len(rank["held"]) for rank in kept("layers", "qfilters")] == [2, 1]


def test_a_rank_holds_the_bytes_of_its_own_heads_only(kept):
    [whole] = kept("none", "qfilters")
    shared = 4  # the offset, an int32 that each rank has
    for rank in kept("heads", "qfilters"):
        np.testing.assert_array_equal((rank["held"] - shared) * N_RANKS, whole["held"] - shared)


@pytest.mark.real_model
def test_three_ranks_of_one_head_each_do_what_smollm2_does(tmp_path, smollm2_path):
    alone = run(["real_heads.py", tmp_path, smollm2_path, "none"])
    together = launched(3, "real_heads.py", tmp_path, smollm2_path, "heads", seconds=280)
    assert (alone.status, together.status) == (0, 0), alone.err + together.err
    whole = np.load(tmp_path / "none_0.npz")
    ranks = [np.load(tmp_path / f"heads_{rank}.npz") for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([rank["kept"] for rank in ranks], axis=1), whole["kept"])
    for rank in ranks:
        np.testing.assert_allclose(rank["logits"], whole["logits"], atol=1e-3)
