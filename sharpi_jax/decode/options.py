"""What a caller chooses about decoding: plain numbers, checked once, before anything is compiled."""

import dataclasses
import math

from sharpi_jax.errors import OptionError

MAX_DRAFT = 16
SPEC_TYPES = ("auto", "none", "mtp")
# Of a vocabulary of 151,936, 94 to 98% of the tokens of English prose and of code are among these or in the prompt.
# With that, and a draft's cost by its bytes, 32k to 64k are within 4% of each other in speed, this one the best.
AUTO_DRAFT_VOCAB = 32_768


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """Options of one decoding run.

    Attributes:
      max_tokens: number of tokens to emit at most, >= 0.
      spec_type: "auto" drafts when the file has an MTP head, "none" never does, "mtp" insists on a head.
      spec_draft_n_max: K, drafts proposed per step at most, 1 to 16.
      spec_draft_p_min: acceptance threshold on the *target's* probability of a draft; 1 is exact, values <= 0 mean 1.
      spec_draft_vocab: tokens among which drafts are chosen: the N commonest, beside special ones and the prompt's own;
        "full" for all; "auto" for AUTO_DRAFT_VOCAB of a large vocabulary under an exact rule, else all.
      ctx_size: cache slots (prompt and output together); None takes prompt + max_tokens, rounded up to a bucket.
      ignore_eos: stop ids do not stop, and their logits are masked to -inf.

    Raises:
      OptionError: a value is outside its range.
    """

    max_tokens: int = 256
    spec_type: str = "auto"
    spec_draft_n_max: int = 3
    spec_draft_p_min: float = 1.0
    spec_draft_vocab: int | str = "auto"
    ctx_size: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise OptionError(f"max_tokens must be at least 0, not {self.max_tokens}.")
        if self.spec_type not in SPEC_TYPES:
            raise OptionError(f"spec_type must be one of {', '.join(SPEC_TYPES)}, not {self.spec_type!r}.")
        if not 1 <= self.spec_draft_n_max <= MAX_DRAFT:
            raise OptionError(
                f"spec_draft_n_max must be 1 to {MAX_DRAFT}, not {self.spec_draft_n_max}; to decode without drafts "
                "set spec_type to none."
            )
        if math.isnan(self.spec_draft_p_min) or self.spec_draft_p_min > 1:
            raise OptionError(f"spec_draft_p_min must be a number of at most 1, not {self.spec_draft_p_min}.")
        vocab = self.spec_draft_vocab
        if vocab not in ("auto", "full") and (not isinstance(vocab, int) or isinstance(vocab, bool) or vocab < 1):
            raise OptionError(f"spec_draft_vocab must be auto, full or an integer of at least 1, not {vocab!r}.")
        if self.ctx_size is not None and self.ctx_size < 1:
            raise OptionError(f"ctx_size must be at least 1, not {self.ctx_size}.")

    def draft_vocab(self, vocab_size: int) -> int | None:
        """How many common tokens drafts are chosen among, of `vocab_size`; None for all."""
        match self.spec_draft_vocab:
            case "full":
                return None
            case "auto":
                exact = self.spec_draft_p_min <= 0 or self.spec_draft_p_min == 1
                return AUTO_DRAFT_VOCAB if exact and vocab_size >= 2 * AUTO_DRAFT_VOCAB else None
            case size:
                return int(size) if int(size) < vocab_size else None
