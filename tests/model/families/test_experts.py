"""Models with experts: their options, what is refused beside them, and what the choices of their routers rest on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.hf import hf_config_from_model
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.tensor_messages import block_messages, sparse_block_messages
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.commands.pretrain import SECTIONS
from megatron_llama.train.setup.resolve import assemble, check
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.families.twins import TWINS, DrawnWeights, FamilyLayout
from tests.model.test_activation_memory import EXPERTS, Run
from tests.over_cases import over_cases
from tests.parallel.cases import token_ids, train_twin, trainer
from tests.torch_twin import filled

SIZES: dict[str, object] = {
    "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_attention_heads": 4,
    "num_query_groups": 2, "seq_length": 16, "micro_batch_size": 1, "train_iters": 2, "lr": 1e-3,
}  # fmt: skip
GIVEN: dict[str, object] = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


def resolved(world_size: int = 1, **options: object) -> Config:
    given = {name: value for name, value in {**SIZES, **GIVEN, **options}.items() if value is not None}
    return check(assemble(read_options(None, given, SECTIONS)), world_size).config


def theirs(model: ModelConfig, source: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = hf_config_from_model(model, dtype="float32")
    return filled(AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)), model, source)


CHUNKS = {
    "model_type": "llama4_text", "attention_chunk_size": 5, "layer_types": ("chunked_attention", "full_attention", "full_attention", "chunked_attention"),
    "qk_norm": "l2",
}  # fmt: skip


@pytest.mark.tries("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
@pytest.mark.tries("attention_chunk_size", "attn_temperature_tuning", "floor_scale", "attn_scale", "moe_router_score_function")
@pytest.mark.tries("moe_apply_probs_on_input", "moe_shared_expert_intermediate_size")
@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"norm_topk_prob": True, "mlp_only_layers": (2,)}, [0, 1, 3]),
        ({"decoder_sparse_step": 2, "moe_router_topk": 6}, [1, 3]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": (2,), "moe_router_topk": 1}, []),
        ({"num_experts": 3, "moe_router_topk": 1, "norm_topk_prob": True}, [0, 1, 2, 3]),
        ({"model_type": "mixtral", "moe_ffn_hidden_size": None}, [0, 1, 2, 3]),
        ({**CHUNKS, "attn_temperature_tuning": True, "floor_scale": 3, "attn_scale": 0.7}, [0, 1, 2, 3]),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 64, "decoder_sparse_step": 2, "moe_router_score_function": "sigmoid"}
            | {"moe_apply_probs_on_input": True, "moe_shared_expert_intermediate_size": 24},
            [1, 3],
        ),
    ],
)
def test_options_are_those_of_transformers(options: dict[str, Any], sparse: list[int]) -> None:
    """Which blocks have experts, how many, how wide, and with which weights: transformers' model of the same fields has the same logits."""
    config = resolved(**options)
    model = config.model
    assert [layer for layer in range(4) if is_sparse(model, layer)] == sparse
    source = DrawnWeights(model)
    twin = theirs(model, source)
    routers = {name.split(".")[2] for name, _ in twin.named_parameters() if name.endswith((".mlp.gate.weight", ".router.weight"))}
    assert routers == set(map(str, sparse))
    [stage] = build_stages(config, Mesh.single()).values()
    load_stages([stage], rank_specs(config, Mesh.single()), source, dtype=torch.float32, device=torch.device("cpu"))
    tokens = token_ids(32).view(2, 16)
    with torch.no_grad():
        found = stage(tokens.t(), stage.positions(16, torch.device("cpu")))[..., :300]
        expected = twin(tokens).logits.transpose(0, 1)
    assert expected.std() > 0.1 and float((found - expected).abs().max()) < 1e-5


TP2 = {"tensor_model_parallel_size": 2}
SPLIT = {**TP2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


@over_cases
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (TP2, "--num-experts: got 6 with --tensor-model-parallel-size 2 without --sequence-parallel, expected both"),
        ({**SPLIT, "tp_comm_overlap": "2"}, "--num-experts: got 6 with --tp-comm-overlap 2, expected 0"),
        (
            {"fp8": "blockwise", "bf16": True, "hidden_size": 128, "head_dim": 128, "intermediate_size": 50},
            "--fp8 blockwise: got a rank's intermediate size of an expert 24 with --tensor-model-parallel-size 1, expected multiples of 128",
        ),
        ({"cuda_graph_scope": "block"}, "--num-experts: got 6 with --cuda-graph-scope block, expected none"),
        ({"optimizer_offload": "zenflow"}, "--num-experts: got 6 with --optimizer-offload zenflow, expected exact: columns"),
        ({"lora_rank": 2, "lora_target_modules": ("q_proj", "up_proj")}, "--lora-target-modules: got up_proj, expected some of q_proj, k_proj"),
        ({"freeze": ("*.experts.0.*",)}, "expected also model.layers.0.mlp.experts.1.gate_proj.weight"),
        ({"moe_router_topk": 7}, "--num-experts-per-tok: got 7, expected a number from 1 to num_experts 6"),
        ({"moe_router_topk": 0}, "--num-experts-per-tok: got 0, expected a number from 1 to num_experts 6"),
        ({"mlp_only_layers": (4,)}, "--mlp-only-layers: got 4, expected numbers of blocks, from 0 to 3"),
        ({"num_experts": 2000}, "--num-experts: got 2000, expected at most 1,024"),
        ({"decoder_sparse_step": 0}, "--decoder-sparse-step: got 0, expected a positive number"),
        ({"model_type": "mixtral", "moe_ffn_hidden_size": 40}, "--moe-intermediate-size: got 40, expected 48, as in the config.json of a Mixtral"),
        ({**CHUNKS, "moe_router_score_function": "softmax"}, "--moe-router-score-function: got softmax, expected sigmoid, as in the config.json of a Llama4"),
        ({**CHUNKS, "moe_shared_expert_intermediate_size": 8}, "--moe-shared-expert-intermediate-size: got 8, expected 24, as in the config.json of a"),
        ({**CHUNKS, "attention_chunk_size": 0}, "--attention-chunk-size: got 0, expected a positive number"),
        ({**CHUNKS, "sliding_window": 4}, "--sliding-window: got 4, expected 0, as in the config.json of a Llama4ForCausalLM"),
        ({"attention_chunk_size": 4}, "--attention-chunk-size: got 4, expected 0, as in the config.json of a Qwen3MoeForCausalLM"),
        ({**CHUNKS, "layer_types": ("full_attention",) * 4}, "full_attention, expected chunked_attention for some of them"),
        ({"model_type": "llama"}, "--num-experts: got 6, expected 0, as in the config.json of a LlamaForCausalLM"),
        ({**CHUNKS, "moe_z_loss_coeff": 0.01}, "--moe-z-loss-coeff: got 0.01, expected none of them: they are of the softmax of a router"),
        ({"expert_model_parallel_size": 4}, "--expert-model-parallel-size: got 4, expected a divisor of num_experts 6; choose 2"),
        ({"expert_model_parallel_size": 3}, "--expert-model-parallel-size: got 3, expected a divisor of the 2 data-parallel ranks"),
        (
            {**EP2, "moe_token_dispatcher_type": "alltoall", "fp8": "tensorwise", "bf16": True},
            "got 2 with --moe-token-dispatcher-type alltoall and --fp8 tensorwise, expected allgather or blockwise",
        ),
        ({**EP2, "data_parallel_shard_size": 1}, "--expert-model-parallel-size: got 2 with --data-parallel-shard-size 1, expected a multiple of 2"),
        ({**EP2, "expert_tensor_parallel_size": 2}, "expected 1"),
        ({**EP2, **ALLTOALL, "compile": True}, "--num-experts: got 6 with --compile and --moe-token-dispatcher-type alltoall, expected allgather"),
        ({**EP2, "model_type": "llama", **dict.fromkeys(GIVEN)}, "--expert-model-parallel-size: got 2, expected 1 for a model without experts"),
    ],
)
def test_what_is_not_written_for_experts_is_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(2, **options)
    assert says in str(error.value)


def test_what_is_exchanged_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a rank's 4,096 tokens 2,734 need a rank of eight: none of its 16 of 128 experts is among eight drawn with the chance 112/128 x 111/127 x ..."""
    sizes = ["--seq-length", "8192", "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "1", "--bf16"]
    sizes += ["--context-parallel-size", "2", "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.001"]
    divided = ["--expert-model-parallel-size", "8", "--moe-token-dispatcher-type", "alltoall", "--recompute-granularity", "selective"]
    assert main(["pretrain", "--model", "qwen3-30b-a3b", *sizes, *divided, "--world-size", "16", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"  over cp       in a block with experts, of each microbatch, beside keys and values: forward 1 message, {sized(128 * 4)}" in printed
    rows = 8 * 2734
    forward, backward = rows * (2 * 4096 + 2 * 8 * 4) + 128, rows * (3 * 4096 + 8 * 4)
    assert "(ep 8 alltoall)" in printed
    line = f"of each microbatch: forward 4 messages, {sized(forward)}; backward 4, {sized(backward)}, if experts are equally loaded; at most"
    assert f"  over ep       in a block with experts, {line}" in printed


def test_flops_are_those_of_the_experts_of_a_token() -> None:
    """By the published numbers of active parameters: 12.9 billion of Mixtral 8x7B, 3.3 billion of Qwen3-30B-A3B, 22 of 235."""
    for name, active in {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22.0e9, "llama4-scout": 17.2e9, "llama4-maverick": 17.2e9}.items():
        model = PRESETS[name]
        embedding = model.vocab_size * model.hidden_size
        matrices = flops_per_token(replace(model, sliding_window=1), 1, causal=False) / 6 + embedding
        assert abs(matrices / active - 1) < 0.02, name


def tensor_traffic(place: Place, layout: Run) -> tuple[int, int]:
    """Number and bytes of the messages over tp of one step's gathers and scatters."""
    run = trainer(place, layout)
    run.step(0)
    batches, recorder = run.batches(1), run.mesh.recorder
    recorder.traffic.clear()
    run.runtime.step(batches)
    sums = [recorder.traffic["tp", kind] for kind in ("all_gather", "reduce_scatter")]
    return sum(one.calls for one in sums), sum(one.bytes for one in sums)


def test_tokens_stay_on_their_rank(cluster: Cluster) -> None:
    """A block with experts has the messages of attention alone, as planned."""
    layout = Run(tp=2, sp=True, microbatches=2, fields=tuple(EXPERTS.items()))
    whole, less = (cluster.run(2, tensor_traffic, replace(layout, layers=layers))[0] for layers in (4, 3))
    sparse, dense = sparse_block_messages(layout.sized()), block_messages(layout.sized())
    assert (whole[0] - less[0]) / 2 == sparse.forward + sparse.backward == (dense.forward + dense.backward) / 2
    assert (whole[1] - less[1]) / 2 == sparse.forward_bytes + sparse.backward_bytes


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama4"])
def test_no_choice_of_the_parity_tests_hangs_on_rounding(family: str) -> None:
    """Between the last expert of a token and the next one there is far more than another order of sums changes."""
    model = TWINS[family].hf_model()
    margins: list[float] = []

    def note(router: Any, given: object, routing: tuple[Tensor, ...]) -> None:
        logits = routing[1 if family == "llama4" else 0].detach().float()
        best = (logits if family == "llama4" else logits.softmax(-1)).topk(router.top_k + 1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))

    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "router")):
            module.register_forward_hook(note)
    train_twin(model, FamilyLayout(family=family, steps=6))
    assert len(margins) >= 6 * 3 and min(margins) > 1e-5, min(margins)
