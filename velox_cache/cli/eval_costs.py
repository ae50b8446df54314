"""The measurements of `velox eval` of what caches cost: time of a prefill, and memory."""

import argparse

from velox_cache.cli.eval_readings import text_tokens
from velox_cache.cli.eval_synthetic import Records, Result
from velox_cache.cli.method_arguments import install_method, method_settings
from velox_cache.cli.model_argument import load_model


def prefill(arguments: argparse.Namespace) -> Result:
    import mlx.core as mx

    from velox_cache.bench.arms import Shape, method
    from velox_cache.evaluation.prefill import prefill_in_chunks

    settings = {"budget": 512, **method_settings(arguments)}
    shape, tokens = Shape(), 4096
    size = (1, shape.n_kv_heads, tokens, shape.head_dim)
    keys, values = (mx.random.normal(size, key=mx.random.key(i)) for i in (0, 1))
    rows: Records = [
        {"chunk": one.chunk, "calls": one.calls, "same rows as at once": one.same_rows, "ms": 1000 * one.seconds}
        for one in prefill_in_chunks(method(arguments.method, shape, **settings), keys, values, (1024, 256, 64, 16))
    ]
    return rows, rows


def prefill_at_intervals(arguments: argparse.Namespace) -> Result:
    from functools import partial

    from velox_cache.bench.prefilling import prefill_in_turns

    model, tokenizer = load_model(arguments.model)
    tokens = text_tokens(arguments, tokenizer, arguments.context)

    def installed(interval: int) -> None:
        settings = [*arguments.settings, ("interval", interval)]
        install_method(model, argparse.Namespace(**{**vars(arguments), "settings": settings}), tokenizer=tokenizer)

    installs = {interval: partial(installed, interval) for interval in (1, 64, 128, 256)}
    found = prefill_in_turns(model, tokens, installs, rounds=arguments.rounds)
    rows: Records = [
        {
            "cache": one.label,
            "s": one.median_us / 1e6,
            "times interval 1": one.ratio,
            "quartiles": f"{one.ratio_low:.2f} - {one.ratio_high:.2f}",
            "CPU s": one.cpu_us / 1e6,
            "CPU ratio": one.cpu_ratio,
        }
        for one in found.timings
    ]
    return rows, rows


def agent_session(arguments: argparse.Namespace) -> Result:
    from velox_cache.evaluation.agent_session import Script, agent_session
    from velox_cache.harness.texts import passages, text_named

    model, tokenizer = load_model(arguments.model)
    install_method(model, arguments, tokenizer=tokenizer, snapshots=arguments.snapshots)
    words = list(tokenizer.encode(text_named(arguments.text)))
    script = Script(
        opening=tokenizer.encode("<|im_start|>system\nYou work with tools.<|im_end|>\n<|im_start|>user\nGo on."),
        results=passages(words, arguments.context, arguments.turns - 1),
        before_reply=tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"),
        after_reply=tokenizer.encode("<|im_end|>\n<|im_start|>tool\n"),
    )
    turns = agent_session(model, script, n_reply=arguments.reply, n_reasoning=arguments.reply // 2)
    rows: Records = [
        {"turn": one.turn, "prompt": one.prompt, "prefilled": one.prefilled, "same reply": "yes" if one.same else "NO"}
        for one in turns
    ]
    same = f"{sum(one.same for one in turns)} of {len(turns)}"
    totals = {name: sum(getattr(one, name) for one in turns) for name in ("prompt", "prefilled")}
    return rows, [*rows, {"turn": "all", **totals, "same reply": same}]


def memory(arguments: argparse.Namespace) -> Result:
    from mlx_lm.models.cache import make_prompt_cache

    from velox_cache import uninstall
    from velox_cache.harness.memory import memory_use

    model, tokenizer = load_model(arguments.model)
    tokens = text_tokens(arguments, tokenizer, arguments.context)
    rows: Records = []
    for name in ("full cache", arguments.method):
        if name == arguments.method:
            install_method(model, arguments)
        used = memory_use(model, lambda: make_prompt_cache(model), tokens, 256, n_steps=arguments.steps)
        uninstall(model)
        rows.append(
            {
                "cache": name,
                "rows kept": used.usage.rows_kept,
                "kept KV MiB": used.usage.kept_bytes / 2**20,
                "held MiB": used.held_bytes / 2**20,
                "MLX peak above the weights, MiB": used.peak_bytes / 2**20,
                "in the steps, MiB": used.steps_peak_bytes / 2**20,
            }
        )
    return rows, rows
