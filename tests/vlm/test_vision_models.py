"""Tiny random vision models of the installed mlx_vlm with evicting caches: an image and text, alone and in batches."""

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: make test-vlm")

from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator, generate_step
from mlx_vlm.models import llava, qwen2_vl
from mlx_vlm.models.cache import KVCache, make_prompt_cache

import velox_cache as vc
from velox_cache.introspection.mlx_vlm_models import is_of_mlx_vlm
from velox_fn import kept_positions, kv

IMAGE, START, VOCABULARY = 90, 91, 96
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
WORDS = [int(token) for token in np.random.default_rng(0).integers(0, 90, 60)]
N_TOKENS = 12


def qwen2_vl_model():
    """Its positions (M-RoPE) are not token indices: the 16 patches of an image take those of a grid."""
    text = qwen2_vl.TextConfig(
        model_type="qwen2_vl", rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, **TEXT
    )
    vision = qwen2_vl.VisionConfig(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4)
    config = qwen2_vl.ModelConfig(text, vision, "qwen2_vl", image_token_id=IMAGE, vision_start_token_id=START)
    return qwen2_vl.Model(config)


def llava_model():
    text = llava.TextConfig(model_type="llama", **TEXT)
    vision = llava.VisionConfig(
        "clip_vision_model",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    return llava.Model(llava.ModelConfig(text, vision, "llava", image_token_index=IMAGE))


def picture(name, seed=0):
    """Pixels of one image, of 16 tokens in both models, and what else `get_input_embeddings` takes."""
    rng = np.random.default_rng(seed)
    if name == "llava":
        return mx.array(rng.standard_normal((1, 3, 16, 16)).astype(np.float32)), {}
    pixels = mx.array(rng.standard_normal((64, 3 * 2 * 4 * 4)).astype(np.float32))
    return pixels, {"image_grid_thw": mx.array([[1, 8, 8]])}


def prompt(n_words, first=0):
    words = WORDS[first : first + n_words]
    return [*words[:3], START, *[IMAGE] * 16, *words[3:]]


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def named(request):
    mx.random.seed(1)
    model = {"llava": llava_model, "qwen2_vl": qwen2_vl_model}[request.param]()
    mx.eval(model.parameters())
    return request.param, model


@pytest.fixture
def model(named):
    yield named[1]
    vc.uninstall(named[1].language_model)


def tokens_of(named, prompt_cache=None, words=30, **options):
    """The tokens and log-probabilities that mlx_vlm's `generate_step` gives after an image and text."""
    name, model = named
    pixels, grid = picture(name)
    steps = generate_step(
        mx.array([prompt(words)]), model, pixels, None, max_tokens=N_TOKENS, temperature=0.0, prompt_cache=prompt_cache,
        **grid, **options,
    )  # fmt: skip
    found = [(int(token), np.array(logprobs.astype(mx.float32))) for token, logprobs in steps]
    return [token for token, _ in found], np.stack([logprobs for _, logprobs in found])


@pytest.mark.parametrize("method", ["l2norm", "h2o", "qfilters"])
def test_within_budget_the_tokens_are_those_of_the_plain_cache(named, model, method):
    plain, expected = tokens_of(named)
    vc.install(model.language_model, method, budget=100, calibrate=False)
    found, logprobs = tokens_of(named)
    assert found == plain
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("method", ["l2norm", "h2o", "curdkv"])
@pytest.mark.parametrize("step", [2048, 16])
def test_over_budget_rows_are_bounded_and_are_the_models_own(named, model, method, step):
    own = make_prompt_cache(model.language_model)
    tokens_of(named, own, prefill_step_size=step)
    vc.install(model.language_model, method, budget=24)
    caches = make_prompt_cache(model.language_model)
    tokens_of(named, caches, prefill_step_size=step)
    for cache, plain in zip(caches, own, strict=True):
        assert isinstance(cache, vc.EvictingKVCache)
        assert type(plain) is KVCache
        assert cache.size() == 24
        assert cache.offset == plain.offset
    keys = np.array(kv(caches[0].record)[0])[0]
    for head, positions in enumerate(np.array(kept_positions(caches[0].record))[0]):
        # of the first layer, whose rows no eviction has changed; the tokens after the first eviction may be others
        in_prompt = positions < len(prompt(30))
        np.testing.assert_array_equal(
            keys[head][in_prompt], np.array(own[0].keys)[0, head, positions[in_prompt]]
        )  # fmt: skip


class Processor:
    """What the batch generator asks of a processor: when to stop, which is never."""

    @property
    def tokenizer(self):
        return self

    @property
    def stopping_criteria(self):
        return self

    def add_eos_token_ids(self, tokens):
        pass

    def __call__(self, token):
        return False


def generated(named, prompts, manager=None, first_picture=0):
    """Tokens that mlx_vlm's batch generator gives each prompt of an image and text; each has a picture of its own."""
    name, model = named
    generator = BatchGenerator(model.language_model, Processor(), compute_logprobs=False, apc_manager=manager)
    embedded = []
    for seed, ids in enumerate(prompts, first_picture):
        pixels, grid = picture(name, seed)
        features = model.get_input_embeddings(mx.array([ids]), pixels, **grid)
        given = {key: value for key, value in features.to_dict().items() if value is not None}
        embedded.append(given | {"_apc_semantic_hash": seed})  # of the image, as mlx_vlm's server gives it
    uids = generator.insert([list(ids) for ids in prompts], N_TOKENS, prompt_kwargs=embedded)
    found = {uid: [] for uid in uids}
    while generator.has_work:
        for response in generator.next()[1]:
            found[response.uid].append(response.token)
    generator.close()
    return [found[uid] for uid in uids]


@pytest.mark.parametrize("lengths", [(30, 30), (30, 12), (9, 40)], ids=str)
def test_a_batch_of_two_within_budget_is_that_of_the_plain_cache(named, model, lengths):
    prompts = [prompt(n, first) for first, n in enumerate(lengths)]
    plain = generated(named, prompts)
    vc.install(model.language_model, "h2o", budget=120)
    assert generated(named, prompts) == plain


@pytest.mark.parametrize("method", ["l2norm", "h2o"])
def test_each_of_a_batch_of_two_over_budget_is_as_alone(named, model, method):
    prompts = [prompt(30), prompt(12, 5)]
    vc.install(model.language_model, method, budget=24)
    together = generated(named, prompts)
    assert [len(tokens) for tokens in together] == [N_TOKENS, N_TOKENS]
    assert together == [generated(named, [each], first_picture=i)[0] for i, each in enumerate(prompts)]


def test_a_batch_of_two_with_budgets_of_each_layer_within_them_is_that_of_the_plain_cache(named, model):
    prompts = [prompt(30), prompt(12, 5)]
    plain = generated(named, prompts)
    vc.install(model.language_model, "h2o", budget=[120, 90])
    assert generated(named, prompts) == plain


@pytest.mark.parametrize("method", ["l2norm", "h2o"])
def test_each_of_a_batch_of_two_with_budgets_of_each_layer_is_as_alone(named, model, method):
    prompts = [prompt(30), prompt(12, 5)]
    vc.install(model.language_model, method, budget=[24, 36])
    sizes = [cache.method.settings["budget"] for cache in make_prompt_cache(model.language_model)]
    together = generated(named, prompts)
    assert sizes == [24, 36]
    assert together == [generated(named, [each], first_picture=i)[0] for i, each in enumerate(prompts)]


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def encode(self, text):
        return [ord(letter) % 90 for letter in text]


@pytest.mark.calibrates
def test_the_default_method_is_calibrated_on_the_language_model(named, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = vc.install(model.language_model, budget=24, tokenizer=Letters())
    caches = make_prompt_cache(model.language_model)
    tokens_of(named, caches)
    assert report.method == "fusion"
    assert "predicts attention" in str(report)
    assert [cache.size() for cache in caches] == [24, 24]


def test_bf16_weights_with_float32_embeddings_of_an_image(named, model):
    language = model.language_model
    language.set_dtype(mx.bfloat16)
    try:
        plain, _ = tokens_of(named)
        vc.install(language, "h2o", budget=100)
        caches = make_prompt_cache(language)
        name, model = named
        pixels, grid = picture(name)
        features = model.get_input_embeddings(mx.array([prompt(30)]), pixels, **grid)
        embedded = features.inputs_embeds.astype(mx.float32)
        logits = language(mx.array([prompt(30)]), inputs_embeds=embedded, cache=caches).logits
        step = language(mx.array([[5]]), cache=caches).logits
        mx.eval(logits, step)
        own = [KVCache() for _ in caches]
        expected = language(mx.array([prompt(30)]), inputs_embeds=embedded, cache=own).logits
        expected_step = language(mx.array([[5]]), cache=own).logits
        for found, right in ((logits, expected), (step, expected_step)):
            both = (np.array(each.astype(mx.float32)) for each in (found, right))
            np.testing.assert_allclose(*both, atol=0.05)
        assert tokens_of(named)[0] == plain
    finally:
        language.set_dtype(mx.float32)


def test_a_prefix_that_was_seen_is_taken_up_again(named, model):
    first = prompt(40)
    longer = [*first, *WORDS[:6]]
    plain = generated(named, [longer])
    vc.install(model.language_model, "l2norm", budget=200)
    manager = APCManager(block_size=4)
    generated(named, [first], manager)
    assert manager.stats.exact_stores > 0
    assert generated(named, [longer], manager) == plain
    assert manager.stats.exact_hits > 0


def test_the_whole_model_and_intervals_are_refused_with_words(named, model):
    assert is_of_mlx_vlm(model)
    with pytest.raises(ValueError, match=r"give model\.language_model"):
        vc.install(model, "l2norm", budget=24)
    with pytest.raises(ValueError, match="leave interval=1"):
        vc.install(model.language_model, "l2norm", budget=24, interval=8)


def test_rows_whose_positions_are_a_grid_are_not_renumbered(named, model):
    if named[0] == "llava":
        vc.install(model.language_model, "streaming_llm", budget=24, renumber=True)
        return
    with pytest.raises(ValueError, match="position_ids"):
        vc.install(model.language_model, "streaming_llm", budget=24, renumber=True)


def test_install_leaves_nothing_of_its_probes_in_the_model(named, model):
    language = model.language_model
    before = {name: value for name, value in {**vars(language), **language}.items() if name != "make_cache"}
    vc.install(language, "h2o", budget=24)
    after = {name: value for name, value in {**vars(language), **language}.items() if name != "make_cache"}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
