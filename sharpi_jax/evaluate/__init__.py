"""How well a model predicts given text, how well its MTP head predicts the model, how fast it decodes. Arrays only."""

from sharpi_jax.evaluate.perplexity import WINDOWS_AT_ONCE, Agreement, Perplexity, perplexities, text_windows
from sharpi_jax.evaluate.speed import Costs, DepthSpeed, Speed, measure_speed
from sharpi_jax.evaluate.windows import DEPTHS, WindowScores, score_windows

__all__ = [
    "DEPTHS",
    "WINDOWS_AT_ONCE",
    "Agreement",
    "Costs",
    "DepthSpeed",
    "Perplexity",
    "Speed",
    "WindowScores",
    "measure_speed",
    "perplexities",
    "score_windows",
    "text_windows",
]
