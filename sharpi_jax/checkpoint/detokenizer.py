"""Text from tokens as they come.

What must not go wrong here: the pieces joined are exactly the text that decoding all the ids at once would give, as
what carries on from a prompt (so a space in front stays). A character's bytes may be spread over several tokens, so
bytes that could still become a character are held back, and what can no longer become one is U+FFFD at once.
"""

import codecs
from collections.abc import Iterable

from sharpi_jax.checkpoint.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns the ids of one output into text piece by piece; use a new one for each output.

    Args:
        tokenizer: the model's tokenizer.
        skip_special: whether control tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is certain now, which may be none."""
        tokenizer = self._tokenizer
        kept = (token_id for token_id in ids if not (self._skip_special and tokenizer.is_special(token_id)))
        return self._decoder.decode(b"".join(map(tokenizer.token_bytes, kept)))

    def finish(self) -> str:
        """The end of the output: bytes still held back can no longer become a character."""
        return self._decoder.decode(b"", final=True)
