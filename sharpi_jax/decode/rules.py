"""The acceptance rules by name: a new one is a function, an entry here and one in rule_table.py."""

from sharpi_jax.decode import acceptance, rejection
from sharpi_jax.decode.acceptance import Evidence, Judgement, RuleParams
from sharpi_jax.decode.rule_table import RULES

FUNCTIONS = {
    "greedy_p_min": acceptance.greedy_p_min,
    "sample_match": acceptance.sample_match,
    "typical": acceptance.typical,
    "relaxed": acceptance.relaxed,
    "threshold": rejection.threshold,
    "rejection": rejection.rejection,
    "block": rejection.block,
}


def judge(rule: str, evidence: Evidence, params: RuleParams) -> Judgement:
    """What the rule of that name says.

    Raises:
      ValueError: the rule is not defined for a run that is sampled, or for one that is not.
    """
    found = RULES[rule]
    if not (found.sampled if evidence.sampled else found.greedy):
        kind = "a temperature above 0" if evidence.sampled else "temperature 0"
        raise ValueError(f"the acceptance rule {rule} is not defined for {kind}")
    if evidence.drafts.shape[1] == 0:  # nothing to judge: the target's choice follows
        return acceptance.sample_match(evidence, params)
    return FUNCTIONS[rule](evidence, params)
