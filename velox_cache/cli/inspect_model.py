"""Say, layer by layer, what an evicting cache would do with a model. Loads no weights into memory."""

import argparse

from velox_cache.cli.model_argument import add_model_argument, model_folder

EXAMPLES = """examples:
  velox inspect-model smollm2-135m
  velox inspect-model mlx-community/gemma-3-270m-it-4bit
  velox inspect-model --all > docs/architectures.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --all."""
    add_model_argument(parser, required=False)
    parser.add_argument(
        "--all",
        action="store_true",
        help="say it of every architecture that mlx_lm has, in Markdown, from a small random model of each",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ValueError unless it is told of which model, or of all."""
    if arguments.all == (arguments.model is not None):
        raise ValueError("give either MODEL or --all")
    if arguments.all:
        from velox_cache.architectures.page import page

        print(page(), end="")
    else:
        _print_plan(arguments.model)
    return 0


def _print_plan(name: str) -> None:
    import mlx_lm
    from rich.console import Console
    from rich.table import Table

    from velox_cache.architectures.verdict import in_words, verdict
    from velox_cache.introspection.query_tap import model_type

    model, _ = mlx_lm.load(str(model_folder(name) or name), lazy=True)
    found = verdict(model)
    table = Table("layer", "the model's own cache", "bounded", "why")
    for entry in found.layers:
        table.add_row(str(entry.layer), entry.cache, "yes" if entry.bounded else "no", entry.reason)
    console = Console()
    console.print(table)
    said = dict(in_words(found))
    console.print(f"{model_type(model)}: {said.pop('layers')}")
    for about in ("queries", "renumbering", "budgets", "losses"):  # the others are in the table
        if about in said:
            console.print(said[about])
