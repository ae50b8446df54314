"""Read a text, keep what the model needs most to repeat it (KVzip), and write the prompt cache to a file.

The text is read twice, and then any number of prompts about it start from the file, without reading it again:
`velox generate --prompt-cache FILE`. In Python: `velox_cache.compress`.
"""

import argparse
import sys

from velox_cache.cli.model_argument import add_model_argument, load_model, model_id
from velox_cache.file_checks import check_folder_of, file_text

EXAMPLES = """examples:
  velox compress smollm2-135m --context report.txt --budget 512 --out report.safetensors
  velox generate smollm2-135m --prompt-cache report.safetensors --prompt "What does it recommend?" """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox compress`."""
    add_model_argument(parser)
    parser.add_argument("--context", required=True, metavar="FILE", help="the text")
    parser.add_argument(
        "--budget", type=int, default=512, metavar="N", help="most rows kept per head, then and later (default: 512)"
    )
    parser.add_argument("--n-sink", type=int, default=4, metavar="N", help="first rows that always stay (default: 4)")
    parser.add_argument(
        "--chunk", type=int, default=2000, metavar="C", help="tokens repeated at a time (default: 2000)"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the prompt cache, a .safetensors file")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="begin the text as the model's chat template does (default: when it has one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, compress, save, account."""
    text = file_text(arguments.context)
    if not text.strip():
        raise ValueError(f"{arguments.context} is empty: there is nothing to compress")
    check_folder_of(arguments.out)

    from velox_cache import compress, save_prompt_cache
    from velox_cache.cli.prompt_cache_argument import MODEL_LABEL, WEIGHTS_LABEL
    from velox_cache.generation import prompt_parts
    from velox_cache.harness.memory import cache_usage
    from velox_cache.introspection.weights_digest import weights_digest

    model, tokenizer = load_model(arguments.model)
    tokens, _ = prompt_parts(tokenizer, "?", text, arguments.chat)
    small = compress(model, tokenizer, tokens, budget=arguments.budget, n_sink=arguments.n_sink, chunk=arguments.chunk)
    labels = {MODEL_LABEL: model_id(arguments.model), WEIGHTS_LABEL: weights_digest(model) or ""}
    save_prompt_cache(arguments.out, small, labels)
    usage = cache_usage(small)
    kept, full = (count / 2**20 for count in (usage.kept_bytes, usage.full_bytes))
    print(
        f"{arguments.out}: {usage.rows_kept:,} rows of {usage.tokens_seen:,} tokens; KV {kept:.1f} MiB against "
        f"{full:.1f} MiB full ({usage.compression:.1f}x)",
        file=sys.stderr,
    )
    return 0
