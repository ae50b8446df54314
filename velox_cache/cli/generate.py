"""Generate text inside a bounded cache.

The text goes to stdout as it comes; one line about the cache follows on stderr. The first run with a model calibrates
it, once. --budget is a number of rows, or a share of the prompt such as 0.25. Under mlx.launch the ranks hold the
model together, and each the cache of its own part.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from velox_cache.cli.method_arguments import (
    METHOD_EXAMPLES,
    add_method_arguments,
    check_method_arguments,
    install_method,
    method_settings,
)
from velox_cache.cli.model_argument import (
    add_model_argument,
    add_model_id_argument,
    add_shard_argument,
    load_model,
    model_id,
)
from velox_cache.cli.prompt_cache_argument import add_prompt_cache_argument, stored_caches
from velox_cache.cli.stdin import text_from_stdin
from velox_cache.file_checks import file_text

if TYPE_CHECKING:
    from velox_cache.harness.memory import CacheUsage

EXAMPLES = f"""examples:
  velox generate smollm2-135m --budget 512 --prompt "Why is the sky blue?"
  velox generate MODEL --budget 0.25 --context report.txt --prompt "What does it recommend?"
  cat report.txt | velox generate MODEL --budget 1024 --recent 256 --calibration FILE --prompt - --max-tokens 400
  velox generate MODEL --method full --prompt "Once upon a time" --no-chat

{METHOD_EXAMPLES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox generate`."""
    add_model_argument(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from stdin")
    parser.add_argument(
        "--context",
        metavar="FILE",
        help="text that the prompt is about, read and evicted from before the prompt is seen",
    )
    add_prompt_cache_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="stop after N tokens (default: 256)")
    parser.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0, greedy)"
    )
    parser.add_argument("--top-p", type=float, default=0.0, metavar="P", help="nucleus sampling (default: off)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="wrap the prompt in the model's chat template (default: when it has one)",
    )
    add_method_arguments(parser)
    add_model_id_argument(parser)
    add_shard_argument(parser, "heads", "heads")


def run(arguments: argparse.Namespace) -> int:
    """Load, install, generate, account."""
    prompt = text_from_stdin("--prompt -") if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty; give --prompt TEXT, or --prompt - and text on stdin")
    if arguments.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    if not arguments.temp >= 0:
        raise ValueError(f"--temp must be 0 (greedy) or more, got {arguments.temp}")
    if not 0 <= arguments.top_p <= 1:
        raise ValueError(f"--top-p is a probability, from 0 (off) to 1, got {arguments.top_p}")

    context = file_text(arguments.context) if arguments.context else None
    check_method_arguments(arguments, share=True)
    if arguments.prompt_cache and (context is not None or method_settings(arguments) or arguments.calibration):
        raise ValueError("--prompt-cache brings its text, method and settings; leave --context and those out")

    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.generate import generation_stream
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler

    from velox_cache.cli.progress import prefill_progress
    from velox_cache.distributed.collectives import agreed_seed, barrier, world
    from velox_cache.generation import prompt_parts
    from velox_cache.harness.memory import cache_usage
    from velox_cache.introspection.read_context import read_context

    model, tokenizer = load_model(arguments.model, arguments.shard)
    group = world()
    if arguments.prompt_cache:
        if group is not None:
            raise ValueError("--prompt-cache holds the rows of a whole model; leave mlx.launch out")
        caches = stored_caches(arguments.prompt_cache, model, model_id(arguments.model))
        _, tokens = prompt_parts(tokenizer, prompt, "", arguments.chat)
    else:
        read_first, tokens = prompt_parts(tokenizer, prompt, context, arguments.chat)
        report = install_method(
            model,
            arguments,
            tokenizer=tokenizer,
            name=model_id(arguments.model),
            n_prompt=len(read_first) + len(tokens),
        )
        if report is not None and not all(entry.bounded for entry in report.layers):
            print(report, file=sys.stderr)
        caches = make_prompt_cache(model)
        read_context(model, read_first, caches)
    if arguments.seed is not None:
        mx.random.seed(arguments.seed)
    elif group is not None:
        mx.random.seed(agreed_seed(group))  # each rank samples for itself
    with prefill_progress() as on_prefill:
        for response in stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens=arguments.max_tokens,
            sampler=make_sampler(arguments.temp, arguments.top_p),
            prompt_cache=caches,
            prompt_progress_callback=on_prefill,
        ):
            print(response.text, end="", flush=True)
    if group is not None:  # mlx_lm runs a step ahead
        barrier(group, generation_stream)
    print()
    part = "" if group is None else f"rank 0 of {group.size()}: "
    print(part + usage_line(cache_usage(caches), response.generation_tps), file=sys.stderr)
    return 0


def usage_line(usage: "CacheUsage", tokens_per_second: float) -> str:
    """Tokens seen, rows kept, bytes and speed, in one line."""
    kept, full = (count / 2**20 for count in (usage.kept_bytes, usage.full_bytes))
    return (
        f"{usage.tokens_seen:,} tokens seen, {usage.rows_kept:,} rows kept; KV {kept:.1f} MiB against {full:.1f} MiB "
        f"full ({usage.compression:.1f}x); {tokens_per_second:.1f} tok/s"
    )
