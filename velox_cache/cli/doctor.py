"""Check this installation: versions, machine, Metal kernels against what they must compute, BLAS and timings.

The report is plain text, made to be attached to an issue. The exit status is 1 if something is wrong.
"""

import argparse

EXAMPLES = """examples:
  velox doctor
  velox doctor --json > report.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    import json

    from velox_cache.doctor.report import as_json, as_text, doctor

    findings = doctor()
    print(json.dumps(as_json(findings), indent=2) if arguments.json else as_text(findings))
    return int(any(finding.fault for finding in findings))
