"""The text of one output as it is made, and the stop strings that end it."""

import bisect
from collections.abc import Callable, Sequence

from sharpi_jax.checkpoint.detokenizer import StreamingDetokenizer
from sharpi_jax.checkpoint.tokenizer import Tokenizer


class OutputText:
    """Collects ids and text, holds back what may become a stop string, and cuts both where one appears.

    Attributes:
      ids, text: what is kept so far. stopped: whether a stop string ended it.

    Args:
      stop: strings that end the text before them. min_tokens: stop strings count after as many tokens.
      on_text: called with each piece of text as soon as it is certain: what was shown is never withdrawn.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int, on_text: Callable[[str], None] | None
    ) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._on_text = on_text or (lambda piece: None)
        self._shown = 0
        self._ends: list[int] = []  # length of the text after each id
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> None:
        """Takes the next ids, as far as the first stop string."""
        for token in ids:
            piece = self._detokenizer.push([token])
            self.ids.append(token)
            self._ends.append(len(self.text) + len(piece))
            self._add(piece)
            if self.stopped:
                return

    def finish(self) -> None:
        """The end of the output: what was held back is shown."""
        if not self.stopped:
            self._add(self._detokenizer.finish())
        self._show(len(self.text))

    def _add(self, piece: str) -> None:
        # A stop string may have begun in text that is already held, but not in text that was shown.
        self.text += piece
        if len(self.ids) <= self._min_tokens and self._min_tokens > 0:
            self._show(len(self.text))
            return
        found = [at for s in self._stop if (at := self.text.find(s, self._shown)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
            # The fewest ids whose text holds all that is kept of the text.
            del self.ids[bisect.bisect_left(self._ends, len(self.text)) + 1 if self.text else 0 :]
        else:
            self._show(len(self.text) - self._held())

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        ends = range(min(longest, len(self.text) - self._shown), 0, -1)
        return next((n for n in ends if any(s.startswith(self.text[-n:]) for s in self._stop)), 0)

    def _show(self, end: int) -> None:
        if end > self._shown:
            self._on_text(self.text[self._shown : end])
            self._shown = end
