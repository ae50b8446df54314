"""Say which budget fits: from the model's shape, the memory that there is, and how long the text gets.

Bytes are known without running the model. What a budget loses is not: it is measured, and for models that were not, the
command that measures it is said.
"""

import argparse
from typing import TYPE_CHECKING

from velox_cache.cli.model_argument import add_model_argument, model_folder
from velox_cache.recommended import RECOMMENDED_METHOD

if TYPE_CHECKING:
    from velox_cache.advice.advise import Advice

EXAMPLES = """examples:
  velox advise smollm2-135m --memory 4GB --context 32000
  velox advise mlx-community/Qwen3-4B-4bit --context 128000"""

MEASURED = ("smollm2-135m", "gemma3-270m")
"""The models whose losses docs/evaluation.md has measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --memory, --context."""
    add_model_argument(parser)
    parser.add_argument(
        "--memory", metavar="SIZE", help="for weights and rows together, such as 4GB (default: what is free here)"
    )
    parser.add_argument(
        "--context", type=int, default=32768, metavar="N", help="tokens that a sequence gets to (default: 32768)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, compute, print."""
    from velox_cache.advice.advise import advise, model_in_outline
    from velox_cache.advice.memory import bytes_of, free_bytes
    from velox_cache.calibration.made_once import about, found_calibration

    memory = free_bytes() if arguments.memory is None else bytes_of(arguments.memory)
    folder = model_folder(arguments.model)
    if folder is None:
        from mlx_lm import load

        model, _ = load(arguments.model, lazy=True)
    else:
        model = model_in_outline(folder)
    advice = advise(model, memory=memory, context=arguments.context)
    print("\n".join(advice.lines()))
    if advice.bounded_layers < advice.n_layers:
        print(
            f"not counted: what the other {advice.n_layers - advice.bounded_layers} layers take, which bound themselves"
        )
    if advice.budget is not None:
        has_weights = folder is None or any(folder.glob("model*.safetensors"))
        found = found_calibration(model) if has_weights else None
        made = "its calibration is made once, on the first run" if found is None else about(found)
        print(f"method   {RECOMMENDED_METHOD}; {made}")
    print("\n".join(_next_steps(arguments.model, advice)))
    return 0


def _next_steps(model: str, advice: "Advice") -> list[str]:
    if advice.budget is None:
        return [f'run      velox generate {model} --method full --prompt "Why is the sky blue?"']
    measured = any(model.rstrip("/").split("/")[-1].lower().startswith(name) for name in MEASURED)
    known = "docs/evaluation.md has what budgets of 64 to 1,024 rows lose" if measured else "was not, for this model"
    return [
        f"measured {known}: velox compare {model} --budgets {advice.budget} measures it",
        f'run      velox generate {model} --budget {advice.budget} --prompt "Why is the sky blue?"',
    ]
