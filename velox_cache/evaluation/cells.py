"""Results on disk, one file for each: an interrupted comparison goes on where it stopped."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from velox_cache.distributed.collectives import Group, all_gather_texts


class Cells:
    """Plain JSON values by key, in a folder.

    `identity` says what all of them depend on (the model, its filters); a value is found again only under the same
    identity and key. Floats survive exactly.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder, self._identity = folder, dict(identity)

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """The value of `key`, or None. Raises ValueError when its file is damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text())["value"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and it is measured again") from error

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Keep a value. The file is there in full or not at all."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"identity": self._identity, "key": dict(key), "value": value}, indent=1))
        part.replace(path)

    def share(self, keys: Iterable[Mapping[str, Any]], group: Group) -> None:
        """Give every rank what any rank has of `keys`, over one folder or one on each machine; collective.

        Raises RuntimeError when another rank has ended.
        """
        here = [[key, value] for key in map(dict, keys) if (value := self.get(key)) is not None]
        for text in all_gather_texts(json.dumps(here), group):
            for key, value in json.loads(text):
                if self.get(key) is None:
                    self.put(key, value)

    def _path(self, key: Mapping[str, Any]) -> Path:
        whole = json.dumps([self._identity, dict(key)], sort_keys=True)
        words = [re.sub(r"\W+", "-", str(value)) for value in key.values() if isinstance(value, str | int)]
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        return self._folder / f"{'-'.join(words)[:80]}-{digest}.json"
