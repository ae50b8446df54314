"""The part of mlx_lm that we use; mlx_lm ships no type information."""

from .generate import batch_generate as batch_generate
from .generate import generate as generate
from .generate import stream_generate as stream_generate
from .utils import load as load

__version__: str
