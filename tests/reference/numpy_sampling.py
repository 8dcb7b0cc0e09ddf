"""What is sampled from, in float64, by sorting: slow and plain, token by token where that is plainest.

Ties: all tokens as likely as the last one that a filter keeps stay too.
"""

import numpy as np


def penalised(logits, recent, penalty):
    """One row's logits [V] with the repeat penalty on each id that occurs in `recent`, however often."""
    found = np.array(logits, np.float64)
    for token in {int(t) for t in recent if 0 <= t < len(found)}:
        found[token] = found[token] * penalty if found[token] <= 0 else found[token] / penalty
    return found


def probabilities(logits, argmax, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Of each token of one row [V], and those kept, [V] bool."""
    values = np.where(np.isnan(logits), -np.inf, np.asarray(logits, np.float64))
    if not temperature > 0 or values.max() == -np.inf:
        certain = np.arange(len(values)) == argmax
        return certain.astype(np.float64), certain
    if values.max() == np.inf:
        values = np.where(values == np.inf, 0.0, -np.inf)
    kept = values > -np.inf
    if 0 < top_k < kept.sum():
        kept &= values >= np.sort(values[kept])[::-1][top_k - 1]
    if top_p < 1:
        p = _softmax(values, kept)
        mass, last = 0.0, np.inf
        for token in np.argsort(-values, kind="stable"):
            mass, last = mass + p[token], values[token]
            if mass >= top_p:
                break
        kept &= values >= last
    if min_p > 0:
        p = _softmax(values, kept)
        kept &= (p >= min_p * p.max()) | (p == p.max())
    return _softmax(np.where(kept, values, 0.0) / temperature, kept), kept


def _softmax(values, kept):
    weights = np.where(kept, np.exp(np.where(kept, values - values[kept].max(), -np.inf)), 0.0)
    return weights / weights.sum()
