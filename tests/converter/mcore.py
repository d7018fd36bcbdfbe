"""NVIDIA's Megatron-Core in the ranks of a test cluster, on CPUs with gloo: it builds, trains, saves and loads LLaMA models, Mixtral and
Qwen3-MoE as the training loop of Megatron-LM does.

In a rank of ``Cluster.run(tp * pp * dp, ...)``::

    with megatron(place, Run(hf_folder, tp=2, pp=2, sharding="dp_reshardable")) as trainer:
        losses = trainer.train(samples)  # one step for each [global batch, sequence + 1]
        trainer.save(folder)
        trainer.load(other_folder)
        trainer.tensors("exp_avg")  # on rank 0: whole tensors by their HuggingFace names

Nothing of Megatron is replaced but what asks for a GPU (``_OnCpu`` answers in its place) or starts processes (``_Threads``).
"""

from __future__ import annotations

import json
import queue
import random
import re
import signal
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.launch.launcher import Place
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

SHARDINGS = (None, "dp_reshardable", "fully_reshardable")
"""The shapes of the optimizer's state in checkpoints: without the distributed optimizer; its flat buckets, which are its default; model
tensors (``--dist-ckpt-optim-fully-reshardable``). Megatron writes ``dp_zero_gather_scatter`` and ``fully_sharded_model_space`` too, both
deprecated."""
MODEL_ARGUMENTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels hidden_dropout attention_dropout normalization
    layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm add_bias_linear add_qkv_bias qk_layernorm
    qk_l2_norm softmax_type glu_linear_offset activation_func_clamp_value rotary_interleaved window_size window_attn_skip_freq no_rope_freq
    multi_latent_attention attention_output_gate experimental_attention_variant mtp_num_layers is_hybrid_model init_method_std
    transformer_impl params_dtype bf16 fp16 tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size sequence_parallel
    moe_aux_loss_coeff moe_apply_probs_on_input moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
    moe_ffn_hidden_size moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms moe_input_jitter_eps moe_latent_size moe_layer_freq
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype
    moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_fusion moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax moe_router_score_function
    moe_router_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping moe_use_legacy_grouped_gemm moe_z_loss_coeff
"""
"""Settings of a model that Megatron-LM has arguments of the same names for."""


@dataclass(frozen=True)
class Run:
    """A training run of Megatron-LM: what its arguments say."""

    model: Path
    """A HuggingFace folder with the configuration and the first weights."""
    tp: int = 1
    pp: int = 1
    sharding: str | None = None
    """One of SHARDINGS, by Megatron's name. None is a run without the distributed optimizer."""
    ep: int = 1
    """Data ranks that divide the experts among them. With more than one, experts have an optimizer of their own."""
    etp: int = 1
    """Tensor ranks that share an expert: 1 or tp. With tp 2 models of experts compute and save, and cannot be trained on CPUs."""
    layer_freq: int | list[int] = 1
    """``--moe-layer-freq``: with a list each layer has tensors of its own in checkpoints."""
    own_norm_key: bool = True
    """The norm before experts is saved as by TransformerEngine's modules; if not, as local modules save it, under the name that it has in a
    dense layer."""
    singleton: bool = False
    """Each expert, and each half of ``linear_fc1``, is saved under a key of its own."""
    bf16: bool = False
    lr: float = 1e-3
    min_lr: float = 1e-4
    train_iters: int = 10
    """Steps of the cosine decay."""
    warmup_iters: int = 0
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    micro_batch_size: int = 1
    global_batch_size: int = 2
    seq_length: int = 32
    make_vocab_size_divisible_by: int = 128
    """Times tp. Megatron's loss counts the padding as tokens that might have come, ours does not: without padding they agree."""
    seed: int = 1234


def options_of(run: Run, data: str, **others: Any) -> dict[str, Any]:
    """The same run here."""
    return {
        "data_path": data, "split": "100,0,0", "seq_length": run.seq_length, "micro_batch_size": run.micro_batch_size,
        "global_batch_size": run.global_batch_size, "train_iters": run.train_iters, "lr": run.lr, "min_lr": run.min_lr,
        "lr_decay_style": "cosine", "weight_decay": run.weight_decay, "adam_beta1": run.adam_betas[0], "adam_beta2": run.adam_betas[1],
        "clip_grad": run.clip_grad, "log_interval": 1, **others,
    }


@contextmanager
def megatron(place: Place, run: Run) -> Iterator[Trainer]:
    """Megatron-Core with its process groups and one model, for as long as the section lasts."""
    with mock.patch("torch.compile", lambda function: function):  # it would take longer than all that is computed here
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator, unset_num_microbatches_calculator
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    alone = not dist.is_initialized()
    with ExitStack() as section:
        if alone:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            section.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel(
            run.tp, run.pp, expert_model_parallel_size=run.ep, expert_tensor_parallel_size=run.etp, create_gloo_process_groups=True
        )
        section.callback(parallel_state.destroy_model_parallel)
        dp = parallel_state.get_data_parallel_world_size()
        init_num_microbatches_calculator(place.rank, None, run.global_batch_size, run.micro_batch_size, dp, False)
        section.callback(unset_num_microbatches_calculator)
        for name, value in _GPU.items():
            section.enter_context(mock.patch(name, value))
        # The router asks for TransformerEngine's product by a name that is not there without it.
        section.enter_context(mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True))
        section.enter_context(_OnCpu())
        model_parallel_cuda_manual_seed(run.seed)
        yield Trainer(run)


class _OnCpu(TorchFunctionMode):
    """Whoever asks for a tensor on the GPU gets one here, and tensors say that they are on a GPU where Megatron insists on it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        answer = function(*args, **kwargs)
        if function is Tensor.type and len(args) == 1:  # a name, which Megatron compares with those of its dtypes
            return answer.replace("torch.", "torch.cuda.")
        return answer


_GPU = {
    "torch.cuda.current_device": lambda: "cpu",
    "torch.cuda.synchronize": lambda: None,
    "torch.cuda.get_rng_state": torch.get_rng_state,
    "torch.cuda.random.get_rng_state": lambda device="cuda": torch.get_rng_state(),
}


class Trainer:
    """What Megatron-LM's ``pretrain_gpt.py`` sets up: model, optimizer, learning rates."""

    def __init__(self, run: Run) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        self.run = run
        self.iteration = 0
        self.hf = json.loads((run.model / "config.json").read_text())
        self.config = _transformer_config(run, self.hf)
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.model = GPTModel(
            self.config,
            _layers(run, self.config),
            vocab_size=self.vocab_size,
            max_sequence_length=self.hf["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=_rope_theta(self.hf),
            share_embeddings_and_output_weights=self.hf["tie_word_embeddings"],
        )
        self.fill(_weights(run.model))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=run.bf16, use_distributed_optimizer=run.sharding is not None)
        inner = Float16Module(self.config, self.model) if run.bf16 else self.model
        self.wrapped = DistributedDataParallel(self.config, ddp, inner)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=run.lr,
            min_lr=run.min_lr,
            weight_decay=run.weight_decay,
            adam_beta1=run.adam_betas[0],
            adam_beta2=run.adam_betas[1],
            adam_eps=run.adam_eps,
            clip_grad=run.clip_grad,
            bf16=run.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=run.sharding is not None,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.wrapped])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=run.lr,
            min_lr=run.min_lr,
            lr_warmup_steps=run.warmup_iters * run.global_batch_size,
            lr_decay_steps=run.train_iters * run.global_batch_size,
            lr_decay_style="cosine",
            start_wd=run.weight_decay,
            end_wd=run.weight_decay,
            wd_incr_steps=run.train_iters * run.global_batch_size,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,  # as by default: a checkpoint with another schedule is refused
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding, padding included."""
        multiple = self.run.make_vocab_size_divisible_by * self.run.tp
        return -(-int(self.hf["vocab_size"]) // multiple) * multiple

    @cached_property
    def names(self) -> dict[Any, str]:
        """This rank's parameters, and their names with the layers counted over all stages."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, number, leaf = name.split(".", 3)
                layer = self.model.decoder.layers[int(number)]
                if "local_experts" in leaf:
                    front, _, own, end = re.split(r"\.(local_experts)\.(\d+)\.", leaf)
                    leaf = f"{front}.local_experts.{layer.mlp.local_expert_indices[int(own)]}.{end}"
                name = f"decoder.layers.{layer.layer_number - 1}.{leaf}"
            found[parameter] = name
        return found

    def fill(self, hf: dict[str, Tensor]) -> None:
        """Give the model weights, which have their HuggingFace names and sizes."""
        for parameter, name in self.names.items():
            with torch.no_grad():
                whole = _from_hf(name, hf, self.hf, self.vocab_size)
                parameter.copy_(_split(name, whole, self.run)[self.tp_rank])

    def train(self, samples: Sequence[Tensor]) -> list[float]:
        """Take one step for each of ``samples``, [global batch, sequence + 1] of token ids that each data rank has all of, and return the
        losses."""
        return [self._step(batch) for batch in samples]

    def _step(self, batch: Tensor) -> float:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        assert batch.shape == (self.run.global_batch_size, self.run.seq_length + 1)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        # The sampler of Megatron-LM deals micro-batches to the data ranks in turn.
        micro = batch.split(self.run.micro_batch_size)[rank::dp]
        found = self._pipeline(micro, get_num_microbatches(), forward_only=False)
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        self.scheduler.step(increment=self.run.global_batch_size)
        self.iteration += 1
        loss = torch.stack(found).mean() if found else torch.zeros(())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        return float(loss / dp)

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits of ``ids``, [batch, sequence], in fp32 and without padding: [batch, sequence, vocabulary] on the ranks of the
        last stage, None on others."""
        with torch.no_grad():
            found = self._pipeline([F.pad(ids, (0, 1))], 1, forward_only=True, labels=False)
        return found[0] if found else None

    def _pipeline(self, micro: Sequence[Tensor], count: int, *, forward_only: bool, labels: bool = True) -> list[Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        def forward(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            tokens = next(data)
            positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
            out = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:] if labels else None)
            return out, finish

        def finish(out: Tensor) -> tuple[Tensor, Tensor]:
            if labels:
                mean = out.float().mean()
                return mean, mean.detach().clone()
            whole = gather_from_tensor_model_parallel_region(out)[..., : self.hf["vocab_size"]]
            return out.sum(), whole.float()

        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(micro), model=self.wrapped, num_microbatches=count,
            seq_length=micro[0].shape[1] - 1, micro_batch_size=len(micro[0]), forward_only=forward_only,
        )
        return found

    def tensors(self, what: str) -> dict[str, Tensor]:
        """Return what all ranks hold, whole tensors by their HuggingFace names, on rank 0 (nothing on others). ``what`` is ``weight``,
        ``master``, ``exp_avg`` or ``exp_avg_sq``."""
        own = [
            (name, self.tp_rank, parameter.shape, start, values.detach().clone())
            for parameter, name in self.names.items()
            for start, values in self._held(parameter, what)
        ]
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, own)
        if dist.get_rank() != 0:
            return {}
        pieces: dict[str, dict[int, Tensor]] = {}
        for name, tp_rank, shape, start, values in (each for held in everybodys for each in held):
            piece = pieces.setdefault(name, {}).setdefault(tp_rank, torch.full(shape, torch.nan, dtype=values.dtype))
            piece.view(-1)[start : start + len(values)] = values
        wholes = {name: _join(name, [each[rank] for rank in range(self.run.tp)], self.run) for name, each in pieces.items()}
        assert not any(whole.isnan().any() for whole in wholes.values())
        return _to_hf(wholes, self.hf)

    def _held(self, parameter: Any, what: str) -> Iterator[tuple[int, Tensor]]:
        """Yield what this rank has of a parameter: where it begins in the flat parameter, and the values."""
        if what == "weight":
            yield 0, parameter.view(-1)
            return
        for optimizer in self.optimizer.chained_optimizers:
            main = getattr(parameter, "main_param", parameter)
            if self.run.sharding is None:
                if any(main is each for each in optimizer.get_parameters()):
                    yield 0, (main if what == "master" else optimizer.optimizer.state[main][what]).view(-1)
            elif any(parameter in each["param_map"] for maps in optimizer.gbuf_ranges for buckets in maps.values() for each in buckets):
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                yield optimizer._get_model_param_range_map(parameter)["param"].start, state["param" if what == "master" else what]

    def save(self, folder: Path, *, weights_only: bool = False) -> Path:
        """Write a checkpoint under ``folder`` as ``save_checkpoint`` of Megatron-LM does with ``--ckpt-format torch_dist``, and return it:
        ``iter_NNNNNNN``. ``weights_only`` is ``--no-save-optim``."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        target = folder / f"iter_{self.iteration:07d}"
        target.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] = {"singleton_local_shards": self.run.singleton, "chained_optim_avoid_prefix": True}
        if self.run.sharding is not None:
            metadata = {"distrib_optim_sharding_type": self.run.sharding, **metadata}
        if self.run.sharding == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        content = {
            "args": self._args(),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            **self._sharded({**metadata, "dp_cp_group": group}, is_loading=False, weights_only=weights_only),
            "num_floating_point_operations_so_far": 0,
        }
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
        with mock.patch("megatron.core.dist_checkpointing.strategies.filesystem_async.mp", _Threads()):
            dist_checkpointing.save(content, str(target), strategy, content_metadata=metadata)
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))
        dist.barrier()
        return target

    @torch.no_grad()
    def load(self, folder: Path, *, finetune: bool = False) -> None:
        """Load the checkpoint that the tracker under ``folder`` names as ``load_checkpoint`` of Megatron-LM does; only the weights with
        ``finetune``, or of a release. Nothing that is asked for may be missing in the file, and nothing in it be left over but random
        states, which fit no other layout, fp8 scaling of other modules, and with ``finetune`` the optimizer."""
        from megatron.core import dist_checkpointing, parallel_state

        named = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
        finetune = finetune or named == "release"
        source = str(folder / (named if named == "release" else f"iter_{int(named):07d}"))
        common = dist_checkpointing.load_common_state_dict(source)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self.run.sharding is not None and not finetune:
            self._prepare_torch_adam()
        wanted = self._sharded(metadata, is_loading=True, weights_only=finetune)
        found, left_over, missing = dist_checkpointing.load(wanted, source, strict="return_all")
        optional = ("rng_state", "optimizer.") if finetune else ("rng_state",)
        # TransformerEngine's modules have more scaling states than the local ones.
        assert not missing and [name for name in left_over if not name.startswith(optional) and "._extra_state" not in name] == []
        self.model.load_state_dict(found["model"], strict=True)
        if finetune:
            self.optimizer.reload_model_params()
        else:
            self.optimizer.load_state_dict(found["optimizer"])
            self._part_steps()
            self.scheduler.load_state_dict(found["opt_param_scheduler"])
            self.iteration = found["iteration"]

    def _prepare_torch_adam(self) -> None:
        """The distributed optimizer loads the state of Apex' and TransformerEngine's Adam, which is there from the beginning and whose step
        is an option. With torch's it looks for a step before there is one, and later among the tensors of the checkpoint."""
        for optimizer in self.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()
            optimizer._set_main_param_and_optimizer_states = partial(_set_with_step, optimizer, optimizer._set_main_param_and_optimizer_states)

    def _part_steps(self) -> None:
        """Loaded, all parameters have one step, a tensor that torch's Adam would count up for each of them."""
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()

    def _sharded(self, metadata: dict[str, Any], *, is_loading: bool, weights_only: bool = False) -> dict[str, Any]:
        """Return the state of model, optimizer, learning rates and random numbers, sharded as ``generate_state_dict`` of Megatron-LM has
        it."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        found: dict[str, Any] = {"model": self.model.sharded_state_dict(metadata=metadata)}
        if weights_only:
            return found
        found["optimizer"] = self.optimizer.sharded_state_dict(found, is_loading=is_loading, metadata=metadata)
        found["opt_param_scheduler"] = self.scheduler.state_dict()
        if not is_loading:
            state = {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
            place = parallel_state.get_pipeline_model_parallel_rank(), self.tp_rank
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            found["rng_state"] = ShardedObject("rng_state", [state], (self.run.pp, self.run.tp), place, replica_id=replica)
        return found

    def _args(self) -> Namespace:
        """Return the arguments that Megatron-LM's parser makes of this run, those of its models and of training that a checkpoint's reader
        may look at."""
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType
        from megatron.core.transformer.enums import AttnBackend

        run = self.run
        arguments = {name: getattr(self.config, name) for name in MODEL_ARGUMENTS.split()}
        arguments |= {
            "attention_backend": AttnBackend.auto,
            "num_experts": self.config.num_moe_experts,
            "swiglu": True,
            "group_query_attention": self.config.num_query_groups != self.config.num_attention_heads,
            "max_position_embeddings": self.hf["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": int(_rope_theta(self.hf)),
            "rotary_percent": 1.0,
            "rotary_seq_len_interpolation_factor": None,
            "use_rope_scaling": False,
            "rope_scaling_factor": 8.0,
            "make_vocab_size_divisible_by": run.make_vocab_size_divisible_by,
            "untie_embeddings_and_output_weights": not self.hf["tie_word_embeddings"],
            "vocab_size": self.hf["vocab_size"],
            "padded_vocab_size": self.vocab_size,
            "tokenizer_type": "HuggingFaceTokenizer",
            "seq_length": run.seq_length,
            "optimizer": "adam",
            "lr": run.lr,
            "min_lr": run.min_lr,
            "lr_decay_style": "cosine",
            "lr_decay_iters": run.train_iters,
            "lr_warmup_iters": run.warmup_iters,
            "weight_decay": run.weight_decay,
            "adam_beta1": run.adam_betas[0],
            "adam_beta2": run.adam_betas[1],
            "adam_eps": run.adam_eps,
            "clip_grad": run.clip_grad,
            "micro_batch_size": run.micro_batch_size,
            "global_batch_size": run.global_batch_size,
            "train_iters": run.train_iters,
            "train_samples": None,
            "seed": run.seed,
            "use_distributed_optimizer": run.sharding is not None,
            "ckpt_format": "torch_dist",
            "dist_ckpt_optim_fully_reshardable": run.sharding == "fully_reshardable",
            "exit_signal": signal.SIGTERM,
            "model_type": ModelType.encoder_or_decoder,
            "data_parallel_size": parallel_state.get_data_parallel_world_size(),
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "consumed_train_samples": self.iteration * run.global_batch_size,
            "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
        }
        return Namespace(**arguments)


def _set_with_step(optimizer: Any, given: Callable[..., None], parameter: Any, tensors: dict[str, Tensor]) -> None:
    step = optimizer._get_main_param_and_optimizer_states(parameter)["step"]
    given(parameter, {"step": step, **tensors})


class _Threads:
    """What Megatron asks of ``multiprocessing`` to write its files, with threads: a worker of a cluster may not start processes."""

    Process = threading.Thread
    Queue = JoinableQueue = queue.Queue

    def get_context(self, _: str) -> _Threads:
        return self

    def Manager(self) -> _Threads:
        return self


def _rope_theta(hf: dict[str, Any]) -> float:
    return float(hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"])


def _transformer_config(run: Run, hf: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if run.bf16 else torch.float32
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=run.bf16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        **(_expert_settings(run, hf) if experts_of(hf) else {}),
    )


def experts_of(hf: dict[str, Any]) -> int:
    """The number of experts that a config.json has; 0 of a dense model."""
    return int(hf.get("num_experts") or hf.get("num_local_experts") or 0)


def _expert_settings(run: Run, hf: dict[str, Any]) -> dict[str, Any]:
    """What a user of Megatron-LM gives for these models."""
    return {
        "qk_layernorm": hf["model_type"] == "qwen3_moe",
        "num_moe_experts": experts_of(hf),
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.etp,
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
        "moe_layer_freq": run.layer_freq,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def _layers(run: Run, config: Any) -> Any:
    """The modules of the layers. TransformerEngine's need a GPU; the names that they save are set here by Megatron's own means."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if config.num_moe_experts is None:
        return get_gpt_layer_local_spec(normalization="RMSNorm")
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        if run.own_norm_key and "fuse_pre_mlp_layernorm" in layer.submodules.mlp.metainfo:
            kept = {key: name for key, name in layer.submodules.sharded_state_dict_keys_map.items() if key != "pre_mlp_layernorm."}
            layer.submodules.sharded_state_dict_keys_map = kept
    return block


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


def _expert_names(leaf: str, config: dict[str, Any]) -> list[str]:
    """Of a router or an expert's matrix: the tensors of HuggingFace that it stacks; of others none."""
    mixtral = config["model_type"] == "mixtral"
    owner = "block_sparse_moe" if mixtral else "mlp"
    if leaf == "mlp.router.weight":
        return [f"{owner}.gate.weight"]
    found = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight", leaf)
    if not found:
        return []
    kinds = {"fc1": ("w1", "w3"), "fc2": ("w2",)} if mixtral else {"fc1": ("gate_proj", "up_proj"), "fc2": ("down_proj",)}
    return [f"{owner}.experts.{found[1]}.{kind}.weight" for kind in kinds[found[2]]]


def _from_hf(name: str, hf: dict[str, Tensor], config: dict[str, Any], rows: int) -> Tensor:
    """Return Megatron's whole tensor of this name; an embedding is padded with zeros to so many rows."""
    embedding = hf["model.embed_tokens.weight"]
    if name == "embedding.word_embeddings.weight":
        return F.pad(embedding, (0, 0, 0, rows - len(embedding)))
    if name == "output_layer.weight":
        return F.pad(hf.get("lm_head.weight", embedding), (0, 0, 0, rows - len(embedding)))
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    _, _, number, leaf = name.split(".", 3)
    layer = f"model.layers.{number}."
    if experts := _expert_names(leaf, config):
        return torch.cat([hf[layer + each] for each in experts])
    if leaf == "self_attention.linear_qkv.weight":
        groups = config["num_key_value_heads"]
        of_group = zip(*(hf[f"{layer}self_attn.{each}_proj.weight"].chunk(groups) for each in "qkv"), strict=True)
        return torch.cat([tensor for group in of_group for tensor in group])
    if leaf == "mlp.linear_fc1.weight":
        return torch.cat([hf[f"{layer}mlp.{each}_proj.weight"] for each in ("gate", "up")])
    return hf[layer + _PLAIN[leaf]]


def _to_hf(wholes: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return HuggingFace's tensors, without padding, and without a tied head."""
    found = {}
    size, groups, tied = config["vocab_size"], config["num_key_value_heads"], config["tie_word_embeddings"]
    queries = config["num_attention_heads"] // groups
    for name, whole in wholes.items():
        if name == "embedding.word_embeddings.weight":
            found["model.embed_tokens.weight"] = whole[:size]
        elif name == "output_layer.weight":
            assert not tied or torch.equal(whole, wholes["embedding.word_embeddings.weight"])
            found |= {} if tied else {"lm_head.weight": whole[:size]}
        elif name == "decoder.final_layernorm.weight":
            found["model.norm.weight"] = whole
        else:
            _, _, number, leaf = name.split(".", 3)
            layer = f"model.layers.{number}."
            if experts := _expert_names(leaf, config):
                found |= {layer + each: part for each, part in zip(experts, whole.chunk(len(experts)), strict=True)}
            elif leaf == "self_attention.linear_qkv.weight":
                by_group = whole.unflatten(0, (groups, queries + 2, -1))
                parts = by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]
                found |= {f"{layer}self_attn.{each}_proj.weight": part.flatten(0, -2) for each, part in zip("qkv", parts, strict=True)}
            elif leaf == "mlp.linear_fc1.weight":
                found |= {f"{layer}mlp.{each}_proj.weight": part for each, part in zip(("gate", "up"), whole.chunk(2), strict=True)}
            else:
                found[layer + _PLAIN[leaf]] = whole
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _split(name: str, whole: Tensor, run: Run) -> list[Tensor]:
    """Cut a tensor for the tensor ranks."""
    tp = run.tp
    if _is_whole(name, run):
        return [whole] * tp
    if name.endswith("linear_fc1.weight"):
        return [torch.cat(halves) for halves in zip(*(half.chunk(tp) for half in whole.chunk(2)), strict=True)]
    return list(whole.chunk(tp, dim=_split_dim(name)))


def _join(name: str, pieces: list[Tensor], run: Run) -> Tensor:
    """Put together what ``_split`` cut. Copies have to be equal."""
    if _is_whole(name, run):
        assert all(torch.equal(pieces[0], each) for each in pieces)
        return pieces[0]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([torch.cat(halves) for halves in zip(*(piece.chunk(2) for piece in pieces), strict=True)])
    return torch.cat(pieces, dim=_split_dim(name))


def _is_whole(name: str, run: Run) -> bool:
    """Whether every tensor rank has all of it."""
    return "layernorm" in name or ".router." in name or (".local_experts." in name and run.etp == 1)


def _split_dim(name: str) -> int:
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
