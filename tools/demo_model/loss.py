"""The training loss: the trunk's cross-entropy, and the MTP head's at depths 1 to 3.

The head is trained for how it is used, chained: depth d's pass takes depth d - 1's own hiddens (FastMTP, arXiv
2509.18362). Its target at each position is the trunk's whole distribution there, not the one token that the text has:
agreement with the trunk is what acceptance counts. `unlikelihood` is refine.py's second term.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.model.cache import init_kv_cache, init_trunk_cache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.rope import RopeTable
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import Window, window_at

DEPTHS = 3
DEPTH_WEIGHTS = (0.5, 0.3, 0.2)


def forward(
    params: ModelParams, cfg: ModelConfig, tokens: jax.Array, rope: RopeTable
) -> tuple[jax.Array, list[jax.Array]]:
    """The trunk's logits [B, T, V] for tokens [B, T], and the head's of each depth; entry p predicts token p + 1."""
    rows, width = tokens.shape
    assert params.mtp is not None
    hidden, window = trunk_pass(params, cfg, tokens, rope)
    logits, drafts, before = head(params.head, cfg, hidden), [], hidden
    for _ in range(DEPTHS):
        shifted = jnp.pad(before[:, :-1], ((0, 0), (1, 0), (0, 0)))
        before, _ = mtp_block(params.mtp, cfg, tokens, shifted, init_kv_cache(cfg, rows, width), window, rope)
        drafts.append(head(params.mtp.head, cfg, before))
    return logits, drafts


def trunk_pass(params: ModelParams, cfg: ModelConfig, tokens: jax.Array, rope: RopeTable) -> tuple[jax.Array, Window]:
    """The trunk's hidden [B, T, D] for whole rows of tokens [B, T], and their window."""
    rows, width = tokens.shape
    window = window_at(jnp.zeros(rows, jnp.int32), jnp.full(rows, width, jnp.int32), width, row_exact=False)
    return trunk(params, cfg, tokens, init_trunk_cache(cfg, rows, rope), window)[0], window


def losses(
    params: ModelParams, cfg: ModelConfig, text: jax.Array, rope: RopeTable
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss over text [B, T + 1], and its parts: nats per token, and each depth's agreement with the trunk."""
    logits, drafts = forward(params, cfg, text[:, :-1], rope)
    log_p = jax.nn.log_softmax(logits)
    trunk_loss = -jnp.mean(jnp.take_along_axis(log_p, text[:, 1:, None], axis=-1))
    parts = {"trunk": trunk_loss}
    total, target, choice = trunk_loss, jax.lax.stop_gradient(jnp.exp(log_p)), jnp.argmax(logits, axis=-1)
    for depth, (draft, weight) in enumerate(zip(drafts, DEPTH_WEIGHTS, strict=True), 1):
        # The first entries of a depth have no hidden chained from a real one: they are left out.
        loss = -jnp.mean(jnp.sum(target * jax.nn.log_softmax(draft), axis=-1)[:, depth:])
        total = total + weight * loss
        parts[f"mtp_{depth}"] = loss
        parts[f"agree_{depth}"] = jnp.mean(jnp.argmax(draft, axis=-1)[:, depth:] == choice[:, depth:])
    return total, parts


def unlikelihood(
    params: ModelParams, cfg: ModelConfig, text: jax.Array, unwanted: jax.Array, rope: RopeTable
) -> jax.Array:
    """-log(1 - p) of the unwanted tokens, averaged over all (Welleck et al. 2020, arXiv 1908.04319): a scalar.

    Above p = 0.9999 it has no slope.

    Args:
      text: [B, T + 1] ids. unwanted: [B, T] bool, of text[:, 1:].
    """
    hidden, _ = trunk_pass(params, cfg, text[:, :-1], rope)
    log_p = jax.nn.log_softmax(head(params.head, cfg, hidden))
    p = jnp.exp(jnp.take_along_axis(log_p, text[:, 1:, None], axis=-1))[..., 0]
    return -jnp.mean(jnp.where(unwanted, jnp.log1p(-jnp.minimum(p, 1 - 1e-4)), 0.0))
