"""Choosing the draft length for one row, in plain Python with NumPy's float32 scalars: slow and obvious."""

import numpy as np

F = np.float32


class Controller:
    """Asks for k drafts, is told how many were accepted."""

    def __init__(self, K):
        self.K = K
        self.hits = [F(1.5) if j == 0 else F(0) for j in range(K)]
        self.tries = [F(2) if j == 0 else F(0) for j in range(K)]
        self.idle = [0] * K

    def expected_tokens(self, k):
        """Of a step with k drafts."""
        tokens, chance, rate = F(1), F(1), F(0)
        for j in range(k):
            leaning = F(0) if j == 0 else F(2)  # on the rate of the depth before
            rate = down((self.hits[j] + leaning * rate) / (self.tries[j] + leaning))
            chance = down(chance * rate)
            tokens = tokens + chance
        return tokens

    def choose(self, step_ms, most):
        lengths = range(min(self.K, max(most, 0)) + 1)
        speed = {k: self.expected_tokens(k) / F(step_ms[k]) for k in lengths}
        best = max(lengths, key=lambda k: (speed[k], -k))
        if best == lengths[-1]:
            return best
        deeper = max(lengths[best + 1 :], key=lambda k: (speed[k], -k))
        # What the step takes, less the time that the best length would take for as many tokens.
        lost_ms = F(step_ms[deeper]) - self.expected_tokens(deeper) / speed[best]
        idle_ms = F(self.idle[deeper - 1]) * F(step_ms[best])
        return deeper if idle_ms >= lost_ms * F(96) else best

    def observe(self, proposed, accepted):
        for j in range(self.K):
            if j < proposed and j <= accepted:
                self.hits[j] = self.hits[j] - self.hits[j] / F(32) + F(1 if j < accepted else 0)
                self.tries[j] = self.tries[j] - self.tries[j] / F(32) + F(1)
            elif self.tries[j] > 1:
                self.hits[j] = self.hits[j] - self.hits[j] / F(64)
                self.tries[j] = self.tries[j] - self.tries[j] / F(64)
            self.idle[j] = 0 if j < proposed else self.idle[j] + 1


def down(x):
    """To a multiple of 1/4096."""
    return np.floor(x * F(4096)) / F(4096)
