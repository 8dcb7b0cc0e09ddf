"""Multi-token-prediction self-speculative decoding of GGUF models, as one compiled XLA program.

`load(path)` gives a `Model`; `Model.generate(prompt, DecodeOptions(...))`, `.score(token_ids)` and `.perplexity(text)`
do the rest.
"""

from typing import TYPE_CHECKING, Any

from sharpi_jax.version import __version__

if TYPE_CHECKING:
    from sharpi_jax.api import Generation, Model, load
    from sharpi_jax.decode.options import DecodeOptions
    from sharpi_jax.decode.score import Scores
    from sharpi_jax.errors import CheckpointError, OptionError, SharpiError
    from sharpi_jax.evaluate import Perplexity

_API = ("DecodeOptions", "Generation", "Model", "Perplexity", "Scores", "load")
_ERRORS = ("CheckpointError", "OptionError", "SharpiError")
__all__ = [
    "CheckpointError",
    "DecodeOptions",
    "Generation",
    "Model",
    "OptionError",
    "Perplexity",
    "Scores",
    "SharpiError",
    "__version__",
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
