"""Multi-token-prediction self-speculative decoding of GGUF models, as one compiled XLA program.

`load(path)` gives a `Model`; `Model.generate(prompt, DecodeOptions(...))`, `.score(token_ids)` and `.perplexity(text)`
do the rest; `evaluate(model, prompts, Sweep(...))` says what drafting and lossy acceptance gain and cost.
"""

import sys
import types
from typing import TYPE_CHECKING, Any

from sharpi_jax.version import __version__

if TYPE_CHECKING:
    from sharpi_jax.api import Generation, Model, load
    from sharpi_jax.decode.options import DecodeOptions
    from sharpi_jax.decode.score import Scores
    from sharpi_jax.errors import CheckpointError, OptionError, SharpiError
    from sharpi_jax.evaluate import Perplexity
    from sharpi_jax.evaluate.prompts import Prompt
    from sharpi_jax.evaluate.results import CostModel, Evaluation
    from sharpi_jax.evaluate.sweep import Sweep

_API = (
    "CostModel",
    "DecodeOptions",
    "Evaluation",
    "Generation",
    "Model",
    "Perplexity",
    "Prompt",
    "Scores",
    "Sweep",
    "load",
)
_ERRORS = ("CheckpointError", "OptionError", "SharpiError")
__all__ = [
    "CheckpointError",
    "CostModel",
    "DecodeOptions",
    "Evaluation",
    "Generation",
    "Model",
    "OptionError",
    "Perplexity",
    "Prompt",
    "Scores",
    "SharpiError",
    "Sweep",
    "__version__",
    "evaluate",
    "load",
]


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that `sharpi-jax --help` and usage errors do not wait for JAX.
    if name in _API:
        from sharpi_jax import api

        return getattr(api, name)
    if name in _ERRORS:
        from sharpi_jax import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """The package, whose `evaluate` is the function, though a room of that name is imported beneath it."""

    @property
    def evaluate(self) -> Any:
        from sharpi_jax import api

        return api.evaluate

    @evaluate.setter
    def evaluate(self, room: types.ModuleType) -> None:
        """The import system binds every room's name in its package; what imports from this one finds it without."""


sys.modules[__name__].__class__ = _Package
