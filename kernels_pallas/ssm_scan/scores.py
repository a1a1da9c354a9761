"""Products `q_i.k_j` and `k_i.k_j` inside a chunk, weighted by the decay from token `j` to token `i`.

Runs of tokens are halved again and again (`halves`). Where `i > j` part, at halves of `h` tokens, `j` is in
the first half of their run and `i` in the second, and the decay between them is taken relative to where the
halves meet:

    D[i, j] = (decay from the second half's start through i) * (decay from behind j to the first half's end)

So one factor a token and power of two gives all pairs; a factor is a product of decays or the exponential of
their sum, never a quotient. Nothing overflows, and a slow decay beside fast ones keeps its digits, which it
would not as a difference of two large sums. With a decay a channel each `h` is one batch of matmuls.

Axes are `[block, key_head, group, token, channel]`; `group` is 1 for what the heads of a key head share.
"""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.ssm_scan.dot import dot
from kernels_pallas.ssm_scan.halves import half_lengths, join, level_of, pad_tokens, split


def scalar_decay_scores(q, k, log_decay):
    """`(qk, kk, from_start)`, for one decay a head: `log_decay` is `[..., token, 1]`.

    `qk` and `kk` are `[..., token, token]` and zero above the diagonal; on it, only `qk` means anything.
    `from_start`, `[..., token, channel]`, is the decay from the chunk's start through each token.
    """
    num_tokens = q.shape[-2]
    lengths = half_lengths(num_tokens)
    sums = np.stack([*(_half_sums(num_tokens, h) for h in lengths), np.tri(num_tokens)])
    sums = jnp.asarray(sums, jnp.float32)
    factors = jnp.exp(dot("hil,bngl->bngih", sums, log_decay[..., 0]))
    across = jnp.swapaxes(factors, -1, -2)
    level = jnp.asarray(level_of(num_tokens))[None, None, None]
    decay = jnp.where(level == 0, 1.0, 0.0)
    for n, h in enumerate(lengths):
        decay = jnp.where(level == h, factors[..., n : n + 1] * across[..., n : n + 1, :], decay)
    qk, kk = dot("bnxik,bnxjk->bnxij", q, k), dot("bnxik,bnxjk->bnxij", k, k)
    return decay * qk, decay * kk, factors[..., -1:]


def channel_decay_scores(q, k, log_decay):
    """As `scalar_decay_scores`, with a decay for each channel."""
    num_tokens = q.shape[-2]
    q, k, log_decay = (pad_tokens(x, axes=1) for x in (q, k, log_decay))
    # Of each run: the decay from its start through a token, and from behind a token to its end.
    through = jnp.exp(log_decay)
    behind = jnp.ones_like(through)
    # Scores inside each run, [..., run, (q, k), token, token].
    own = jnp.sum(q * k, axis=-1)[..., None, None, None]
    scores = jnp.concatenate([own, jnp.zeros_like(own)], axis=-3)
    scores = jnp.broadcast_to(scores, (*through.shape[:-1], 2, 1, 1))
    for h in half_lengths(num_tokens):
        (_, q_second), (k_first, k_second) = split(q, h), split(k, h)
        (first, second), (behind_first, behind_second) = split(through, h), split(behind, h)
        late = jnp.stack([q_second * second, k_second * second], axis=-3)
        below = dot("bngrsik,bngrjk->bngrsij", late, k_first * behind_first)
        scores = scores.reshape(*below.shape[:4], 2, 2, h, h)
        scores = join(scores[..., 0, :, :, :], below, scores[..., 1, :, :, :])
        through = jnp.concatenate([first, first[..., -1:, :] * second], axis=-2).reshape(through.shape)
        behind = jnp.concatenate([behind_first * second[..., -1:, :], behind_second], axis=-2)
        behind = behind.reshape(through.shape)
    qk, kk = (scores[..., 0, s, :num_tokens, :num_tokens] for s in range(2))
    return qk, kk, through[..., :num_tokens, :]


def _half_sums(num_tokens, h):
    """`[t, l]`: 1 where token `l` decays what lies between `t` and the place where halves of `h` tokens meet.

    That is, at or before `t` in a second half, and behind `t` in a first half.
    """
    t, l = np.indices((num_tokens, num_tokens))  # noqa: E741
    return (t // h == l // h) & np.where(t & h > 0, l <= t, l > t)
