"""The acceptance rules by name, and what each needs: facts alone, for callers that do without JAX.

The functions are in acceptance.py and rejection.py, and `rules` joins both.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rule:
    """What holds of a rule.

    Attributes:
      source: where it comes from.
      lossy: whether what is emitted can differ from what the target emits, in distribution where draws differ.
      greedy, sampled: whether it is defined at temperature 0, and above.
      needs_p, needs_q: whether sampled runs must give the target's distribution, and that of the drafts, which must
        then be drawn from it. needs_log_sum: whether it reads the target's log_sum in greedy rows.
    """

    source: str
    lossy: bool = False
    greedy: bool = False
    sampled: bool = False
    needs_p: bool = False
    needs_q: bool = False
    needs_log_sum: bool = False


# greedy_p_min is lossy below p_min = 1 alone, where it needs log_sum: Controls.wants_probabilities sees to that.
RULES = {
    "greedy_p_min": Rule("this project", lossy=True, greedy=True),
    "sample_match": Rule("llama.cpp", greedy=True, sampled=True),
    "typical": Rule("Medusa", lossy=True, greedy=True, sampled=True, needs_p=True, needs_log_sum=True),
    "relaxed": Rule("TensorRT-LLM", lossy=True, greedy=True),
    "threshold": Rule("SGLang", lossy=True, greedy=True, sampled=True, needs_p=True, needs_log_sum=True),
    "rejection": Rule("Leviathan et al. 2023", sampled=True, needs_p=True, needs_q=True),
    "block": Rule("Sun et al. 2025", sampled=True, needs_p=True, needs_q=True),
}
