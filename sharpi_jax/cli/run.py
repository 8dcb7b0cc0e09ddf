"""`sharpi-jax run`: continue a prompt, or hold a conversation.

Order matters here: flags, then files, then the platform, then JAX. What can be refused cheaply is refused before the
model is loaded, and nothing that costs time happens before it is known that its result can be delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharpi_jax.cli import chat, demo, device, json_file, model_file, report
from sharpi_jax.cli.flagset import answered
from sharpi_jax.cli.prompt import read_prompt
from sharpi_jax.cli.run_flags import SECTIONS, RunFlags, check_run, parse_run
from sharpi_jax.cli.terminal import note, write_text
from sharpi_jax.cli.trace_colour import note_step
from sharpi_jax.cli.usage import UsageError

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Model
    from sharpi_jax.decode.stats import StepRecord

HELP = """\
sharpi-jax: decodes GGUF language models, drafting with their own multi-token-prediction (MTP) head.

usage: sharpi-jax                              the embedded demo model, with MTP off and on
       sharpi-jax [run] --model=FILE.gguf --prompt=TEXT [flags]
       sharpi-jax inspect FILE.gguf [--tensors] [--metadata]
       sharpi-jax perplexity --model=FILE.gguf --file=TEXT [flags]
       sharpi-jax bench --model=FILE.gguf [flags]
       sharpi-jax eval --model=FILE.gguf --prompts=FILE.jsonl --report_dir=FOLDER [flags]

examples:
  sharpi-jax --model=model.gguf --prompt="Once upon a time" --spec_draft_n_max=3    greedy, exact
  sharpi-jax --model=model.gguf --prompt_file=story.txt --spec_draft_p_min=0.1 --trace_mtp
  sharpi-jax --model=model.gguf --chat                                              a conversation
  sharpi-jax --flagfile=configs/greedy.cfg --model=model.gguf

Dashes work as well as underscores (--spec-draft-p-min 0.1), and --no-x turns off what --x turns on."""


def main(argv: Sequence[str]) -> int:
    """The subcommand: argv without its name."""
    parsed = parse_run(argv)
    if answered(parsed, HELP, SECTIONS):
        return 0
    flags = check_run(parsed)
    device.configure(flags.platform, flags.threads, compile_cache=flags.compile_cache)
    model_file.check(flags.model, flags.mtp_model)
    prompt = read_prompt(flags)
    if flags.output_json is not None:
        if prompt is None:
            raise UsageError("--output_json needs a prompt: a conversation is many runs.")
        json_file.check_writable(flags.output_json)
    model = model_file.load(flags.model, flags.mtp_model, flags.platform, flags.load)
    if flags.chat:
        chat.check(model, flags)
    if prompt is None:
        chat.converse(model, flags)
    elif demo.is_comparison(flags):
        demo.compare(model, flags, prompt)
    else:
        _once(model, flags, prompt)
    return 0


def _once(model: Model, flags: RunFlags, prompt: str | tuple[int, ...]) -> None:
    """One prompt: its text to standard output, all else to standard error."""
    if flags.chat and isinstance(prompt, str):
        prompt = chat.render(model, flags, chat.opening(flags.system_prompt), prompt)

    def announce() -> None:  # once the prompt is accepted, not before: one that is refused is told in one line
        for line in report.notices(flags, model):
            note(line)

    def on_step(step: StepRecord) -> None:
        note_step(step, model.tokenizer.token_text, report.rule_label(flags.options))

    # With a trace the text comes whole at the end: on a terminal the two would tear each other apart.
    streaming = flags.output_json != "-" and not flags.trace
    generation = model.generate(
        prompt,
        flags.options,
        stop=flags.stop,
        trace=flags.trace,
        on_start=announce,
        on_text=write_text if streaming else None,
        on_step=on_step if flags.trace else None,
    )
    if flags.output_json != "-":
        write_text(("" if streaming else generation.text) + "\n")
    for line in report.statistics(generation):
        note(line)
    if flags.output_json is not None:
        json_file.write(flags.output_json, report.document(flags, generation))
