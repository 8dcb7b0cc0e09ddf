"""What a batch evaluation is asked for, and how far it has come. Plain data."""

import dataclasses
from collections.abc import Sequence

from sharpi_jax.decode.options import MAX_DRAFT
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.results import Setting

TIMED_BATCHES = 2  # prompts of a timed run, in batches: enough for rows to be replaced
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is evaluated: K = 0, which is greedy decoding, and each of n_max with each of p_min.

    Attributes:
      p_min: acceptance thresholds, above 0 to 1. n_max: drafts a step.
      max_tokens: of a prompt that has none of its own. batch_size: rows that decode together.
      rounds: of the timed runs; 0 leaves them out.

    Raises:
      OptionError: a value is outside its range.
    """

    p_min: tuple[float, ...] = (1.0, 0.5, 0.3, 0.1, 0.03)
    n_max: tuple[int, ...] = (1, 2, 3, 4)
    max_tokens: int = 128
    batch_size: int = 16
    rounds: int = 3

    def __post_init__(self) -> None:
        for p in self.p_min:
            if not 0 < p <= 1:
                raise OptionError(f"sweep_p_min must be numbers above 0 and at most 1, not {p!r}; 1 is exact.")
        for K in self.n_max:
            if not 0 <= K <= MAX_DRAFT:
                raise OptionError(f"sweep_n_max must be numbers from 0 to {MAX_DRAFT}, not {K!r}.")
        if not self.p_min or not self.n_max:
            raise OptionError("sweep_p_min and sweep_n_max need at least one value each.")
        for name, least, most in (("max_tokens", 1, _MOST), ("batch_size", 1, 1024), ("rounds", 0, 1000)):
            if not least <= getattr(self, name) <= most:
                raise OptionError(f"{name} must be {least} to {most}, not {getattr(self, name)!r}.")

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Each once: by K, then from the highest p_min down."""
        drafted = {Setting(K, p) for K in self.n_max if K for p in self.p_min}
        return (Setting(0), *sorted(drafted, key=lambda s: (s.K, -s.p_min)))

    @property
    def lossy(self) -> bool:
        """Whether any setting may leave greedy's path."""
        return not all(setting.lossless for setting in self.settings)


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt that was made token ids. `domain` is a group that figures are given for."""

    id: str
    domain: str
    ids: tuple[int, ...]
    max_tokens: int
    reference: str | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where an evaluation stands.

    Attributes:
      stage: "decoding", then "timing". done, total: runs of it; a run that an earlier process finished is done.
      tokens, seconds: of the loop so far, without compilation. drafted, accepted: in the runs done.
    """

    stage: str
    done: int
    total: int
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0


def timed_tasks(tasks: Sequence[Task], sweep: Sweep) -> list[Task]:
    """The prompts that are timed."""
    count = min(len(tasks), TIMED_BATCHES * sweep.batch_size)
    return [tasks[i * len(tasks) // count] for i in range(count)]
