"""SentencePiece's BPE (`tokenizer.ggml.model` = llama): characters are merged by the score of what they make.

Of all neighbours that make a token, the pair of the highest score is merged first, and of equal scores the leftmost. A
character that is no token becomes its UTF-8 bytes. `tokenizers` cannot express this: its merges are ranked once and for
all, while here, with "ab" and "ba" of one score, "aba" is "ab a" and "bab" is "ba b". Files whose scores are all equal
exist, since converters write them where a model has only a tokenizer.json.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from sharpi_jax.checkpoint.vocabulary import Vocabulary
from sharpi_jax.errors import CheckpointError

_SPACE = "▁"  # U+2581, how a vocabulary spells a space; the character itself can therefore not be told from one


class SentencePiece:
    """The merge engine of one vocabulary; it knows no special tokens, which are cut out of the text before it."""

    def __init__(self, vocabulary: Vocabulary, scores: Sequence[float]) -> None:
        """Build the engine.

        Args:
            vocabulary: its tokens spell a space as U+2581.
            scores: by id; the higher, the earlier a token is made.

        Raises:
            CheckpointError: a byte has no token.
        """
        self._ids = vocabulary.ids
        self._tokens = vocabulary.tokens
        self._scores = scores
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        missing = next((name for name in names if name not in self._ids), None)
        if missing is not None:
            raise CheckpointError(
                f"the model file's vocabulary has no token {missing}, so not every text can be encoded; use a model "
                "with byte fallback."
            )
        self._byte_ids = [self._ids[name] for name in names]

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        ids: list[int] = []
        for part in self._merge(list(text.replace(" ", _SPACE))):
            token_id = self._ids.get(part)
            ids += [token_id] if token_id is not None else [self._byte_ids[byte] for byte in part.encode()]
        return ids

    def commonest(self, count: int) -> np.ndarray:
        """The ids of `count` tokens: single characters, then the others by score, which is the order of merging.

        Not the first ids: training lists the characters last, though " " and "e" are among the most frequent tokens.
        """
        merged = [len(text) > 1 for text in self._tokens]
        return np.lexsort((-np.asarray(self._scores), np.asarray(merged)))[:count]

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a normal token stands for."""
        return token.replace(_SPACE, " ").encode()

    def _merge(self, parts: list[str]) -> list[str]:
        """The characters, merged as far as they go; a part that went into its left neighbour is empty meanwhile."""
        before = list(range(-1, len(parts) - 1))
        after = [*range(1, len(parts)), -1]
        waiting: list[tuple[float, int, int, int]] = []  # minus the score, left and right part, length of both

        def consider(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                token_id = self._ids.get(parts[left] + parts[right])
                if token_id is not None:
                    size = len(parts[left]) + len(parts[right])
                    heapq.heappush(waiting, (-self._scores[token_id], left, right, size))

        for right in range(1, len(parts)):
            consider(right - 1, right)
        while waiting:
            _, left, right, size = heapq.heappop(waiting)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != size:
                continue  # one of the two was merged with another since
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [part for part in parts if part]
