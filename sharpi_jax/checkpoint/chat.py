"""A model file's own chat template, rendered as its makers render it.

What must not go wrong here: the prompt is byte for byte what the model was trained on, so the environment is set up as
`transformers` sets it up (whitespace control, loop controls, the same helper functions, JSON without ASCII escapes).
And a template is a program by a stranger: it runs in jinja2's sandbox, and what it may build and how long it may run
are bounded, as a sandbox alone stops neither endless loops nor strings of a terabyte.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sharpi_jax.errors import CheckpointError, OptionError

_MAX_SECONDS = 10.0  # real templates take milliseconds
_MAX_BUILT = 1 << 26  # characters and list items made in one rendering, all intermediate results together
_MAX_NUMBER = 10_000  # widths and counts that are handed to the following filters and string methods
_WIDENING = {
    "batch",
    "center",
    "expandtabs",
    "indent",
    "ljust",
    "rjust",
    "round",
    "slice",
    "tojson",
    "wordwrap",
    "zfill",
}
_MAX_INT_BITS = 10_000
_SWITCHES = ("enable_thinking", "thinking")  # Qwen, GLM and SmolLM; DeepSeek and Granite


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the two tokens that templates refer to."""

    source: str
    bos_token: str = ""
    eos_token: str = ""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a GGUF file, or None where the file has none.

        Args:
            metadata: the file's metadata, as `open_gguf` gives it.

        Raises:
            CheckpointError: the template is no text.
        """
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError("the model file's tokenizer.chat_template is no text; convert the model again.")
        return cls(source, _token(metadata, "bos"), _token(metadata, "eos"))

    def thinking_variables(self, thinking: bool | None) -> dict[str, bool]:
        """What turns thinking on or off in the template; nothing for None, which leaves it to the template.

        Raises:
            OptionError: the template leaves no choice.
        """
        if thinking is None:
            return {}
        try:
            read = meta.find_undeclared_variables(_Sandbox().parse(self.source))
        except Exception:  # wrong, or nested too deeply: rendering says so
            return {}
        switch = next((name for name in _SWITCHES if name in read), None)
        if switch is None:
            raise OptionError(
                "the model file's chat template has no switch for thinking; give neither --thinking nor --no_thinking."
            )
        return {switch: thinking}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: each with a role and a content.
            add_generation_prompt: whether the prompt ends with the opening of the assistant's turn.
            thinking: whether the model is to think first; None leaves it to the template.
            variables: whatever else the template reads, such as tools.

        Raises:
            OptionError: thinking was chosen, and the template leaves no choice.
            CheckpointError: the template is wrong, refuses these messages, tries to leave the sandbox or asks for
                more time or memory than a prompt can need.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **self.thinking_variables(thinking),
            **variables,
        }
        try:
            return _Sandbox().run(self.source, values)
        except Exception as error:  # a template is a program: it may end in any exception there is
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            raise CheckpointError(
                f"the model file's chat template cannot render these messages ({reason}); change them, or give the "
                "prompt as plain text."
            ) from None


def _token(metadata: Mapping[str, Any], name: str) -> str:
    """The text of the bos or eos token, empty where the file has none."""
    tokens, token_id = metadata.get("tokenizer.ggml.tokens"), metadata.get(f"tokenizer.ggml.{name}_token_id")
    if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
        return str(tokens[token_id])
    return ""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, keys in their order, other alphabets as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _size(value: Any) -> int:
    """About how much a value holds, in characters or items."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


class _Counting(NodeTransformer):
    """Sends through the sandbox's hooks what jinja2 compiles without them: loops, plain text and the `~` operator."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Iterate over counted items."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """The template's plain text becomes a constant, which is counted when it is written."""
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """`a ~ b` becomes a join of its parts."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "join", [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering: it counts what the template makes, at every place where something is made."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._written,
        )
        self._left = _MAX_BUILT
        self._deadline = time.monotonic() + _MAX_SECONDS
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        filters = {**self.filters, "tojson": _to_json, "join": self._join}
        self.filters = {name: self._bounded_filter(name, function) for name, function in filters.items()}
        self.filters["counted"] = self._counted

    def run(self, source: str, values: Mapping[str, Any]) -> str:
        """Compile and render."""
        tree = _Counting().visit(self.parse(source))
        return "".join(self.from_string(tree.set_environment(self)).generate(values))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call in a template: macros, methods, functions, recursive loops."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            __self._check_arguments(method.__name__, subject, args, kwargs)
        if isinstance(__obj, LoopContext):
            args = (__self._counted(args[0]), *args[1:])
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make something large."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            self._check_arguments("%", left, right if isinstance(right, tuple) else (right,), {})
        elif operator == "**" and _size(left) * abs(right) > _MAX_INT_BITS:
            raise SecurityError("a power in it is too large")
        elif operator == "*" and numbers and _size(left) + _size(right) > _MAX_INT_BITS:
            raise SecurityError("a product in it is too large")
        elif operator == "*" and not numbers:
            count = left if isinstance(left, int) else right
            self._charge((_size(right) if count is left else _size(left)) * max(count, 0))
        return self._made(super().call_binop(context, operator, left, right))

    def _charge(self, size: float) -> None:
        self._left -= int(size)
        if self._left < 0:
            raise SecurityError(f"it builds more than {_MAX_BUILT} characters")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs for longer than {_MAX_SECONDS:g} seconds")

    def _made(self, value: Any) -> Any:
        self._charge(_size(value))
        return value

    @pass_context  # unused, but with it jinja2 does not fold constants: they too are counted whenever they are written
    def _written(self, context: Context, value: Any) -> Any:
        return self._made(value)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._charge(1)
            yield item

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        """Counted as it goes, since a short list can hold one long text many times."""
        items = value if attribute is None else (self.getitem(item, attribute) for item in value)
        return str(d).join(self._made(str(item)) for item in items)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or the like comes before the value

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments(name, args[skipped], args[skipped + 1 :], kwargs)
            return self._made(function(*args, **kwargs))

        return bounded

    def _check_arguments(self, name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse or charge, beforehand, what a filter or string method would make much larger than its input."""
        given = [*args, *kwargs.values()]
        text = subject if isinstance(subject, str) else ""
        wide = name in _WIDENING
        if name in ("%", "format"):
            if re.search("[0-9]{6}", text):
                raise SecurityError("it formats a text with an enormous width")
            wide = "*" in text or re.search(r"\{[^{}]*\{", text) is not None  # the width is an argument
            self._charge((text.count("%") + text.count("{")) * max(map(_size, given), default=0))
        if wide and any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in given):
            raise SecurityError(f"it gives {name} a number above {_MAX_NUMBER}")
        if name == "replace" and len(given) >= 2:
            self._charge(text.count(str(given[0])) * len(str(given[1])))
        if name == "indent":
            widths = [value if isinstance(value, int) else _size(value) for value in given]
            self._charge(text.count("\n") * max(widths, default=4))
        if name == "join" and isinstance(subject, str):  # the method; the filter counts for itself
            self._charge(sum(_size(item) + len(subject) for item in given[0]))
