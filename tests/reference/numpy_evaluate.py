"""Perplexity and the head's agreement, chain by chain, in the plainest NumPy over the reference model."""

import numpy as np


def token_losses(logits, following):
    """-log p of each of `following` [T] under logits [T, V], in nats."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=-1)) - shifted[np.arange(len(following)), following]


def scored_losses(reference, ids, n):
    """The losses that perplexity averages: in each window of n ids, of what positions n // 2 to n - 2 predict."""
    found = []
    for begin in range(0, len(ids) - n + 1, n):
        window = np.asarray(ids[begin : begin + n])
        logits = reference.trunk(window)["logits"]
        found += [token_losses(logits[t : t + 1], window[t + 1 : t + 2])[0] for t in range(n // 2, n - 1)]
    return np.array(found)


def chained_drafts(reference, ids, depths):
    """{(depth from 1, position): draft} of every chain on given ids: the text's tokens, the head's own hiddens.

    The entry at `position` is a draft of what follows it; the chain began depth - 1 positions earlier.
    """
    handed = reference.handed_over(reference.trunk(ids))
    drafts = {}
    for begin in range(len(ids)):
        out = reference.mtp(ids[: begin + 1], handed)
        for depth in range(1, depths + 1):
            at = begin + depth - 1
            if at == len(ids):
                break
            if depth > 1:
                cache = {"k": out["k"], "v": out["v"]}
                out = reference.mtp_rows(ids[at : at + 1], reference.handed_over(out)[-1:], at, cache)
            drafts[depth, at] = int(np.argmax(out["logits"][-1]))
    return drafts
