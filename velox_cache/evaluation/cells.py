"""Results on disk, a JSON line for each: an interrupted comparison goes on where it stopped."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from velox_cache.distributed.collectives import Group, all_gather_texts


class Cells:
    """Plain JSON values by key, in a file that only grows.

    `identity` says what all of them depend on (the model, the versions); a value is found again only under the same
    identity and key. Floats survive exactly. Several processes may add to one file.
    """

    def __init__(self, file: Path, identity: Mapping[str, Any]) -> None:
        """A last line that was cut short is taken off the file. Raises ValueError when another line is damaged."""
        self._file, self._identity = file, dict(identity)
        self._values = self._read()

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """The value of `key`, or None."""
        return self._values.get(self._name(key))

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Keep a value."""
        line = json.dumps({"identity": self._identity, "key": dict(key), "value": value})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{line}\n".encode())  # in one piece, whoever else writes
        finally:
            os.close(descriptor)
        self._values[self._name(key)] = json.loads(line)["value"]

    def share(self, keys: Iterable[Mapping[str, Any]], group: Group) -> None:
        """Give every rank what any rank has of `keys`, over one file or one on each machine; collective.

        Raises RuntimeError when another rank has ended.
        """
        here = [[key, value] for key in map(dict, keys) if (value := self.get(key)) is not None]
        texts = all_gather_texts(json.dumps(here), group)
        self._values = self._read()
        for text in texts:
            for key, value in json.loads(text):
                if self.get(key) is None:
                    self.put(key, value)

    def _read(self) -> dict[str, Any]:
        whole = self._file.read_bytes() if self._file.exists() else b""
        if not whole.endswith(b"\n") and whole:  # the end of a run that was killed while it wrote
            whole = whole[: whole.rfind(b"\n") + 1]
            os.truncate(self._file, len(whole))
        lines = whole.decode().splitlines()
        found: dict[str, Any] = {}
        for number, line in enumerate(lines):
            try:
                cell = json.loads(line)
                if cell["identity"] == self._identity:
                    found[self._name(cell["key"])] = cell["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number + 1} of {self._file} is damaged ({error}); delete the line, and its cell is "
                    "measured again"
                ) from error
        return found

    @staticmethod
    def _name(key: Mapping[str, Any]) -> str:
        return json.dumps(dict(key), sort_keys=True)
