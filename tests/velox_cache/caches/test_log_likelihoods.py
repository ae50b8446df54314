"""`mlx_lm.evaluate` scores texts in lockstep batches padded on the right, and from copies of one prefix's caches."""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

import velox_cache as vc

LENGTHS = [50, 7, 33, 64, 12, 41]
TEXTS = [tuple((11 * i + 7 * t) % 97 for i in range(n)) for t, n in enumerate(LENGTHS)]
METHODS: dict[str, dict[str, Any]] = {
    "qfilters": {"calib_tokens": 8},
    "streaming_llm": {"n_sink": 2},
    "l2norm": {},
    "h2o": {"grace": 4},
    "tova": {},
    "snapkv": {"obs_window": 4},
    "curdkv": {},
}


class _LM:
    """Stands for lm_eval's base class, which only names what a model must do."""


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`mlx_lm.evaluate`, also where lm_eval, which brings the tasks, is not installed."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = _LM  # type: ignore[attr-defined]
    sys.modules["lm_eval.api.registry"].register_model = lambda *names: lambda cls: cls  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    yield importlib.import_module("mlx_lm.evaluate")
    sys.modules.pop("mlx_lm.evaluate", None)


@pytest.fixture
def scorer(evaluation: Any, tiny_model: Callable[..., nn.Module]) -> Callable[..., Any]:
    """Its model class around a small model, reading blocks of 16 tokens; texts are tuples of tokens."""

    def build(method: str | None, batch_size: int = 4, budget: int = 24) -> Any:
        made = evaluation.MLXLM.__new__(evaluation.MLXLM)
        made._model, made._batch_size, made._max_tokens, made.use_chat_template = tiny_model(), batch_size, None, False
        made._tokenize = lambda texts: [tuple(text) for text in texts]
        made._process_prompt = functools.partial(made._process_prompt, step_size=16)
        made._score_fn = functools.partial(made._score_fn, step_size=16)
        if method is not None:
            vc.install(made._model, method, budget=budget, **METHODS[method])
        return made

    return build


@pytest.mark.parametrize("method", METHODS)
def test_log_likelihoods_do_not_depend_on_the_batch_size(scorer: Callable[..., Any], method: str) -> None:
    requests = [Request(text) for text in TEXTS]
    one, four = (scorer(method, batch_size).loglikelihood_rolling(requests) for batch_size in (1, 4))
    np.testing.assert_allclose(four, one, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_log_likelihoods_within_budget_are_those_of_the_plain_caches(scorer: Callable[..., Any], method: str) -> None:
    requests = [Request(text) for text in TEXTS]
    plain, ours = (scorer(name, 4, budget=200).loglikelihood_rolling(requests) for name in (None, method))
    assert ours == plain


def test_what_is_evicted_is_missed_in_the_log_likelihoods(scorer: Callable[..., Any]) -> None:
    # Otherwise equal ones would say nothing. The third block is the first that finds rows missing.
    requests = [Request(text) for text in TEXTS]
    plain, ours = (np.array(scorer(name).loglikelihood_rolling(requests)) for name in (None, "streaming_llm"))
    short = np.array(LENGTHS) - 1 <= 32
    np.testing.assert_allclose(ours[short], plain[short], rtol=1e-5)
    assert (np.abs(ours - plain)[~short] > 1e-3).all()


@pytest.mark.parametrize("method", METHODS)
def test_continuations_of_one_prefix_do_not_see_each_other(scorer: Callable[..., Any], method: str) -> None:
    prefix = TEXTS[3][:40]
    endings = [text[:n] for text, n in zip(TEXTS, (20, 1, 9, 30), strict=False)]
    together = scorer(method).loglikelihood([Request(prefix, ending) for ending in endings])
    apart = [scorer(method).loglikelihood([Request(prefix, ending)])[0] for ending in endings]
    assert together == apart
    assert len({score for score, _ in together}) == len(endings)
