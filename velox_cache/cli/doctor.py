"""Check this installation: versions, machine, Metal kernels against what they must compute, BLAS and timings.

With MODEL also what works on it: which layers can be bounded, whether its queries can be seen and its keys turned.
The report is plain text, made to be attached to an issue. The exit status is 1 if something is wrong.
"""

import argparse
from typing import TYPE_CHECKING

from velox_cache.cli.model_argument import add_model_argument, model_folder

if TYPE_CHECKING:
    from velox_cache.doctor.report import Finding

EXAMPLES = """examples:
  velox doctor
  velox doctor mlx-community/gemma-3-270m-it-4bit
  velox doctor --json > report.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox doctor`."""
    add_model_argument(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Raises ValueError or FileNotFoundError when there is no such MODEL."""
    import json

    from velox_cache.doctor.report import as_json, as_text, doctor

    of_model = [] if arguments.model is None else _of_model(arguments.model)  # first: a wrong name is told at once
    findings = [*doctor(), *of_model]
    print(json.dumps(as_json(findings), indent=2) if arguments.json else as_text(findings))
    return int(any(finding.fault for finding in findings))


def _of_model(name: str) -> "list[Finding]":
    import mlx_lm

    from velox_cache.architectures.verdict import in_words, verdict
    from velox_cache.doctor.report import Finding

    model, _ = mlx_lm.load(str(model_folder(name) or name), lazy=True)
    return [Finding(f"model {name}", about, said) for about, said in in_words(verdict(model)).items()]
