"""Causal attention, whole or in pieces: torch's kernels, once with autograd, and once with the
log-sum-exp by which pieces are merged.

A piece is a set of queries against a set of keys. Pieces of the same queries merge exactly (Rabe
and Staats, 2021; Dao et al., 2022), and a piece's backward is exact when it is given the merged
output and log-sum-exp, because a probability is exp(score - lse).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_llama.engine.comm.device import capability, is_host, widens_bf16

AttentionBackend = Literal["auto", "flash", "fused", "fa3"]
"""Whose kernels compute attention on a GPU, in Megatron's words: ``fused`` is cuDNN, ``flash`` is
torch's flash attention, ``fa3`` what stands in its place (``engine/comm/flash3.py``), and ``auto``
is the faster one of the first two that are sound there."""

_aten = torch.ops.aten
_BIAS_ALIGNMENT = 16
"""Elements to which the rows of a bias must be aligned for the accelerator's kernel."""
_LSE_ALIGNMENT = 32
"""Queries to which that kernel pads its log-sum-exp."""
_HEAD_ALIGNMENT = 16
"""Bytes in whose multiples that kernel takes heads."""
_SOUND_CUDNN = 91500
"""Up to this version cuDNN's attention was wrong for some lengths; torch, too, prefers it only from
later ones on."""
_LARGEST_FLASH_HEAD = 256
"""The largest head_dim of torch's flash attention."""
_LARGEST_CUDNN_HEAD = 128
"""The largest head_dim whose backward pass every cuDNN computes that torch 2.11 may load."""
_CUDNN_TILE = 128
"""Keys of a tile of cuDNN's backward pass on Hopper. Up to 9.26 it does not mask the rest of the
last one where there is no causal mask: NaN for queries whose log-sum-exp is below -88
(pytorch/pytorch#196678, NVIDIA/cudnn-frontend#628)."""
_HOPPER = (9, 0)
"""From this generation on cuDNN's attention is faster than torch's flash attention."""


@dataclass(frozen=True)
class ScoreRule:
    """How attention scores are made of queries and keys, and how far back a query sees."""

    scale: float | None = None
    """Factor of the products of queries and keys. None: head_dim ** -0.5."""
    window: int = 0
    """Number of positions that a query sees, its own and those before it. 0: all."""
    softcap: float = 0.0
    """A score x becomes softcap * tanh(x / softcap). 0: it stays as it is."""

    def limits(self, length: int) -> bool:
        """Whether the window hides anything in a sequence of ``length`` positions."""
        return 0 < self.window < length

    def is_plain(self, length: int) -> bool:
        """Whether kernels without window and cap compute a sequence of ``length`` positions."""
        return not self.softcap and not self.limits(length)

    def scale_of(self, head_dim: int) -> float:
        """Return the factor of the products."""
        return float(head_dim**-0.5) if self.scale is None else self.scale


PLAIN_SCORES = ScoreRule()
"""The rule of LLaMA."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    backend: AttentionBackend = "auto",
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention of query [s, b, n, d], key and value [s, b, n_kv, d]: [s, b, n * d].

    ``mask`` is bool [b, 1, s, s], True where a position may attend (causality included); None is
    plain causal attention. ``scale`` is that of ``ScoreRule``; windows and capped scores are in
    ``sliding.py``, documents in ``documents.py``.
    """
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if not is_host(query.device) and not suits_flash(query):
        # The memory-efficient kernel takes no grouped heads: torch would compute s * s scores of
        # all heads instead.
        k = _expanded(k, q)
        v = _expanded(v, q)
    with _preferred_kernels(query.device, backend):
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out.permute(2, 0, 1, 3).flatten(2)


def attention_order(
    cudnn: int | None, backend: AttentionBackend = "auto", *, deterministic: bool = False
) -> tuple[SDPBackend, ...]:
    """Return the kernels of an accelerator that may be used, the preferred one first. Only this
    function decides it. ``cudnn`` is its version, as torch numbers it.

    On Hopper cuDNN's attention takes 60 % of the time of torch's flash attention (2), which is 7 %
    of a step of LLaMA 7B."""
    others = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    # cuDNN's backward adds the parts of a query's gradient with atomics. The other kernels have a
    # backward in a fixed order, which they use when torch is told to be deterministic.
    usable = (cudnn or 0) > _SOUND_CUDNN and not deterministic
    return (
        (SDPBackend.CUDNN_ATTENTION, *others) if usable and backend in ("auto", "fused") else others
    )


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, backend: AttentionBackend = "auto"
) -> SDPBackend:
    """Return the kernel that computes plain causal attention of these tensors, in the shapes of
    ``causal_attention``."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    with _preferred_kernels(query.device, backend):
        return SDPBackend(
            torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        )


def attention_warnings(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    backend: AttentionBackend = "auto",
) -> list[str]:
    """Return warnings about the kernel that computes this model's attention here."""
    if is_host(device) or dtype.itemsize != 2 or backend in ("flash", "fa3") or _is_deterministic():
        return []
    query, key = (
        torch.empty(256, 1, count, head_dim, device=device, dtype=dtype)
        for count in (heads, kv_heads)
    )
    kernel = attention_kernel(query, key, key, backend)
    problem = attention_problem(kernel, capability(device), _cudnn_version(), backend)
    return [] if problem is None else [problem]


def attention_problem(
    kernel: SDPBackend,
    generation: tuple[int, int],
    cudnn: int | None,
    backend: AttentionBackend = "auto",
) -> str | None:
    """Return why a device does not run the fastest kernel, or the one that was asked for; None if
    it does."""
    if kernel is SDPBackend.CUDNN_ATTENTION or (generation < _HOPPER and backend == "auto"):
        return None
    why = "it cannot take this model's heads"
    if (cudnn or 0) <= _SOUND_CUDNN:
        why = (
            f"cuDNN is {cudnn}, and not later than {_SOUND_CUDNN} "
            "(LD_LIBRARY_PATH may name an old one)"
        )
    return (
        f"attention runs {kernel.name}, not cuDNN's kernel, which is faster on this device: {why}"
    )


def _cudnn_version() -> int | None:
    return torch.backends.cudnn.version()  # type: ignore[no-any-return,no-untyped-call]


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _kernels(backend: AttentionBackend) -> tuple[SDPBackend, ...]:
    return attention_order(_cudnn_version(), backend, deterministic=_is_deterministic())


def _preferred_kernels(
    device: torch.device, backend: AttentionBackend
) -> AbstractContextManager[object]:
    """Make torch follow ``attention_order`` on an accelerator."""
    if is_host(device):
        return nullcontext()
    # Without set_priority torch takes the list for a set and keeps its own order.
    return sdpa_kernel(list(_kernels(backend)), set_priority=True)


def window_sizes(left: int | None) -> dict[str, int]:
    """Return flash attention's window as keywords. ``left`` is how many keys before the last one a
    query sees. None: all."""
    return {} if left is None else {"window_size_left": left, "window_size_right": 0}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    backend: AttentionBackend = "auto",
    rule: ScoreRule = PLAIN_SCORES,
) -> tuple[Tensor, Tensor]:
    """Compute one piece, query [b, n, s_q, d] against key and value [b, n_kv, s_k, d]: the output,
    shaped as query, and the log-sum-exp [b, n, s_q], fp32 (fp64 for fp64).

    ``causal`` needs s_q = s_k; ``mask`` is bool [b, 1, s_q, s_k], True where a query may attend;
    both hold at once. A query that may attend to nothing gets some finite output and a log-sum-exp
    so low that ``merge`` drops it. The window of ``rule`` is not applied here, but in
    ``sliding.py``. Not differentiated by autograd, but by ``attend_backward``.
    """
    if needs_products(query, rule):
        from megatron_llama.model.nn import products  # which few models need

        scale = rule.scale_of(query.shape[3])
        return products.attend(
            query, key, value, scale=scale, softcap=rule.softcap, causal=causal, mask=mask
        )
    bias = _bias(mask, query)
    if is_host(query.device):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, attn_mask=bias, scale=rule.scale
        )
        return out, lse
    kernel = piece_kernel(query, key, value, bias, causal=causal, backend=backend)
    if kernel is SDPBackend.CUDNN_ATTENTION:
        out, statistics, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=rule.scale
        )
        lse = statistics.view(query.shape[:3])  # [b, n, s_q, 1] there
    elif kernel is SDPBackend.FLASH_ATTENTION:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=rule.scale
        )
    else:
        q, k, v = (_aligned(_expanded(heads, query)) for heads in (query, key, value))
        head_dim = query.shape[3]
        out, padded, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=rule.scale_of(head_dim)
        )
        out = out[..., :head_dim]
        lse = padded[..., : query.shape[2]]
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    backend: AttentionBackend = "auto",
    rule: ScoreRule = PLAIN_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one piece's query, key and value, in their shapes and dtypes, from
    the merged ``out`` and ``lse``."""
    if needs_products(query, rule):
        from megatron_llama.model.nn import products  # which few models need

        return products.attend_backward(
            *(grad, query, key, value, out, lse),
            scale=rule.scale_of(query.shape[3]),
            softcap=rule.softcap,
            causal=causal,
            mask=mask,
        )
    bias = _bias(mask, query)
    lse = lse.contiguous()
    if is_host(query.device):
        return _backward_on_host(grad, query, key, value, out, lse, bias, causal, rule)
    # Token by token, [b, s_q, n, d], as kernels write it. In 16 bits the memory-efficient one takes
    # this for granted, whatever the strides, and gradients would be wrong; torch keeps cuDNN's
    # plans by the strides of queries, keys and values alone; for flash attention torch does this.
    grad, out = (heads.transpose(1, 2).contiguous().transpose(1, 2) for heads in (grad, out))
    lengths = (query.shape[2], key.shape[2])
    kernel = piece_kernel(query, key, value, bias, causal=causal, backend=backend)
    if kernel is SDPBackend.CUDNN_ATTENTION:
        # Where a fresh output of the forward pass would be: cuDNN takes statistics as they lie.
        statistics = lse.unsqueeze(-1)
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, out, statistics),
            *(unused, unused, None, None, None, *lengths, 0.0, causal),
            scale=rule.scale,
        )
    elif kernel is SDPBackend.FLASH_ATTENTION:
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, lse),
            *(None, None, *lengths, 0.0, causal, unused, unused[0]),
            scale=rule.scale,
        )
    else:
        q, k, v = (_aligned(_expanded(heads, query)) for heads in (query, key, value))
        lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=float("inf"))
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        wanted = (True, True, True, False)
        head_dim = query.shape[3]
        aligned = _aten._scaled_dot_product_efficient_attention_backward(
            *(_aligned(grad), q, k, v, bias, _aligned(out), lse),
            *(unused, unused, 0.0, wanted, causal),
            scale=rule.scale_of(head_dim),
        )
        dq, dk, dv = (gradient[..., :head_dim] for gradient in aligned[:3])
        grads = dq, _summed(dk, key), _summed(dv, value)
    dq, dk, dv = grads
    return dq, dk, dv


def _backward_on_host(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    options = {"scale": rule.scale}
    if not widens_bf16(query):
        grads = backward(grad, query, key, value, out, lse, 0.0, causal, attn_mask=bias, **options)
        query_grad, key_grad, value_grad = grads
        return query_grad, key_grad, value_grad
    # In fp32, which takes a thirtieth of the time; sample by sample, because of the fp32 copies.
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for index in range(len(query)):
        sample = slice(index, index + 1)
        wide = (tensor[sample].float() for tensor in (grad, query, key, value, out))
        # A bias may be one for all samples.
        mask = None if bias is None else bias.expand(len(query), -1, -1, -1)[sample].float()
        results = backward(*wide, lse[sample], 0.0, causal, attn_mask=mask, **options)
        for target, result in zip(grads, results, strict=True):
            target[sample] = result
    return grads


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a piece, part [b, n, s_q, d] with its log-sum-exp [b, n, s_q], to the sum of other pieces
    of the same queries, in place.

    The sum starts from zeros with a log-sum-exp of minus infinity. ``out`` is at least fp32: it is
    rounded once, after the last piece.
    """
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), share)
    torch.logaddexp(lse, part_lse, out=lse)


def needs_products(query: Tensor, rule: ScoreRule) -> bool:
    """Whether no kernel computes pieces of these queries: scores are capped, or an accelerator gets
    fp64."""
    return rule.softcap != 0.0 or (query.element_size() == 8 and not is_host(query.device))


def suits_flash(query: Tensor) -> bool:
    """Whether an accelerator's flash attention takes queries [..., d] of this dtype and size."""
    head_dim = query.shape[-1]
    return query.element_size() == 2 and head_dim % 8 == 0 and head_dim <= _LARGEST_FLASH_HEAD


def piece_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    backend: AttentionBackend,
) -> SDPBackend:
    """Return the accelerator's kernel for one piece, the same one forward and backward. It is one
    of those that return a log-sum-exp: cuDNN's and flash attention, which take grouped heads and
    16 bits without a bias, or the memory-efficient one, which takes anything."""
    head_dim = query.shape[-1]
    if bias is not None or not suits_flash(query):
        return SDPBackend.EFFICIENT_ATTENTION
    sound = head_dim <= _LARGEST_CUDNN_HEAD and (causal or key.shape[2] % _CUDNN_TILE == 0)
    if _kernels(backend)[0] is SDPBackend.CUDNN_ATTENTION and sound:
        grouped = query.shape[1] != key.shape[1]
        # torch knows which devices and versions compute which shapes.
        params = SDPAParams(query, key, value, None, 0.0, causal, grouped)
        if can_use_cudnn_attention(params):
            return SDPBackend.CUDNN_ATTENTION
    return SDPBackend.FLASH_ATTENTION


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the bias that kernels add to the attention scores, [b, n, s_q, s_k]."""
    if mask is None:
        return None
    # Not minus infinity: a row of it alone has no softmax, and kernels disagree on the result. Half
    # of the lowest number leaves room for the score and for a change of base.
    padded = -(-mask.shape[-1] // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = query.new_zeros(*mask.shape[:-1], padded)[..., : mask.shape[-1]]
    bias.masked_fill_(~mask, torch.finfo(query.dtype).min / 2)
    return bias.expand(-1, query.shape[1], -1, -1)


def _expanded(heads: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads, one for each query head."""
    groups = query.shape[1] // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _aligned(heads: Tensor) -> Tensor:
    """Append zeros to heads [b, n, s, d] of a size that the kernel does not take, which change no
    score and no output. The order in memory stays, or becomes token by token."""
    missing = -heads.shape[3] % (_HEAD_ALIGNMENT // heads.element_size())
    return F.pad(heads.transpose(1, 2), (0, missing)).transpose(1, 2) if missing else heads


def _summed(grad: Tensor, heads: Tensor) -> Tensor:
    """Sum over the query heads of each key or value head: the transpose of ``_expanded``."""
    return grad.reshape(heads.shape[0], heads.shape[1], -1, *heads.shape[2:]).sum(2)
