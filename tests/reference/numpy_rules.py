"""The acceptance rules in plain NumPy float64, one row at a time, as their sources state them.

Shapes: K drafts; p [K + 1, V] and q [K, V] are normalised; u [K] uniform numbers. A rule returns how many drafts pass
and, where numbers are drawn, the distribution of what follows if not all did.
"""

import numpy as np


def prefix(hits):
    """How many lead."""
    count = 0
    for hit in hits:
        if not hit:
            break
        count += 1
    return count


def softmax(logits):
    """[..., V] at temperature 1."""
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def entropy(p):
    """In nats."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def typical(p, drafts, choice, epsilon, alpha):
    """Medusa's condition, or the choice."""
    return prefix(
        d == c or p[i][d] > min(epsilon, alpha * np.exp(-entropy(p[i])))
        for i, (d, c) in enumerate(zip(drafts, choice, strict=False))
    )


def relaxed(p, drafts, choice, top_k, delta):
    """Among the first top_k of a stable sort, within delta of the best log-probability."""

    def near(p, d):
        best = np.argsort(-p, kind="stable")[: max(top_k, 0)]
        return d in best and np.log(p[d]) >= np.log(p.max()) - delta

    return prefix(d == c or near(p[i], d) for i, (d, c) in enumerate(zip(drafts, choice, strict=False)))


def threshold(p, drafts, u, single, acc):
    """SGLang's tree walk on a chain."""
    passed = prefix(u[i] <= p[i][d] / acc or p[i][d] >= single for i, d in enumerate(drafts))
    if passed == len(drafts):
        return passed, None
    left = p[passed].copy()
    left[drafts[passed]] = 0
    return passed, left / left.sum()


def rejection(p, q, drafts, u):
    """Speculative sampling, token by token."""
    passed = prefix(u[i] <= min(1, p[i][d] / q[i][d]) for i, d in enumerate(drafts))
    return passed, None if passed == len(drafts) else positive(p[passed], q[passed])


def block(p, q, drafts, u):
    """Block verification."""
    k = len(drafts)
    reach, tau = [1.0], 0
    for i, d in enumerate(drafts):
        reach.append(min(reach[-1] * p[i][d] / q[i][d], 1.0))
    for i in range(1, k + 1):
        if i == k:
            h = reach[k]
        else:
            left = np.maximum(reach[i] * p[i] - q[i], 0).sum()
            h = 1.0 if reach[i] == 1 else left / (left + 1 - reach[i])
        if u[i - 1] <= h:
            tau = i
    return tau, None if tau == k else positive(p[tau], q[tau], reach[tau])


def positive(p, q, scale=1.0):
    """The positive part of scale * p - q, normalised; p where there is none."""
    left = np.maximum(scale * p - q, 0)
    return left / left.sum() if left.sum() > 0 else p
