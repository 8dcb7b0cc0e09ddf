"""How well a model predicts given text, and how well its MTP head predicts the model. Arrays only; no decoding."""

from sharpi_jax.evaluate.perplexity import WINDOWS_AT_ONCE, Agreement, Perplexity, perplexities, text_windows
from sharpi_jax.evaluate.windows import DEPTHS, WindowScores, score_windows

__all__ = [
    "DEPTHS",
    "WINDOWS_AT_ONCE",
    "Agreement",
    "Perplexity",
    "WindowScores",
    "perplexities",
    "score_windows",
    "text_windows",
]
