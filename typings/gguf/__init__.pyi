"""The part of gguf that velox_cache/models uses."""

from enum import IntEnum
from os import PathLike
from typing import Any, NamedTuple

import numpy.typing as npt

class GGMLQuantizationType(IntEnum):
    F32 = 0
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8

class ReaderField(NamedTuple):
    def contents(self, index_or_slice: int | slice = ...) -> Any: ...

class ReaderTensor(NamedTuple):
    name: str
    tensor_type: GGMLQuantizationType
    shape: npt.NDArray[Any]
    data: npt.NDArray[Any]

class GGUFReader:
    fields: dict[str, ReaderField]
    tensors: list[ReaderTensor]
    def __init__(self, path: PathLike[str] | str) -> None: ...
