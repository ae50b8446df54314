"""Arms are compared at the same budget and under the same rule for positions, or not at all."""

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from velox_cache import calibrate, install
from velox_fn import kept_positions
from velox_fn.registry import BUILT_IN

BUDGET, PROMPT = 512, 1272


class CharacterTokenizer:
    def encode(self, text):
        return [ord(character) % 97 for character in text]


@pytest.fixture(scope="module")
def model():
    mx.random.seed(0)
    sizes = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
    }
    return llama.Model(llama.ModelArgs.from_dict(sizes))


@pytest.fixture(scope="module")
def calibration(model):
    return calibrate(
        model, CharacterTokenizer(), ["What attention reads again, and nothing else. " * 8], progress=False
    )


ARMS = [(name, {}) for name, method in BUILT_IN.items() if not method.needs_calibration]
ARMS += [(name, {"calibrated": True}) for name, method in BUILT_IN.items() if method.calibrated]
ARMS += [(method, {"renumber": True}) for method in ("h2o", "streaming_llm")]


@pytest.mark.parametrize(("method", "options"), ARMS, ids=lambda part: str(part))
def test_every_arm_keeps_the_whole_budget_and_the_true_offset(model, calibration, method, options):
    settings = dict(options)
    filters = calibration if settings.pop("calibrated", False) else None
    install(model, method, budget=BUDGET, calibration=filters, **settings)
    [cache] = model.make_cache()
    tokens = mx.random.randint(0, 97, (1, PROMPT), key=mx.random.key(1))
    for start in range(0, PROMPT, 512):
        model(tokens[:, start : start + 512], cache=[cache])
    assert cache.offset == PROMPT
    assert (kept_positions(cache.record) >= 0).sum(-1).tolist() == [[BUDGET, BUDGET]]
