"""Messages for the file's chat template, and a conversation on the terminal.

Each turn renders the whole history. Ctrl-D ends the conversation. Ctrl-C stops the reply that is being written, which
stays in the history as far as it came; a moment too late, at the prompt, it must not cost the conversation.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sharpi_jax.cli import report
from sharpi_jax.cli.run_flags import RunFlags
from sharpi_jax.cli.terminal import note, printable, write_text
from sharpi_jax.cli.trace_colour import note_step
from sharpi_jax.errors import OptionError, SharpiError

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Model
    from sharpi_jax.checkpoint import ChatTemplate
    from sharpi_jax.decode.stats import StepRecord

Messages = list[dict[str, str]]


def opening(system_prompt: str | None) -> Messages:
    """The history before the first user message."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]


def template_of(model: Model) -> ChatTemplate:
    """The file's template.

    Raises:
      OptionError: it has none.
    """
    if model.chat_template is None:
        raise OptionError(f"{model.path} has no chat template; use --raw.")
    return model.chat_template


def check(model: Model, flags: RunFlags) -> None:
    """Refuses, before the user has typed anything, what no message could change.

    Raises:
      OptionError: there is no template, or none that can do what --thinking or --no_thinking wants.
    """
    template = template_of(model)
    if flags.thinking is not None:
        template.thinking_variables(flags.thinking)


def render(model: Model, flags: RunFlags, history: Messages, message: str) -> str:
    """The text to continue: the history, the user's message, and the opening of the reply."""
    messages = [*history, {"role": "user", "content": message}]
    return template_of(model).render(messages, add_generation_prompt=True, thinking=flags.thinking)


def converse(model: Model, flags: RunFlags) -> None:
    """Reads messages and writes replies until the end of input."""
    if sys.stdout.isatty():
        import readline  # noqa: F401  (imported for its effect: input() gets line editing)
    for line in report.notices(flags, model):
        note(line)
    note("Type a message; Ctrl-D ends, Ctrl-C stops a reply.")
    history = opening(flags.system_prompt)
    while (message := _read_message()) is not None:
        if not message.strip():
            continue
        try:
            reply = _reply(model, flags, render(model, flags, history, message))
        except SharpiError as error:  # mostly: the conversation has outgrown the context
            note(printable(str(error)))  # the message is dropped, so a shorter one may still fit
            continue
        history += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]


def _read_message() -> str | None:
    """The next line, or None at Ctrl-D."""
    while True:
        try:
            return input("> " if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            note("\nCtrl-D ends.")
        except EOFError:
            note()
            return None


def _reply(model: Model, flags: RunFlags, prompt: str) -> str:
    """Writes one reply and returns its text, whole or as far as it came before Ctrl-C."""
    pieces: list[str] = []

    def on_text(piece: str) -> None:
        pieces.append(piece)
        if not flags.trace:  # else it comes whole at the end: the two would tear each other apart
            write_text(piece)

    def on_step(step: StepRecord) -> None:
        note_step(step, model.tokenizer.token_text, report.rule_label(flags.options))

    try:
        generation = model.generate(
            prompt, flags.options, stop=flags.stop, on_text=on_text, on_step=on_step if flags.trace else None
        )
    except KeyboardInterrupt:
        note()
        return "".join(pieces)
    write_text((generation.text if flags.trace else "") + "\n")
    note(report.turn_line(generation))
    if generation.finish_reason == "context":
        note("the context is full: the reply was cut short; a larger --ctx_size leaves more room.")
    return generation.text
