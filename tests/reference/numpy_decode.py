"""The speculative decode rule in the plainest Python over the reference model: one row, no window, no rollback.

A step emits the certain token t1, proposes drafts after it, reads the target's logits at t1 and at each draft, and
emits the longest prefix of drafts the rule lets through. Going back to the accepted position is picking the session
that was kept there, so nothing here can be wrong about caches.
"""

from dataclasses import dataclass, field

import numpy as np

from .numpy_model import Session


@dataclass
class Step:
    """One verify pass. `position` is where `certain` stands; lists have one entry per proposed draft."""

    position: int
    certain: int
    drafts: list
    probs: list  # the target's probability of each draft
    is_argmax: list  # whether the draft is the target's argmax
    accepted: int  # drafts emitted
    next_token: int  # the certain token of the next step, if there is one


@dataclass
class Result:
    """What one row emitted, why it ended, and the counts over its steps (`accepted` means emitted)."""

    tokens: list
    finish_reason: str
    K: int
    steps: list = field(default_factory=list)

    @property
    def drafted(self):
        return sum(len(step.drafts) for step in self.steps)

    @property
    def accepted(self):
        return sum(step.accepted for step in self.steps)

    @property
    def accepted_argmax(self):
        return sum(sum(step.is_argmax[: step.accepted]) for step in self.steps)

    @property
    def accepted_p_min(self):
        return self.accepted - self.accepted_argmax

    @property
    def drafted_per_position(self):
        return [sum(len(step.drafts) > j for step in self.steps) for j in range(self.K)]

    @property
    def accepted_per_position(self):
        return [sum(step.accepted > j for step in self.steps) for j in range(self.K)]

    @property
    def counters(self):
        """All counts by name; `steps` is the number of verify passes."""
        names = ["drafted", "accepted", "accepted_argmax", "accepted_p_min"]
        names += ["drafted_per_position", "accepted_per_position"]
        return {"steps": len(self.steps), **{name: getattr(self, name) for name in names}}


def probability(logits, token):
    """softmax(logits[V])[token], shifted by the maximum; NaN where a logit is NaN or +inf."""
    with np.errstate(invalid="ignore"):
        shifted = logits - np.max(logits)
        return float(np.exp(shifted[token] - np.log(np.sum(np.exp(shifted)))))


def judge(logits, draft, p_min):
    """The acceptance rule on the target's logits[V] -> (accept, is_argmax, probability).

    A draft passes if it is the target's argmax (lowest index on a tie) or the target gives it at least p_min.
    p_min <= 0 is "not set" and means 1, plain greedy; a NaN probability compares false and so rejects.
    """
    p_min = 1.0 if p_min <= 0 else p_min
    is_argmax = int(np.argmax(logits)) == draft
    p = probability(logits, draft)
    return is_argmax or p >= p_min, is_argmax, p


@dataclass(frozen=True)
class Rule:
    """What stays fixed over a run: see `decode`."""

    K: int
    p_min: float
    stop_ids: tuple
    suppress_ids: tuple
    drafter: object

    def append(self, session, token):
        """Run `token` in `session` -> the target's logits [V] after it, as the rule sees them."""
        logits = session.append(token)
        logits[list(self.suppress_ids)] = -np.inf
        return logits

    def propose(self, session, k):
        """At most k drafts after the last token of `session`."""
        if k == 0:
            return []
        return [int(d) for d in (self.drafter(session.tokens, self.K) if self.drafter else session.draft(k))][:k]


def decode(
    reference, prompt, *, max_tokens, K, p_min=1.0, ctx=None, stop_ids=(), suppress_ids=(), drafter=None
) -> Result:
    """Decode after `prompt`, a list of token ids.

    ctx bounds prompt plus output (None: no bound). suppress_ids: target logits set to -inf, the drafter unaffected.
    drafter(tokens, K): scripted drafts after tokens[-1], instead of the MTP head's; a step's window cuts them.
    """
    ctx = np.inf if ctx is None else ctx
    if not 0 < len(prompt) <= ctx:
        raise ValueError(f"a prompt of {len(prompt)} tokens in a context of {ctx}")
    rule = Rule(K, p_min, tuple(stop_ids), tuple(suppress_ids), drafter)
    session = Session(reference)
    for token in prompt:
        logits = rule.append(session, token)
    next_token = int(np.argmax(logits))
    emitted, steps = [], []
    while True:
        length = len(session.tokens)
        if len(emitted) == max_tokens:
            return Result(emitted, "length", K, steps)
        if next_token in rule.stop_ids:
            return Result(emitted, "stop", K, steps)
        if length == ctx:
            return Result(emitted, "context", K, steps)
        k = min(K, max_tokens - len(emitted) - 1, ctx - length - 1)
        session, step = take_step(rule, session, next_token, k)
        steps.append(step)
        emitted += [step.certain, *step.drafts[: step.accepted]]
        next_token = step.next_token


def take_step(rule, session, certain, k):
    """One step, with at most k drafts, from a session that ends just before `certain` -> (session after it, Step)."""
    position = len(session.tokens)
    session = session.copy()
    rows = [rule.append(session, certain)]  # rows[j]: the target's logits after the certain token and j drafts
    sessions = [session]  # sessions[j]: the state there
    drafts = rule.propose(session, k)
    for draft in drafts:
        session = session.copy()
        rows.append(rule.append(session, draft))
        sessions.append(session)
    verdicts = [judge(row, draft, rule.p_min) for row, draft in zip(rows, drafts, strict=False)]
    accepted = 0
    while accepted < len(drafts) and verdicts[accepted][0]:
        accepted += 1
    next_token = int(np.argmax(rows[accepted]))
    for j in range(accepted):
        if drafts[j] in rule.stop_ids:  # it passed, but a stop token is never emitted: the row ends in front of it
            accepted, next_token = j, drafts[j]
            break
    is_argmax, probs = [v[1] for v in verdicts], [v[2] for v in verdicts]
    return sessions[accepted], Step(position, certain, drafts, probs, is_argmax, accepted, next_token)


def simulate_from_drafts(tokens, prompt_len, draft_ids, K, max_tokens):
    """(drafted, accepted) of the rule at p_min = 1, without a model.

    tokens: the prompt and its known greedy continuation; draft_ids[p]: the chained drafts following tokens[: p + 1].
    """
    drafted = accepted = emitted = 0
    while emitted < max_tokens:
        position = prompt_len + emitted  # of the certain token
        k = min(K, max_tokens - emitted - 1)
        hits = 0
        while hits < k and draft_ids[position][hits] == tokens[position + 1 + hits]:
            hits += 1
        drafted += k
        accepted += hits
        emitted += 1 + hits
    return drafted, accepted
