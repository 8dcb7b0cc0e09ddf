"""Perplexity as llama.cpp's tool of that name measures it, so that the figures compare; and the MTP head beside it.

The text is cut into consecutive windows of n tokens; what is left over is dropped. Each window is read on its own, with
a BOS in the place of its first token where the model wants one. Scored are the predictions that its positions n // 2 to
n - 2 make: those have at least half a window to go by. The head is measured on positions of the same half.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.windows import DEPTHS, score_windows

MIN_WINDOW = 8  # so that the second half holds a chain of DEPTHS drafts
WINDOWS_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How often the head's draft is the trunk's choice, by depth from 1: the acceptance that drafting can expect.

    Attributes:
      hits: by depth. positions: that were compared, the same for every depth.
    """

    hits: tuple[int, ...]
    positions: int

    @classmethod
    def of(cls, hits: np.ndarray) -> "Agreement":
        """Of hits [DEPTHS, positions] bool."""
        return cls(tuple(int(n) for n in hits.sum(axis=1)), hits.shape[1])

    def rate(self, depth: int) -> float:
        return self.hits[depth - 1] / self.positions

    def standard_error(self, depth: int) -> float:
        """Of `rate`, positions taken as independent."""
        rate = self.rate(depth)
        return math.sqrt(rate * (1 - rate) / self.positions)


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The measurement, or how it stands after some of the windows.

    Attributes:
      windows: measured so far, of `ctx_size` tokens each. tokens: whose predictions were scored.
      size: bytes of those tokens' text.
      nll, nll_squared: sums over the tokens of -log p, in nats, and of its square.
      agreement: of the MTP head; None without one.
    """

    ctx_size: int
    windows: int
    tokens: int
    size: int
    nll: float
    nll_squared: float
    agreement: Agreement | None

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens

    @property
    def nats_error(self) -> float:
        """Standard error of `nats_per_token`, tokens taken as independent; NaN for one token."""
        if self.tokens < 2:
            return math.nan
        variance = self.nll_squared / self.tokens - self.nats_per_token**2
        return math.sqrt(max(variance, 0.0) / (self.tokens - 1))

    @property
    def perplexity(self) -> float:
        return math.inf if self.nats_per_token > 700 else math.exp(self.nats_per_token)  # the largest float is e^709

    @property
    def perplexity_error(self) -> float:
        """To first order: the error of the exponent times the perplexity."""
        return self.perplexity * self.nats_error

    @property
    def bits_per_byte(self) -> float:
        """NaN where the tokens stand for no text."""
        return self.nll / math.log(2) / self.size if self.size else math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON: figures, not sums; null for what is not finite."""
        figures = {
            name: value if math.isfinite(value := getattr(self, name)) else None
            for name in ("perplexity", "perplexity_error", "nats_per_token", "nats_error", "bits_per_byte")
        }
        found: dict[str, Any] = {"windows": self.windows, "tokens_scored": self.tokens, "bytes": self.size} | figures
        a = self.agreement
        depths = range(1, DEPTHS + 1)
        found["mtp"] = a and {
            "positions": a.positions,
            "agreement": [{"depth": d, "rate": a.rate(d), "standard_error": a.standard_error(d)} for d in depths],
        }
        return found


def text_windows(ids: Sequence[int], ctx_size: int, bos_id: int | None = None) -> np.ndarray:
    """The windows [N, ctx_size] of a text; each begins with `bos_id` in the place of its token, if one is given.

    Raises:
      OptionError: the text does not fill one window, or a window is too small to score anything.
    """
    if ctx_size < MIN_WINDOW:
        raise OptionError(f"ctx_size is {ctx_size}, but a window of perplexity needs at least {MIN_WINDOW} tokens.")
    count = len(ids) // ctx_size
    if count == 0:
        raise OptionError(
            f"the text has {len(ids)} tokens, but one window takes {ctx_size}; give a longer text or lower ctx_size."
        )
    windows = np.asarray(ids[: count * ctx_size]).reshape(count, ctx_size)
    if bos_id is not None:
        windows[:, 0] = bos_id
    return windows


def perplexities(decoder: Decoder, windows: np.ndarray, sizes: np.ndarray) -> Iterator[Perplexity]:
    """Measures windows [N, n] a few at a time, and says after each few how the measurement stands; the last is final.

    Args:
      sizes: [N, n], the bytes that each token stands for.

    Raises:
      OptionError: n is more than the model's context, or an id is outside the vocabulary.
    """
    count, ctx_size = windows.shape
    decoder.slots(ctx_size, 0, ctx_size)  # refuses what is more than the model's
    first = ctx_size // 2
    rows = min(WINDOWS_AT_ONCE, count)
    state = Perplexity(ctx_size, 0, 0, 0, 0.0, 0.0, Agreement((0,) * DEPTHS, 0) if decoder.cfg.has_mtp else None)
    for begin in range(0, count, rows):
        scores = score_windows(decoder, windows[begin : begin + rows], first, rows=rows)
        nll = scores.nll[:, first:].astype(np.float64)
        state = dataclasses.replace(
            state,
            windows=state.windows + len(nll),
            tokens=state.tokens + nll.size,
            size=state.size + int(sizes[begin : begin + rows, first + 1 :].sum()),
            nll=state.nll + float(nll.sum()),
            nll_squared=state.nll_squared + float((nll**2).sum()),
            agreement=state.agreement and _add(state.agreement, scores.draft_hits(first)),
        )
        yield state


def _add(total: Agreement, hits: np.ndarray) -> Agreement:
    more = Agreement.of(hits)
    both = zip(total.hits, more.hits, strict=True)
    return Agreement(tuple(a + b for a, b in both), total.positions + more.positions)
