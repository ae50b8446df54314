"""The code of docs/own-method.md runs as it stands, in order, and does what the page says."""

import re
from pathlib import Path

import mlx_lm
import numpy as np
import pytest
from letters import Letters
from mlx_lm.models import llama

import velox_cache
from velox_fn import kept_positions, qfilters, streaming_llm, unregister
from velox_fn.testing import block, fed

PAGE = Path(__file__).parents[1] / "docs" / "own-method.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def tiny_model():
    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
    }
    return llama.Model(llama.ModelArgs.from_dict(sizes))


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        patch.setattr(mlx_lm, "load", lambda name: (tiny_model(), Letters()))
        for code in BLOCKS:
            exec(compile(code, str(PAGE), "exec"), found)
    yield found
    velox_cache.uninstall(found["model"])
    unregister("long")


def test_the_page_runs(names):
    assert names["again"].method.name == "long"
    assert names["model"].make_cache()[0].method.name == "most_seen"


def test_each_head_keeps_what_its_own_method_keeps(names):
    tokens = block(60)
    for calls in ([60], [30, 1, 1, 28]):
        streaming, filtered = (
            np.array(kept_positions(fed(method, tokens, calls)))
            for method in (
                streaming_llm(budget=16, n_sink=2),
                qfilters(budget=16, n_sink=2, filters=names["two"].params["filters"]),
            )
        )
        found = np.array(kept_positions(fed(names["two"], tokens, calls)))
        np.testing.assert_array_equal(found[:, 0], streaming[:, 0])
        np.testing.assert_array_equal(found[:, 1], filtered[:, 1])
    assert (found[:, 0] != filtered[:, 0]).any()


def test_a_setting_reaches_the_score(names):
    keys, values, _ = tokens = block(60)
    for bend in (0.0, 3.0):
        method = names["long"](budget=16, n_sink=0, bend=bend)
        weight = np.square(np.array(values)).sum(-1) + bend * np.square(np.array(keys)).sum(-1)
        best = np.sort(np.argsort(-weight, axis=-1)[..., :16], axis=-1)
        np.testing.assert_array_equal(np.array(kept_positions(fed(method, tokens, [60]))), best)
