"""A smaller head for drafting: the logits of likely tokens only.

Drafts are verified against the whole vocabulary, so under an exact rule a shortlist changes which drafts are proposed,
and never the text. Under a lossy one every change of the drafts can change the text; so there the whole vocabulary is
the default.
"""

from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from sharpi_jax.quant import Weight

BUCKET = 2048  # lengths are multiples of it, so that prompts of different lengths share one program


@struct.dataclass
class Shortlist:
    """Some rows of the drafting head.

    Attributes:
      head: [n, D]. ids: [n] int32, the rows' token ids, never descending: so ties go to the lowest id, as in the whole
        head. The last id fills up what is left of the bucket; `candidates` counts it once.
    """

    head: Weight
    ids: jax.Array


def shortlist_ids(common: np.ndarray, prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray | None:
    """The ids of a run's shortlist, [n] int32 as Shortlist has them: `common`, and every token of the prompts.

    Rows of a batch share one list. So under a lossy rule a row in a batch is that row alone only with the whole
    vocabulary.

    Returns:
      None where that is the whole vocabulary.
    """
    ids = np.unique(np.concatenate([np.asarray(part, np.int32) for part in (common, *prompts)]))
    ids = ids[ids < vocab_size]
    if len(ids) == vocab_size:
        return None
    length = min(-(-len(ids) // BUCKET) * BUCKET, vocab_size)
    return np.pad(ids, (0, length - len(ids)), mode="edge")
