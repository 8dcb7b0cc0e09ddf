"""One forward pass over given tokens: logits, hiddens and the MTP block's logits at every position."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.trunk import head
from sharpi_jax.quant import Weight


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the model says about T given tokens, float32.

    Attributes:
      logits: [T, V]; row t predicts token t + 1.
      hidden: [T, D], after the final norm.
      mtp_logits: [T, V]; row p is the MTP block's prediction of token p + 1 from (token p, hidden p - 1), row 0 with a
        zero hidden. None where the file has no MTP head.
    """

    logits: np.ndarray
    hidden: np.ndarray
    mtp_logits: np.ndarray | None


def score(decoder: Decoder, token_ids: Sequence[int]) -> Scores:
    """Scores one sequence, in the chunks of prefill.

    Raises:
      OptionError: no tokens, more than the model's context, or an id outside the vocabulary.
    """
    params, cfg = decoder.params, decoder.cfg
    tokens, lengths = decoder.rows_of([token_ids], decoder.slots(len(token_ids), 0))
    logits, hidden, mtp_logits = [], [], []
    for chunk in decoder.chunks(tokens, lengths, drafting=cfg.has_mtp):
        count = min(len(token_ids) - chunk.start, chunk.hidden.shape[1])
        hidden.append(np.asarray(chunk.hidden)[0, :count])
        logits.append(np.asarray(decoder.programs.run(_head, params.head, chunk.hidden, cfg=cfg))[0, :count])
        if params.mtp is not None:
            out = decoder.programs.run(_head, params.mtp.head, chunk.mtp_hidden, cfg=cfg)
            mtp_logits.append(np.asarray(out)[0, :count])
    return Scores(np.concatenate(logits), np.concatenate(hidden), np.concatenate(mtp_logits) if mtp_logits else None)


def _head(weight: Weight, hidden: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    return head(weight, cfg, hidden)
