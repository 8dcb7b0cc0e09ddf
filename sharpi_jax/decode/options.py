"""What a caller chooses about decoding: plain numbers, checked once, before anything is compiled."""

import dataclasses
import math
from collections.abc import Callable

from sharpi_jax.decode.rule_table import RULES
from sharpi_jax.errors import OptionError

MAX_DRAFT = 16
AUTO_MAX_DRAFT = 7  # most drafts of a step when their number is chosen by itself: a window of 8
SPEC_TYPES = ("auto", "none", "mtp")
ACCEPT_RULES = ("auto", *RULES)
MAX_LOGPROBS = 100
# Of a vocabulary of 151,936, 94 to 98% of the tokens of English prose and of code are among these or in the prompt.
# With that, and a draft's cost by its bytes, 32k to 64k are within 4% of each other in speed, this one the best.
AUTO_DRAFT_VOCAB = 32_768


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target chooses its tokens.

    Attributes:
      temperature: 0 takes the likeliest token. top_k: among as many, 0 for all. top_p: among the likeliest whose
        probabilities sum up to it. min_p: among those of at least this share of the likeliest one's probability.
        All three look at probabilities at temperature 1, in this order, as llama.cpp's do.
      seed: of the random numbers; the same seed gives the same tokens.
      repeat_penalty: logits of recent tokens are divided by it where they are positive, else multiplied; 1 is off.
      repeat_last_n: how many tokens are recent, those of the prompt among them; -1 for all.
      logit_bias: (token id, what is added to its logit) pairs.
      min_tokens: as many come before a stop token may be chosen.
      max_thinking_tokens: between the tokens that open and close thinking; None for no limit.
      logprobs: log-probabilities of each token and of as many of the likeliest ones; None for none at all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_thinking_tokens: int | None = None
    logprobs: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Which drafts are accepted; acceptance.py and rules.py define the rules and their parameters.

    Attributes:
      accept_rule: a rule's name; "auto" is greedy_p_min at temperature 0 and sample_match above.
    """

    accept_rule: str = "auto"
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3
    relaxed_top_k: int = 10
    relaxed_delta: float = 0.6
    threshold_single: float = 1.0
    threshold_acc: float = 1.0


@dataclasses.dataclass(frozen=True)
class DecodeOptions(SamplingOptions, RuleOptions):
    """Options of one decoding run.

    Attributes:
      max_tokens: number of tokens to emit at most, >= 0.
      spec_type: "auto" drafts when the file has an MTP head, "none" never does, "mtp" insists on a head.
      spec_draft_n_max: K, drafts proposed per step at most, 1 to 16; "auto" chooses for each step, at most
        AUTO_MAX_DRAFT.
      spec_draft_p_min: acceptance threshold on the *target's* probability of a draft; 1 is exact, values <= 0 mean 1.
      spec_draft_vocab: tokens among which drafts are chosen: the N commonest, beside special ones and the prompt's own;
        "full" for all; "auto" for AUTO_DRAFT_VOCAB of a large vocabulary under an exact rule, else all.
      spec_draft_stop_p: drafting stops before a draft of less probability to the *drafter*; 0 is off.
      spec_draft_stop_top_k: among how many of its candidates that probability is taken, 0 for all (llama.cpp: 10).
      spec_draft_n_min: a step with fewer drafts than this proposes none.
      ctx_size: cache slots (prompt and output together); None takes prompt + max_tokens, rounded up to a bucket.
      ignore_eos: stop ids do not stop, and their logits are masked to -inf.

    Raises:
      OptionError: a value is outside its range, or two contradict each other.
    """

    max_tokens: int = 256
    spec_type: str = "auto"
    spec_draft_n_max: int | str = 3
    spec_draft_p_min: float = 1.0
    spec_draft_vocab: int | str = "auto"
    spec_draft_stop_p: float = 0.0
    spec_draft_stop_top_k: int = 0
    spec_draft_n_min: int = 0
    ctx_size: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, holds, wanted in _RANGES:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise OptionError(f"{name} must be {wanted}, not {value!r}.")
        for pair in self.logit_bias:
            if not (_is_integer(pair[0]) and pair[0] >= 0) or not _is_number(pair[1]) or pair[1] == math.inf:
                raise OptionError(f"logit_bias must be pairs of a token id and a number below infinity, not {pair!r}.")
        self._check_drafting()
        self._check_rule()

    def _check_drafting(self) -> None:
        n_max, vocab = self.spec_draft_n_max, self.spec_draft_vocab
        if n_max != "auto" and not (_is_integer(n_max) and 1 <= int(n_max) <= MAX_DRAFT):
            raise OptionError(
                f"spec_draft_n_max must be 1 to {MAX_DRAFT}, or auto, not {n_max!r}; to decode without drafts "
                "set spec_type to none."
            )
        if vocab not in ("auto", "full") and not (_is_integer(vocab) and int(vocab) >= 1):
            raise OptionError(f"spec_draft_vocab must be auto, full or an integer of at least 1, not {vocab!r}.")
        if self.spec_draft_n_min > self.draft_length:
            raise OptionError(
                f"spec_draft_n_min is {self.spec_draft_n_min}, more than the {self.draft_length} drafts that a step "
                "can have; lower it."
            )

    def _check_rule(self) -> None:
        rule = RULES[self.rule]
        if self.temperature > 0 and self.sets_p_min:
            raise OptionError(
                "spec_draft_p_min below 1 is a rule for greedy decoding; with a temperature choose accept_rule "
                "sample_match, which is exact, or typical or threshold, which are lossy."
            )
        if self.temperature > 0 and not rule.sampled:
            raise OptionError(
                f"accept_rule {self.accept_rule} is defined for greedy decoding alone; set temperature to 0, or choose "
                f"{_names(lambda r: r.sampled)}."
            )
        if self.temperature == 0 and not rule.greedy:
            raise OptionError(
                f"accept_rule {self.accept_rule} draws tokens, which takes a temperature above 0; set one, or choose "
                f"{_names(lambda r: r.greedy)}."
            )
        if self.sets_p_min and self.rule != "greedy_p_min":
            raise OptionError(
                f"spec_draft_p_min has no meaning under accept_rule {self.accept_rule}; drop one of them."
            )

    @property
    def sets_p_min(self) -> bool:
        """Whether there is a threshold that is not the exact one."""
        return 0 < self.spec_draft_p_min < 1

    @property
    def rule(self) -> str:
        """The acceptance rule, a key of RULES."""
        if self.accept_rule != "auto":
            return self.accept_rule
        return "sample_match" if self.temperature > 0 else "greedy_p_min"

    @property
    def lossy(self) -> bool:
        """Whether drafts can change the text, or the distribution that it comes from."""
        if self.rule == "greedy_p_min":  # two tokens cannot both exceed one half
            return 0 < self.spec_draft_p_min <= 0.5
        return RULES[self.rule].lossy

    @property
    def same_text(self) -> bool:
        """Whether the tokens are those of decoding without drafts, whatever the drafts are."""
        return not self.lossy and self.rule in ("greedy_p_min", "sample_match")

    @property
    def draft_length(self) -> int:
        """K, the most drafts of a step, where there is a head."""
        return AUTO_MAX_DRAFT if self.spec_draft_n_max == "auto" else int(self.spec_draft_n_max)

    def draft_vocab(self, vocab_size: int) -> int | None:
        """How many common tokens drafts are chosen among, of `vocab_size`; None for all."""
        match self.spec_draft_vocab:
            case "full":
                return None
            case "auto":
                exact = self.same_text and not self.sets_p_min
                return AUTO_DRAFT_VOCAB if exact and vocab_size >= 2 * AUTO_DRAFT_VOCAB else None
            case size:
                return int(size) if int(size) < vocab_size else None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _integer(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: _is_integer(value) and low <= int(value) <= high  # type: ignore[call-overload]


def _number(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: _is_number(value) and low <= float(value) <= high  # type: ignore[arg-type]


def _names(wanted: Callable[..., bool]) -> str:
    return ", ".join(name for name, rule in RULES.items() if wanted(rule))


_LARGE = 2**31 - 1
_FINITE = 3e38  # of float32
# A name, what must hold of its value, and how that is said. A value of None is not looked at.
_RANGES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("max_tokens", _integer(0, _LARGE), "an integer of at least 0"),
    ("spec_type", lambda value: value in SPEC_TYPES, f"one of {', '.join(SPEC_TYPES)}"),
    ("spec_draft_p_min", _number(-math.inf, 1), "a number of at most 1"),
    ("spec_draft_stop_p", _number(0, 1), "a number from 0 to 1"),
    ("spec_draft_stop_top_k", _integer(0, 1000), "an integer from 0 to 1000"),
    ("spec_draft_n_min", _integer(0, MAX_DRAFT), f"0 to {MAX_DRAFT}"),
    ("ctx_size", _integer(1, _LARGE), "an integer of at least 1"),
    ("temperature", _number(0, _FINITE), "a number of at least 0"),
    ("top_k", _integer(0, _LARGE), "an integer of at least 0"),
    ("top_p", _number(0, 1), "a number from 0 to 1"),
    ("min_p", _number(0, 1), "a number from 0 to 1"),
    ("seed", _integer(0, 2**32 - 1), "an integer from 0 to 2^32 - 1"),
    ("repeat_penalty", lambda value: _number(0, _FINITE)(value) and value != 0, "a number above 0"),
    ("repeat_last_n", _integer(-1, _LARGE), "an integer of at least -1"),
    ("min_tokens", _integer(0, _LARGE), "an integer of at least 0"),
    ("max_thinking_tokens", _integer(0, _LARGE), "an integer of at least 0"),
    ("logprobs", _integer(0, MAX_LOGPROBS), f"0 to {MAX_LOGPROBS}"),
    ("accept_rule", lambda value: value in ACCEPT_RULES, f"one of {', '.join(ACCEPT_RULES)}"),
    ("typical_epsilon", _number(0, 1), "a number from 0 to 1"),
    ("typical_alpha", _number(0, _FINITE), "a number of at least 0"),
    ("relaxed_top_k", _integer(1, _LARGE), "an integer of at least 1"),
    ("relaxed_delta", _number(0, _FINITE), "a number of at least 0"),
    ("threshold_single", _number(0, 1), "a number from 0 to 1"),
    ("threshold_acc", lambda value: _number(0, 1)(value) and value != 0, "a number above 0, at most 1"),
)
