"""Say, layer by layer, what an evicting cache would do with a model. Loads no weights into memory."""

import argparse

from velox_cache.cli.model_argument import add_model_argument, model_folder

EXAMPLES = """examples:
  velox inspect-model smollm2-135m
  velox inspect-model mlx-community/gemma-3-270m-it-4bit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    add_model_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    import mlx_lm
    from rich.console import Console
    from rich.table import Table

    from velox_cache.introspection.plan import asks_for_mask_arrays, plan_layers
    from velox_cache.introspection.query_tap import QueryTap, model_type

    model, _ = mlx_lm.load(str(model_folder(arguments.model) or arguments.model), lazy=True)
    plan = plan_layers(model)
    table = Table("layer", "the model's own cache", "bounded", "why")
    for entry in plan:
        table.add_row(str(entry.layer), entry.cache, "yes" if entry.bounded else "no", entry.reason)
    console = Console()
    console.print(table)
    bounded = sum(entry.bounded for entry in plan)
    console.print(f"{model_type(model)}: {bounded} of {len(plan)} layers can be bounded")
    try:
        QueryTap(model)
        console.print("attention can be observed: methods that score by true queries work")
    except ValueError as error:
        console.print(f"methods that score by attention need queries='proxy' here: {error}")
    if asks_for_mask_arrays(model):
        console.print("masks are arrays, made once for all layers: every layer needs the same budget")
    return 0
