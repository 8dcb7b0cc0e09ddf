"""What is said about a run: notices before it, statistics after it, and the JSON document."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sharpi_jax.cli.run_flags import RunFlags
from sharpi_jax.cli.terminal import count

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Generation, Model
    from sharpi_jax.decode.options import DecodeOptions

# With this many drafts and none accepted, chance is no excuse: the head does not belong to the trunk, or is misread.
DEAD_HEAD_DRAFTS = 64

_REASONS = {"stop": "a stop token or text", "length": "--max_tokens reached", "context": "the context is full"}


def notices(flags: RunFlags, model: Model) -> list[str]:
    """What the user should know before the text comes, a line each."""
    options = flags.options
    drafting = options.spec_type != "none" and model.has_mtp
    lines = list(model.notes)
    if drafting:
        among = options.draft_vocab(model.config.vocab_size)
        shortlist = f", chosen among {among} of {model.config.vocab_size} and the prompt's" if among else ""
        adaptive = " as pays" if options.spec_draft_n_max == "auto" else ""
        lines.append(f"MTP: drafting up to {count(options.draft_length, 'token')} per step{adaptive}{shortlist}")
    elif options.spec_type == "none":
        lines.append("MTP: off (--spec_type=none)")
    else:
        lines.append("MTP: off, the file has no MTP head")
    p_min = options.spec_draft_p_min
    if flags.p_min_unset:
        lines.append("--spec_draft_p_min=0 means not set: taken as 1, which is exact")
    elif drafting and p_min <= 0.5:
        lines.append(f"--spec_draft_p_min={p_min:g} is lossy: the text may leave the greedy path")
    elif drafting and p_min < 1:
        lines.append(f"--spec_draft_p_min={p_min:g} is the same as 1: two tokens cannot both exceed one half")
    if drafting and options.accept_rule != "auto":
        lines += _rule_notices(options)
    if drafting and not options.same_text:
        changed = [f"--spec_draft_vocab={among}"] if among else []
        changed += ["--spec_draft_n_max=auto"] if options.spec_draft_n_max == "auto" else []
        changed += ["--spec_draft_stop_p"] if options.spec_draft_stop_p else []
        lines += [f"{flag} too can change the text: such a run depends on its drafts" for flag in changed]
    return lines


def _rule_notices(options: DecodeOptions) -> list[str]:
    """What a rule that was chosen does to the text."""
    if options.lossy:
        return [f"--accept_rule={options.rule} is lossy: the text may be another than the model alone would write"]
    if not options.same_text:
        return [f"--accept_rule={options.rule} keeps the distribution, but a seed gives other text than without drafts"]
    return []


def statistics(generation: Generation) -> list[str]:
    """The figures of one run, a line each."""
    stats, timing = generation.stats, generation.timing
    lines = [
        f"prompt:   {rate(timing.prefill_tokens, timing.prefill_s)}",
        f"decode:   {rate(timing.decode_tokens, timing.decode_s)}",
        *drafting(generation),
        f"compile:  {timing.compile_s:.2f} s, not counted above",
        finish(generation),
    ]
    if stats.drafted >= DEAD_HEAD_DRAFTS and stats.accepted == 0:
        lines.append(
            f"warning: none of {stats.drafted} drafts was accepted: the MTP head never agrees with the model, and "
            "drafting only costs time; use --spec_type=none"
        )
    return lines


def drafting(generation: Generation) -> list[str]:
    """What became of the drafts, a line each; nothing for a run without."""
    stats = generation.stats
    if not generation.drafting:
        return []
    by_position = "  ".join(
        f"{index + 1}: {accepted}/{drafted}"
        for index, (accepted, drafted) in enumerate(
            zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
        )
    )
    return [
        f"accepted: {stats.accepted}/{stats.drafted} ({stats.acceptance_rate:.1%}), "
        f"{stats.accepted_argmax} by argmax, {stats.accepted_p_min} by {rule_label(generation.options)}",
        f"by draft: {by_position}",
        f"length:   {stats.mean_accepted_length:.2f} tokens per step on average, {count(stats.steps, 'step')}",
    ]


def rule_label(options: DecodeOptions) -> str:
    """What accepts a draft that is not the target's argmax, in a word."""
    return "p_min" if options.rule == "greedy_p_min" else options.rule


def finish(generation: Generation) -> str:
    """Why the run ended."""
    reason = generation.finish_reason
    return f"finish:   {reason} ({_REASONS.get(reason, 'unknown')})"


def turn_line(generation: Generation) -> str:
    """The figures of one turn of a conversation, on one line."""
    timing, stats = generation.timing, generation.stats
    drafts = f", accepted {stats.accepted}/{stats.drafted} ({stats.acceptance_rate:.1%})" if generation.drafting else ""
    return f"[{rate(timing.decode_tokens, timing.decode_s)}{drafts}]"


def document(flags: RunFlags, generation: Generation) -> dict[str, Any]:
    """The document of --output_json. `steps` is there only when the run was traced."""
    options = {
        "model": flags.model,
        "mtp_model": flags.mtp_model,
        **dataclasses.asdict(flags.options),
        "ctx_size": generation.ctx_size,
        "drafting": generation.drafting,
        "draft_vocab": generation.draft_vocab,
        "stop": list(flags.stop),
        "chat": flags.chat,
        "system_prompt": flags.system_prompt,
        "thinking": flags.thinking,
        **flags.load,
        "platform": flags.platform,
        "threads": flags.threads,
        "trace_mtp": flags.trace,
    }
    result = {
        "prompt_ids": list(generation.prompt_ids),
        "output_ids": list(generation.output_ids),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "options": options,
        "stats": generation.stats.as_dict() | generation.timing.as_dict(),
    }
    if flags.options.logprobs is not None:
        result["logprobs"] = [token.as_dict() for token in generation.logprobs]
    return result | ({"steps": [step.as_dict() for step in generation.steps]} if flags.trace else {})


def rate(tokens: int, seconds: float) -> str:
    """Tokens, seconds and their ratio."""
    if not seconds:
        return count(tokens, "token")
    return f"{count(tokens, 'token')} in {seconds:.3f} s, {tokens / seconds:.1f} tokens/s"
