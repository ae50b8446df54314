"""Every architecture of the installed mlx_lm has a tiny model, and all but those that are named run."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import ARCHITECTURES, CANNOT_RUN, RUNNING, model_of

PROMPT = mx.array([[5, 9, 2, 7, 1]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_is_small(architecture: str) -> None:
    parameters = dict(tree_flatten(model_of(architecture).parameters()))
    assert (
        0 < sum(array.size for array in parameters.values()) < (4_000_000 if architecture == "phi3small" else 200_000)
    )


@pytest.mark.parametrize("architecture", RUNNING)
def test_logits_are_numbers_that_depend_on_what_came_before(architecture: str) -> None:
    model = model_of(architecture)
    logits = [model(prompt, cache=make_prompt_cache(model))[:, -1] for prompt in (PROMPT, PROMPT[:, 1:])]
    assert not mx.isnan(mx.stack(logits)).any()
    assert not mx.allclose(*logits, atol=1e-6)


@pytest.mark.parametrize("architecture", CANNOT_RUN)
def test_what_cannot_run_says_so_with_its_plain_cache(architecture: str) -> None:
    model = model_of(architecture)
    with pytest.raises((RuntimeError, ValueError), match=CANNOT_RUN[architecture]):
        mx.eval(model(PROMPT, cache=make_prompt_cache(model)))
