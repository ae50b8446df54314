"""Many caches read at once measure as each does by itself, and on a model whose numbers are known."""

import math
import warnings

import numpy as np
import pytest
from next_is_plus_one import NextIsPlusOne

from velox_cache import install, uninstall
from velox_cache.evaluation import read_passage
from velox_cache.harness.arm_readings import gap_closed, read_arms
from velox_cache.harness.arms import FULL, Arm, cache_maker, parse_arm
from velox_cache.harness.fidelity import fidelity
from velox_cache.harness.perplexity import perplexity

TOKENS = [int(token) for token in np.random.default_rng(3).integers(97, size=60)]
ARMS = [FULL, Arm("stream", "streaming_llm", {"budget": 16}), Arm("h2o", "h2o", {"budget": 20, "grace": 4})]


@pytest.fixture
def readings(tiny_model):
    model = tiny_model()
    return model, read_arms(model, TOKENS, [cache_maker(model, arm) for arm in ARMS], n_context=40)


@pytest.mark.parametrize("i", range(len(ARMS)))
def test_an_arm_measures_as_it_does_by_itself(readings, i):
    model, found = readings
    reference = read_passage(model, TOKENS, n_context=40, prefill_step_size=40)
    if ARMS[i].method:
        install(model, ARMS[i].method, **ARMS[i].settings)
    alone = read_passage(model, TOKENS, n_context=40, prefill_step_size=40)
    uninstall(model)
    assert found[i].perplexity == pytest.approx(perplexity(alone), rel=1e-5)
    assert found[i].fidelity.kl_divergence == pytest.approx(fidelity(alone, reference).kl_divergence, abs=1e-5)
    assert found[i].fidelity.agreement == fidelity(alone, reference).agreement
    assert found[i].usage == alone.usage


def test_the_full_cache_agrees_with_itself(readings):
    _, found = readings
    assert (found[0].fidelity.agreement, found[0].fidelity.kl_divergence) == (1, 0)
    assert found[1].fidelity.kl_divergence > 0


def test_perplexity_does_not_depend_on_the_order_of_arms(readings, tiny_model):
    model, found = readings
    again = read_arms(model, TOKENS, [cache_maker(model, arm) for arm in ARMS[::-1]], n_context=40)
    assert [one.perplexity for one in again[::-1]] == pytest.approx([one.perplexity for one in found], rel=1e-5)


@pytest.mark.parametrize(("value", "share"), [(8.0, 1.0), (16.0, 0.0), (12.0, 0.5), (20.0, -0.5)])
def test_the_gap_closed_runs_from_the_named_arm_to_the_full_cache(value, share):
    assert gap_closed(value, full=8.0, named=16.0) == share


def test_without_a_gap_no_share_is_claimed():
    assert math.isnan(gap_closed(9.0, full=8.0, named=8.0))


def test_arms_that_never_evict_are_warned_of(tiny_model):
    model = tiny_model()
    roomy, small = Arm("roomy", "streaming_llm", {"budget": 64}), ARMS[1]
    with pytest.warns(UserWarning, match="no budget is reached: 59 tokens are read"):
        read_arms(model, TOKENS, [cache_maker(model, arm) for arm in (FULL, roomy)], n_context=40)
    for arms in ((FULL,), (FULL, roomy, small)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_arms(model, TOKENS, [cache_maker(model, arm) for arm in arms], n_context=40)


@pytest.mark.parametrize("n_context", [0, 1, len(TOKENS)])
def test_a_context_that_leaves_nothing_to_read_is_refused(n_context):
    with pytest.raises(ValueError, match="n_context"):
        read_arms(NextIsPlusOne(97, 0.5), TOKENS, [], n_context=n_context)


def test_a_share_is_of_the_budget():
    assert parse_arm("qfilters:recent=3/4", 128).settings["recent"] == 96


def test_an_arm_is_named_by_method_and_settings():
    arm = parse_arm("qfilters:recent=0:calibrated=False:use_metal_kernels=false", 128)
    assert (arm.method, arm.calibrated) == ("qfilters", False)
    assert dict(arm.settings) == {"budget": 128, "recent": 0, "use_metal_kernels": False}


@pytest.mark.parametrize("text", ["nothing_of_the_kind", "qfilters:recent", "qfilters:=3"])
def test_an_arm_that_cannot_be_understood_is_refused(text):
    with pytest.raises(ValueError, match=r"no method|an arm is"):
        parse_arm(text, 128)


def test_a_context_in_blocks_is_evicted_after_each(tiny_model):
    model = tiny_model(num_hidden_layers=1)  # whose rows do not depend on what was evicted
    tova = Arm("tova", "tova", {"budget": 16})
    makers = [cache_maker(model, arm) for arm in (*ARMS[:2], tova)]
    at_once, blocks = (read_arms(model, TOKENS, makers, n_context=40, block=block) for block in (0, 8))
    assert blocks[1].perplexity == pytest.approx(at_once[1].perplexity, rel=1e-5)  # its rows do not depend on the cut
    assert blocks[2].perplexity != pytest.approx(at_once[2].perplexity, rel=1e-5)
    install(model, "tova", **tova.settings)
    alone = read_passage(model, TOKENS, n_context=40, prefill_step_size=8)
    uninstall(model)
    assert blocks[2].perplexity == pytest.approx(perplexity(alone), rel=1e-5)


def test_a_negative_block_is_refused(tiny_model):
    model = tiny_model()
    with pytest.raises(ValueError, match="block must be at least 0, got -1"):
        read_arms(model, TOKENS, [cache_maker(model, FULL)], n_context=40, block=-1)
