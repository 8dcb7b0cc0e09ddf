"""What a model says about windows of given text, position by position. No logits leave the device.

The head's drafts here are those of decoding with the text's own tokens in the place of the drafts before them
("teacher-forced"): draft j for a position follows from the text up to j positions before it, its first entry takes the
trunk's hidden and each later one the block's own. Where the text is what the model would write, they are its drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharpi_jax.decode.decoder import Chunk, Decoder
from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import MtpParams
from sharpi_jax.model.rope import RopeTable
from sharpi_jax.model.trunk import head
from sharpi_jax.model.window import window_at
from sharpi_jax.quant import Weight

DEPTHS = 3
NO_DRAFT = -1
# Numbers that a program may hold per block of positions (128 MB of float32): logits, or copies of a row's cache.
_BLOCK_NUMBERS = 1 << 25


@dataclasses.dataclass(frozen=True)
class WindowScores:
    """Of B windows of T tokens; entry t is about what follows position t.

    Attributes:
      nll: [B, T - 1] float32, nats: -log p(token t + 1).
      choice: [B, T] int32, the trunk's argmax.
      drafts: [B, DEPTHS, T] int32, the MTP head's draft of each depth for the same place, NO_DRAFT where no chain of
        that depth leads to it. None without a head.

    What lies before `first` is not filled in.
    """

    nll: np.ndarray
    choice: np.ndarray
    drafts: np.ndarray | None

    def draft_hits(self, first: int = 0) -> np.ndarray:
        """[DEPTHS, positions] bool: whether the draft is the trunk's choice, in each window.

        The positions are the same for every depth: those whose chains all begin at `first` or later.
        """
        assert self.drafts is not None
        begin = first + DEPTHS - 1
        hits: np.ndarray = self.drafts[:, :, begin:] == self.choice[:, None, begin:]
        return np.moveaxis(hits, 1, 0).reshape(DEPTHS, -1)


def score_windows(
    decoder: Decoder, windows: np.ndarray, first: int = 0, *, rows: int | None = None, drafting: bool = True
) -> WindowScores:
    """Scores windows of ids [B, T] together, in the chunks of prefill.

    Args:
      first: positions before it need no scores.
      rows: run as if there were this many windows, so that the last few of a text need no programs of their own.
      drafting: whether to run the MTP head, where there is one.

    Raises:
      OptionError: more tokens than the model's context, or an id outside the vocabulary.
    """
    params, cfg = decoder.params, decoder.cfg
    given, T = windows.shape
    windows = windows[np.minimum(np.arange(rows or given), given - 1)]
    B = len(windows)
    drafting = drafting and cfg.has_mtp
    tokens, lengths = decoder.rows_of(windows.tolist(), decoder.slots(T, 0))
    nll, choice = np.zeros((B, T), np.float32), np.zeros((B, T), np.int32)
    by_start = np.full((B, DEPTHS, T), NO_DRAFT, np.int32)
    for chunk in decoder.chunks(tokens, lengths, drafting=drafting):
        width = chunk.hidden.shape[1]
        count = min(width, T - chunk.start)
        if chunk.start + count <= first:
            continue
        here = slice(chunk.start, chunk.start + count)
        following = np.zeros((B, width), np.int32)
        targets = windows[:, chunk.start + 1 : chunk.start + 1 + width]
        following[:, : targets.shape[1]] = targets
        found = decoder.programs.run(_trunk_scores, params.head, chunk.hidden, following, cfg=cfg)
        nll[:, here], choice[:, here] = (np.asarray(a)[:, :count] for a in found)
        if drafting:
            by_start[:, :, here] = _drafts(decoder, chunk, tokens)[:, :, :count]
    drafts = np.full_like(by_start, NO_DRAFT)
    for j in range(DEPTHS):  # a chain's draft j (from 0) stands j positions after its start
        drafts[:, j, j:] = by_start[:, j, : T - j]
    return WindowScores(nll[:given, :-1], choice[:given], drafts[:given] if drafting else None)


def _drafts(decoder: Decoder, chunk: Chunk, tokens: np.ndarray) -> np.ndarray:
    """[B, DEPTHS, T] int32: the drafts of the chains that start at a chunk's T positions."""
    start = np.int32(chunk.start)
    args = (decoder.params.mtp, chunk.mtp, chunk.trunk.rope, chunk.mtp_hidden, tokens, start)
    return np.asarray(decoder.programs.run(_chains, *args, cfg=decoder.cfg))


def _trunk_scores(
    weight: Weight, hidden: jax.Array, following: jax.Array, *, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """-log p of `following` [B, T], and the argmax [B, T], from hidden [B, T, D]."""
    B, T, D = hidden.shape
    size = _block(T, cfg.vocab_size)

    def block(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = head(weight, cfg, x[0])
        of_text = jnp.take_along_axis(logits, x[1][:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - of_text, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    nll, choice = lax.map(block, (hidden.reshape(-1, size, D), following.reshape(-1, size)))
    return nll.reshape(B, T), choice.reshape(B, T)


def _chains(
    p: MtpParams,
    cache: KVCache,
    rope: RopeTable,
    hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    *,
    cfg: ModelConfig,
) -> jax.Array:
    """[B, DEPTHS, T] int32: the drafts that follow from each position of a chunk.

    Args:
      cache: the block's, with the text's entries up to the chunk's end. hidden: [B, T, D], the block's in the chunk.
      tokens: [B, S], the text. start: of the chunk.

    Past its start each chain writes entries of its own over the text's. So each is a row with a copy of the cache, and
    as many go together as memory allows.
    """
    B, T, D = hidden.shape
    _, S, N, E = cache.k.shape
    size = _block(T, max(cfg.vocab_size, 2 * S * N * E))

    def block(x: tuple[jax.Array, ...]) -> jax.Array:
        row, at, own = x[0], x[1], x[2][:, None]
        copies = KVCache(cache.k[row], cache.v[row])
        found = []
        for depth in range(1, DEPTHS + 1):
            found.append(jnp.argmax(head(p.head, cfg, own), axis=-1)[:, 0].astype(jnp.int32))
            if depth < DEPTHS:
                at = at + 1
                token = tokens[row, jnp.minimum(at, S - 1)][:, None]
                window = window_at(at, jnp.ones(size, jnp.int32), 1, row_exact=False)
                own, copies = mtp_block(p, cfg, token, own, copies, window, rope)
        return jnp.stack(found, axis=-1)

    rows = jnp.repeat(jnp.arange(B, dtype=jnp.int32), T)
    starts = jnp.tile(start + jnp.arange(T, dtype=jnp.int32), B)
    found: jax.Array = lax.map(block, (rows.reshape(-1, size), starts.reshape(-1, size), hidden.reshape(-1, size, D)))
    return jnp.moveaxis(found.reshape(B, T, DEPTHS), 1, 2)


def _block(width: int, numbers: int) -> int:
    """How many of a chunk's positions go together, at `numbers` numbers each; it divides the width, a power of two."""
    size = width
    while size > 1 and size * numbers > _BLOCK_NUMBERS:
        size //= 2
    return size
