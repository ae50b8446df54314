"""A model folder that mlx_lm can load: a random llama and a tokenizer with one token per byte."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from conftest import SIZES
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tiny_folder(folder: Path, chat_template: str = CHAT_TEMPLATE, further: Sequence[str] = ()) -> Path:
    """Write the files of the model into `folder`. further: tokens beside one per byte and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *further])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": chat_template})
    )
    config = (
        {"model_type": "llama"}
        | SIZES
        | {"vocab_size": len(alphabet) + 1 + len(further), "eos_token_id": len(alphabet)}
    )
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {name: 3.0 * array if "proj" in name else array for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder
