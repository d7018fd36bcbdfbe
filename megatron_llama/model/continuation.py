"""Tokens that follow others whose keys and values are in a cache: generation, in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_llama.model.nn.attention import AttentionBackend, ScoreRule, attend, causal_attention
from megatron_llama.model.nn.cache import KVCache
from megatron_llama.model.nn.sliding import continued_attention


@dataclass(frozen=True)
class Continuation:
    """The state of the tokens that were read before.

    ``slots`` [s, b] and ``length`` are those of ``KVCache``. ``last``, int64 [b], is the place of
    each sequence's last token before the padding, whose logits are wanted. ``shortest`` is how many
    tokens of the shortest sequence were read before."""

    cache: KVCache
    slots: Tensor
    length: int
    last: Tensor
    shortest: int

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        rule: ScoreRule,
        backend: AttentionBackend,
    ) -> Tensor:
        """Attend also to the tokens that were read before, [s, b, n or n_kv, d] -> [s, b, n * d],
        and remember the keys and values of ``layer``."""
        if rule.window:
            counts = self.last + 1
            key, value = self.cache.slide(layer, key, value, rule.window, counts)
            return continued_attention(query, key, value, rule, self.slots[0], self.shortest)
        key, value = self.cache.extend(layer, key, value, self.slots, self.length)
        if not rule.softcap:
            return causal_attention(query, key, value, mask, backend=backend, scale=rule.scale)
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out, _ = attend(*heads, causal=mask is None, mask=mask, backend=backend, rule=rule)
        return out.permute(2, 0, 1, 3).flatten(2)

    def last_of(self, x: Tensor) -> Tensor:
        """Return the last token of each sequence, [s, b, h] -> [1, b, h]: only its successor is
        drawn."""
        return x[self.last, torch.arange(len(self.last), device=x.device)].unsqueeze(0)
