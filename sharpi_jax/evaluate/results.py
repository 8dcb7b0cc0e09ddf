"""What an evaluation finds: one record per run, one summary per setting. Plain data, written to JSON and read back."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from sharpi_jax.decode.stats import Statistics, StepRecord
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.bootstrap import Interval


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """One point of the sweep.

    Attributes:
      K: drafts a step; 0 is plain decoding.
      p_min: the target's probability from which a draft that is not its argmax passes; 1 accepts the argmax alone.
    """

    K: int
    p_min: float = 1.0

    @property
    def lossless(self) -> bool:
        """Whether the text is greedy's by construction."""
        return self.K == 0 or self.p_min >= 1

    def as_dict(self) -> dict[str, Any]:
        return {"K": self.K, "p_min": self.p_min}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(int(values["K"]), float(values["p_min"]))

    def __str__(self) -> str:
        if self.K == 0:
            return "plain decoding"
        return f"K = {self.K}, p_min = {self.p_min:g}"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One prompt decoded with one setting: a line of results.jsonl.

    Attributes:
      output_ids: the tokens emitted: of each step the certain token and the accepted drafts.
      text: of the output, as a reader gets it. finish_reason: why it ended.
      stats: counts over the run. steps: what each step did; they hold the same counts.
      log_likelihood: the sum of the trunk's log-probabilities of output_ids, in nats.
      greedy_log_likelihood: the same of what greedy decoding produces for this prompt, which has greedy_tokens tokens.
      first_divergence: the index in output_ids of the first token that is not greedy's; None if there is none.
      edit_distance: tokens to insert, delete or replace to get greedy's output. identical: whether it is 0.
      reference_match: whether the text is the prompt's reference; None where it has none.
    """

    prompt_id: str
    domain: str
    setting: Setting
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stats: Statistics
    steps: tuple[StepRecord, ...]
    log_likelihood: float
    greedy_log_likelihood: float
    greedy_tokens: int
    first_divergence: int | None
    edit_distance: int
    identical: bool
    reference_match: bool | None

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "setting": self.setting.as_dict(),
            "prompt_ids": list(self.prompt_ids),
            "output_ids": list(self.output_ids),
            "stats": self.stats.as_dict(),
            "steps": [step.as_dict() for step in self.steps],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`.

        Raises:
          KeyError, TypeError, ValueError: the values are not those of a run.
        """
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(
            **fields
            | {
                "setting": Setting.from_dict(values["setting"]),
                "prompt_ids": tuple(values["prompt_ids"]),
                "output_ids": tuple(values["output_ids"]),
                "stats": _rebuilt(Statistics, values["stats"]),
                "steps": tuple(_rebuilt(StepRecord, step) for step in values["steps"]),
            }
        )


@dataclasses.dataclass(frozen=True)
class SettingTiming:
    """How fast a setting decodes where all rows share it: only such runs give a speed.

    Attributes:
      tokens_per_s: of all rows together, the median of the rounds. ratio: to that of K = 0.
      rounds: in which all settings were run in turn. batch_size: rows at once.
    """

    setting: Setting
    tokens_per_s: float
    ratio: float
    rounds: int
    batch_size: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(**fields | {"setting": Setting.from_dict(values["setting"])})


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Other hardware, in units of a plain decoding step of its own.

    Attributes:
      draft: what one draft costs. verify: what each position of the window after the first adds to a verify pass.
    """

    draft: float = 0.05
    verify: float = 0.02

    def step(self, K: int) -> float:
        """What a step with K drafts costs."""
        return 1 + K * (self.draft + self.verify)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(float(values["draft"]), float(values["verify"]))


@dataclasses.dataclass(frozen=True)
class PositionFigures:
    """How drafts at one position of the window fare; position 1 is right after the certain token.

    Attributes:
      drafted: how many there were. rate: the share that was emitted; by_argmax and by_p_min add up to it.
    """

    position: int
    drafted: int
    rate: Interval
    by_argmax: Interval
    by_p_min: Interval


@dataclasses.dataclass(frozen=True)
class Decile:
    """Drafts whose target-side probability lies in [low, high), the last one 1 included.

    Attributes:
      drafts: that the rule ruled on: those up to the first that was not emitted. argmax: how many were the argmax.
    """

    low: float
    high: float
    drafts: int
    argmax: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one setting, over all prompts or those of a domain. Each
    figure has its 95% interval; it is None where there is nothing to measure.

    Attributes:
      domain: None for all. prompts, tokens, steps, drafted: how many there were.
      acceptance_rate: drafts emitted, of those drafted; by_argmax and by_p_min add up to it. 0 without drafts.
      mean_accepted_length: 1 + accepted / steps. passes_per_token: steps / tokens, so below 1 where drafts pay.
      identical: share of runs whose tokens are greedy's.
      first_divergence: index of the first token that is not greedy's, over the runs that have one.
      off_path: share of tokens from the first divergence of their run on.
      edits_per_token: edit distance to greedy's output, by tokens produced.
      bits_lost: mean over runs of how many bits per token the trunk finds the output less likely than greedy's,
        (greedy_log_likelihood / greedy_tokens - log_likelihood / tokens) / ln 2. Below 0 where it is more likely:
        greedy's choices are best one by one, not as a whole. Runs without tokens are left out.
      reference_match: share of runs whose text is the reference, of those that have one.
      predicted_speedup: mean accepted length / CostModel.step(K).
    """

    domain: str | None
    prompts: int
    tokens: int
    steps: int
    drafted: int
    acceptance_rate: Interval
    by_argmax: Interval
    by_p_min: Interval
    by_position: tuple[PositionFigures, ...]
    mean_accepted_length: Interval
    passes_per_token: Interval
    identical: Interval
    first_divergence: Interval | None
    off_path: Interval
    edits_per_token: Interval
    bits_lost: Interval | None
    reference_match: Interval | None
    predicted_speedup: Interval
    calibration: tuple[Decile, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        positions = tuple(PositionFigures(**_intervals(position)) for position in fields["by_position"])
        calibration = tuple(Decile(**decile) for decile in fields["calibration"])
        return cls(**_intervals(fields) | {"by_position": positions, "calibration": calibration})


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a setting gains and what it loses.

    Attributes:
      timing: None where the setting was not timed. overall: all prompts. domains: by name.
    """

    setting: Setting
    timing: SettingTiming | None
    overall: Figures
    domains: tuple[Figures, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": self.setting.as_dict(),
            "timing": self.timing and self.timing.as_dict(),
            "overall": self.overall.as_dict(),
            "domains": [figures.as_dict() for figures in self.domains],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            setting=Setting.from_dict(values["setting"]),
            timing=values["timing"] and SettingTiming.from_dict(values["timing"]),
            overall=Figures.from_dict(values["overall"]),
            domains=tuple(Figures.from_dict(figures) for figures in values["domains"]),
        )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All that an evaluation found, and all that its report needs.

    Attributes:
      model: what was evaluated, for people.
      results: every run. summaries: one per setting, by K, then from the highest p_min down.
      cost: the other hardware that predicted speed-ups are for.
      token_texts: the text of every token id in `results`; bytes that are no UTF-8 escaped, control characters as
        they are. An id that is missing is shown by its number.
      compilations: of the whole evaluation; None if not counted.
      details: further lines of the report's head, as (name, value): the command, the batch size, ...
    """

    model: str
    results: tuple[RunResult, ...]
    summaries: tuple[Summary, ...]
    cost: CostModel = CostModel()
    token_texts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    compilations: int | None = None
    details: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """What summary.json holds: all but the runs and the texts of tokens."""
        return {
            "model": self.model,
            "details": dict(self.details),
            "compilations": self.compilations,
            "cost": self.cost.as_dict(),
            "summaries": [summary.as_dict() for summary in self.summaries],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per run, its text and steps left out: what results.csv and `to_pandas` hold."""
        return [_row(result) for result in self.results]

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame.

        Raises:
          OptionError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise OptionError("to_pandas needs pandas: pip install pandas.") from error
        return pandas.DataFrame(self.rows())


def _row(result: RunResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "prompt_id": result.prompt_id,
        "domain": result.domain,
        "K": result.setting.K,
        "p_min": result.setting.p_min,
        "prompt_tokens": len(result.prompt_ids),
        "tokens": len(result.output_ids),
        "finish_reason": result.finish_reason,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_argmax": stats.accepted_argmax,
        "accepted_p_min": stats.accepted_p_min,
        "tokens_per_pass": len(result.output_ids) / stats.steps if stats.steps else 0.0,
        "log_likelihood": result.log_likelihood,
        "greedy_log_likelihood": result.greedy_log_likelihood,
        "greedy_tokens": result.greedy_tokens,
        "first_divergence": result.first_divergence,
        "edit_distance": result.edit_distance,
        "identical": result.identical,
        "reference_match": result.reference_match,
    }


def _rebuilt(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass of numbers and tuples from its dict; what is no field of it (a ratio) is dropped."""
    fields = {field.name: values[field.name] for field in dataclasses.fields(kind)}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})


def _intervals(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, their dicts made intervals."""
    return {name: Interval(**value) if isinstance(value, Mapping) else value for name, value in values.items()}
