"""Files as the other programs write them, made here from their documented rules, without our writers; and our files in their hands."""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.launch.launcher import Place
from torch import Tensor

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import LLAMA31, assert_same, config, convert, hf_folder, identical, loaded, rank_file

HEADS, GROUPS, WIDTH = 8, 4, 8


def names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}."
    found = {name: f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo"}
    found |= {name: f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    return found | {"first": f"{prefix}input_layernorm.weight", "second": f"{prefix}post_attention_layernorm.weight"}


def by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron-LM's order: for each group its queries, its key, its value."""
    parts = [part.view(GROUPS, -1, part.shape[1]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, q.shape[1])


def megatron_block(hf: dict[str, Tensor], layer: int, tp: int, rank: int, *, grouped: bool) -> dict[str, Tensor]:
    """query_key_value, dense, dense_h_to_4h, dense_4h_to_h and the norms of a tensor rank."""
    w = {name: hf[full] for name, full in names(layer).items()}
    qkv = by_group(w["q"], w["k"], w["v"]).chunk(tp)[rank] if grouped else torch.cat([w[name].chunk(tp)[rank] for name in "qkv"])
    return {
        "input": w["first"],
        "qkv": qkv,
        "dense": w["o"].chunk(tp, dim=1)[rank],
        "post": w["second"],
        "up": torch.cat([w[name].chunk(tp)[rank] for name in ("gate", "up")]),
        "down": w["down"].chunk(tp, dim=1)[rank],
    }


def padded(weight: Tensor, rows: int) -> Tensor:
    """As converters pad: the last row repeated."""
    return torch.cat([weight, weight[-1:].expand(rows - len(weight), -1)])


def save(folder: Path, tp: int, pp: int | None, content: Any) -> None:
    path = rank_file(folder, tp, pp)
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


def training_args(**fields: Any) -> argparse.Namespace:
    sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": HEADS, "kv_channels": WIDTH}
    rest = {"max_position_embeddings": 64, "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
    return argparse.Namespace(**sizes, **rest, make_vocab_size_divisible_by=128, padded_vocab_size=512, **fields)


NEW = ("self_attention", "input_norm", "post_attention_norm", "final_norm", "encoder")
MIDDLE = ("self_attention", "input_layernorm", "post_attention_layernorm", "final_layernorm", "encoder")
OLD = ("attention", "input_layernorm", "post_attention_layernorm", "final_layernorm", "transformer")


@pytest.mark.parametrize("words", [NEW, MIDDLE, OLD], ids=["new", "middle", "old"])
def test_a_training_run_of_megatron_lm(tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Two virtual stages on each of two pipeline ranks, two tensor ranks, a tied head, optimizer state, random states."""
    attention, first, second, final, encoder = words
    original = hf_folder(tmp_path / "hf", torch.bfloat16, tie_word_embeddings=True, rms_norm_eps=1e-5)
    hf = tensors(original)
    own = {"group_query_attention": True, "num_query_groups": GROUPS, "normalization": "RMSNorm", "norm_epsilon": 1e-5}
    args = training_args(**own, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, vocab_size=300, init_method_std=0.1)
    for tp in range(2):
        embedding = padded(hf["model.embed_tokens.weight"], 512).chunk(2)[tp]
        for pp in range(2):
            content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "optimizer": {"exp_avg": torch.zeros(9)}, "iteration": 7}
            for chunk in range(2):
                stage = chunk * 2 + pp
                block = megatron_block(hf, stage, 2, tp, grouped=True)
                layer = {
                    f"layers.0.{first}.weight": block["input"],
                    f"layers.0.{attention}.query_key_value.weight": block["qkv"],
                    f"layers.0.{attention}.dense.weight": block["dense"],
                    f"layers.0.{second}.weight": block["post"],
                    "layers.0.mlp.dense_h_to_4h.weight": block["up"],
                    "layers.0.mlp.dense_4h_to_h.weight": block["down"],
                }
                model: dict[str, Any] = {"language_model": {encoder: layer}}
                if stage == 0:
                    model["language_model"]["embedding"] = {"word_embeddings": {"weight": embedding}}
                if stage == 3:
                    layer[f"{final}.weight"] = hf["model.norm.weight"]
                    model["word_embeddings_for_head"] = {"weight": embedding}
                content[f"model{chunk}"] = model
            save(tmp_path / "run", tp, pp, content)
    out = convert(tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert "note: the optimizer state of the source is left out: it does not cross formats\n" in capsys.readouterr().out
    ours = tensors(out)
    assert ours.keys() == hf.keys() and all(identical(ours[name], hf[name]) for name in hf)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert {**config(out), **ids} == {**config(out), **config(original), **ids}


def test_a_training_run_of_megatron_core(tmp_path: Path) -> None:
    """Transformer Engine's names, states of fp8 beside them, LLaMA 3.1's rotary scaling as arguments."""
    original = hf_folder(tmp_path / "hf", torch.bfloat16, rope_parameters=LLAMA31, rms_norm_eps=1e-5, max_position_embeddings=64)
    hf = tensors(original)
    own = {
        "group_query_attention": True, "num_query_groups": GROUPS, "normalization": "RMSNorm", "norm_epsilon": 1e-5,
        "rotary_base": 500_000,
    }
    rope = {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "untie_embeddings_and_output_weights": True}
    args = training_args(**own, **rope, vocab_size=300, tensor_model_parallel_size=1, init_method_std=0.1)
    model: dict[str, Any] = {"embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"], 512)}
    for layer in range(4):
        block, prefix = megatron_block(hf, layer, 1, 0, grouped=True), f"decoder.layers.{layer}."
        model |= {
            f"{prefix}self_attention.linear_qkv.layer_norm_weight": block["input"],
            f"{prefix}self_attention.linear_qkv.weight": block["qkv"],
            f"{prefix}self_attention.linear_qkv._extra_state": None,
            f"{prefix}self_attention.linear_proj.weight": block["dense"],
            f"{prefix}self_attention.linear_proj._extra_state": torch.zeros(4, dtype=torch.uint8),
            f"{prefix}mlp.linear_fc1.layer_norm_weight": block["post"],
            f"{prefix}mlp.linear_fc1.weight": block["up"],
            f"{prefix}mlp.linear_fc2.weight": block["down"],
        }
    model |= {"decoder.final_layernorm.weight": hf["model.norm.weight"], "output_layer.weight": padded(hf["lm_head.weight"], 512)}
    save(tmp_path / "run", 0, None, {"args": args, "checkpoint_version": 3.0, "model": model})
    out = convert(tmp_path / "run", tmp_path / "out", "--to", "hf")
    ours = tensors(out)
    assert ours.keys() == hf.keys() and all(identical(ours[name], hf[name]) for name in hf)
    for name in ("rope_parameters", "rms_norm_eps", "vocab_size", "tie_word_embeddings", "head_dim", "max_position_embeddings"):
        assert config(out)[name] == config(original)[name], name


@pytest.mark.parametrize("padding", [True, False], ids=["padded head", "head without padding"])
def test_a_checkpoint_of_megatron_llama(tmp_path: Path, padding: bool) -> None:
    """Its converter leaves the head without padding, training pads it; every tensor rank has all of it."""
    original = hf_folder(tmp_path / "hf", num_key_value_heads=HEADS, rms_norm_eps=1e-5)
    hf = tensors(original)
    known = training_args(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, orig_vocab_size=300, layernorm_epsilon=1e-5)
    args = types.SimpleNamespace(**vars(known), RMSNorm=True, causal_lm=True, init_method_std=0.1)
    for tp in range(2):
        encoder: dict[str, Tensor] = {"final_layernorm.weight": hf["model.norm.weight"]}
        for layer in range(4):
            block, prefix = megatron_block(hf, layer, 2, tp, grouped=False), f"layers.{layer}."
            encoder |= {f"{prefix}input_layernorm.weight": block["input"], f"{prefix}post_attention_layernorm.weight": block["post"]}
            encoder |= {
                f"{prefix}self_attention.query_key_value.weight": block["qkv"],
                f"{prefix}self_attention.dense.weight": block["dense"],
            }
            encoder |= {f"{prefix}mlp.dense_h_to_4h.weight": block["up"], f"{prefix}mlp.dense_4h_to_h.weight": block["down"]}
        embedding = {"word_embeddings": {"weight": padded(hf["model.embed_tokens.weight"], 512).chunk(2)[tp]}}
        head = padded(hf["lm_head.weight"], 512) if padding else hf["lm_head.weight"]
        model = {"language_model": {"embedding": embedding, "encoder": encoder}, "lm_head": {"weight": head}}
        save(tmp_path / "run", tp, None, {"args": args, "checkpoint_version": 3.0, "model": model})
    out = convert(tmp_path / "run", tmp_path / "out", "--to", "hf")
    ours = tensors(out)
    assert ours.keys() == hf.keys() and all(identical(ours[name], hf[name]) for name in hf)
    assert config(out)["rope_parameters"] == config(original)["rope_parameters"]
    back = convert(original, tmp_path / "back", "--to", "megatron-llama", "--tensor-model-parallel-size", "2")
    for tp in range(2):
        written, theirs = (loaded(rank_file(folder, tp))["model"] for folder in (back, tmp_path / "run"))
        assert written["language_model"]["encoder"].keys() == theirs["language_model"]["encoder"].keys()
        for name, tensor in theirs["language_model"]["encoder"].items():
            assert identical(written["language_model"]["encoder"][name], tensor), name
        assert torch.equal(written["lm_head"]["weight"][:300], hf["lm_head.weight"]) and len(written["lm_head"]["weight"]) == 512


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """HuggingFace's rotary halves -> Meta's neighbouring pairs."""
    rows = torch.arange(len(weight)).view(heads, 2, -1).transpose(1, 2).reshape(-1)
    return weight[rows]


@pytest.mark.parametrize("by_rows", [False, True], ids=["LLaMA 2", "LLaMA 3"])
def test_a_download_of_meta(tmp_path: Path, by_rows: bool) -> None:
    """All tensors of a file in one storage, rope.freqs beside them, and nothing but params.json."""
    original = hf_folder(tmp_path / "hf", torch.bfloat16)
    hf, files = tensors(original), 2
    meta = tmp_path / "meta"
    meta.mkdir()
    for rank in range(files):
        state = {"norm.weight": hf["model.norm.weight"], "output.weight": hf["lm_head.weight"].chunk(files)[rank]}
        state["tok_embeddings.weight"] = hf["model.embed_tokens.weight"].chunk(files, dim=0 if by_rows else 1)[rank]
        for layer in range(4):
            w, prefix = {name: hf[full] for name, full in names(layer).items()}, f"layers.{layer}."
            state |= {
                f"{prefix}attention.wq.weight": interleaved(w["q"], HEADS).chunk(files)[rank],
                f"{prefix}attention.wk.weight": interleaved(w["k"], GROUPS).chunk(files)[rank],
                f"{prefix}attention.wv.weight": w["v"].chunk(files)[rank],
                f"{prefix}attention.wo.weight": w["o"].chunk(files, dim=1)[rank],
                f"{prefix}feed_forward.w1.weight": w["gate"].chunk(files)[rank],
                f"{prefix}feed_forward.w2.weight": w["down"].chunk(files, dim=1)[rank],
                f"{prefix}feed_forward.w3.weight": w["up"].chunk(files)[rank],
                f"{prefix}attention_norm.weight": w["first"],
                f"{prefix}ffn_norm.weight": w["second"],
            }
        storage, start, views = torch.cat([tensor.flatten() for tensor in state.values()]), 0, {}
        for name, tensor in state.items():
            views[name] = storage[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
        torch.save(views | {"rope.freqs": torch.ones(4, dtype=torch.bfloat16)}, meta / f"consolidated.{rank:02d}.pth")
    params = {"dim": 64, "multiple_of": 32, "n_heads": HEADS, "n_kv_heads": GROUPS, "n_layers": 4, "norm_eps": 1e-6, "vocab_size": -1}
    (meta / "params.json").write_text(json.dumps(params))
    out = convert(meta, tmp_path / "out", "--to", "hf", "--hf-config", str(original / "config.json"))
    assert_same(out, original)
    back = convert(original, tmp_path / "back", "--to", "meta", "--tensor-model-parallel-size", str(files))
    if not by_rows:
        for rank in range(files):
            ours, theirs = (torch.load(folder / f"consolidated.{rank:02d}.pth", weights_only=True) for folder in (back, meta))
            assert all(identical(ours[name], theirs[name]) for name in ours) and theirs.keys() - ours.keys() == {"rope.freqs"}


@pytest.mark.parametrize(
    ("dim", "width", "rule"),
    [(4096, 11008, (256, None)), (8192, 28672, (4096, 1.3)), (4096, 14336, (1024, 1.3)), (64, 96, None), (5120, 13824, (256, None))],
)
def test_the_width_of_the_mlp_follows_from_params_json(dim: int, width: int, rule: Any) -> None:
    from megatron_llama.config.schema import ModelConfig
    from megatron_llama.converter.meta.names import make_params, mlp_width

    params = make_params(ModelConfig(hidden_size=dim, intermediate_size=width, num_attention_heads=8, num_key_value_heads=4))
    found = params["multiple_of"], params.get("ffn_dim_multiplier")
    assert mlp_width(dim, *found) == width and rule in (None, found)


def logits_of_megatron_core(place: Place, path: Path, ids: Tensor) -> Tensor:
    """NVIDIA's own modules, filled strictly from our file; only the attention kernel, which wants a GPU, is torch's."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention

    content = loaded(path)
    args = content["args"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=place.rank, world_size=place.world_size)
    parallel_state.initialize_model_parallel()
    sizes = {name: getattr(args, name) for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")}
    settings = TransformerConfig(
        **sizes, ffn_hidden_size=args.ffn_hidden_size, normalization=args.normalization, layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm, activation_func=F.silu, use_cpu_initialization=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, hidden_dropout=0.0,
    )
    model = GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    model.load_state_dict(content["model"], strict=True)
    positions = torch.arange(ids.shape[1])
    unseen = torch.ones(len(positions), len(positions), dtype=torch.bool).triu(1)
    angles = model.rotary_pos_emb.get_freqs_non_repeated(len(positions)).repeat(1, 2)[:, None, None]
    with torch.no_grad():
        x = model.embedding(ids, positions[None])
        for number, layer in enumerate(model.decoder.layers, 1):
            hidden = unseen
            if is_layer_window_attention(args.window_size, args.window_attn_skip_freq, number):
                left, right = args.window_size  # as get_sliding_window_causal_mask has them, on a GPU
                hidden = ~torch.ones_like(unseen).triu(-left).tril(right)
            q, k, v = layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(x))
            q, k = (apply_rotary_pos_emb(each, angles, settings) for each in (q, k))
            q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, enable_gqa=True)
            x = x + layer.self_attention.linear_proj(seen.permute(2, 0, 1, 3).flatten(2))[0]
            x = x + layer.mlp(layer.pre_mlp_layernorm(x))[0]
        tied = None if args.untie_embeddings_and_output_weights else model.shared_embedding_or_output_weight()
        found: Tensor = model.output_layer(model.decoder.final_layernorm(x), weight=tied)[0].transpose(0, 1)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
