"""The option that names a calibration's file, the same for every command."""

import argparse
from collections.abc import Sequence
from typing import Any


def add_calibration_argument(
    to: argparse.ArgumentParser | argparse._ArgumentGroup, description: str, *, required: bool = False
) -> None:
    """--calibration FILE, and --filters FILE, the documents' name for it; giving both is an error."""
    to.add_argument("--calibration", "--filters", metavar="FILE", required=required, action=_Once, help=description)


class _Once(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error("--calibration is given twice (--filters is another name for it); give one file")
        setattr(namespace, self.dest, values)
