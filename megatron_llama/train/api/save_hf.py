"""A model as a HuggingFace folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_llama.checkpoint import checkpoint_dir
from megatron_llama.checkpoint.carried import NO_FILES, read_carried, read_generation
from megatron_llama.checkpoint.model_folders.export import export_adapter, export_checkpoint
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.storage_paths import local_copy
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.fingerprint import require_same_ids
from megatron_llama.data.tokenizer.load import has_tokenizer, load_tokenizer
from megatron_llama.engine.plan.specs import Rectangle, rectangles
from megatron_llama.errors import ConfigError, describe
from megatron_llama.model.hf import read_hf_config
from megatron_llama.model.llama import Stage
from megatron_llama.model.load import rank_specs
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.train.api.common.hub import local_folder
from megatron_llama.train.api.common.trained import Trained
from megatron_llama.train.api.load import DTYPES, DType


@dataclass(frozen=True)
class SavedHF:
    """The folder that ``save_hf`` has written."""

    folder: Path
    source: Path | None
    """The checkpoint that was exported; None for tensors."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: the dtype of the written weights."""
    has_tokenizer: bool
    """Whether a tokenizer is there. transformers needs one for text."""


def save_hf(
    model: str | Path | Mapping[str, Tensor] | Stage | Trained,
    output: str | Path,
    *,
    config: ModelConfig | str | Path | None = None,
    dtype: DType = "auto",
    tokenizer_model: str | Path | None = None,
    adapter: bool = False,
    overwrite: bool = False,
) -> SavedHF:
    """Write a folder for ``AutoModelForCausalLM.from_pretrained``: weights, configuration,
    tokenizer. It appears whole or not at all.

    ``model`` is the folder of a run's checkpoints (any layout; the newest complete one is read), or
    what ``load`` returns, changed or not: a state dict with HuggingFace's names and shapes, a stage
    of the whole model, or a Trained. A state dict needs its ``config``: a ModelConfig, or the
    folder of a HuggingFace ``config.json``.

    ``dtype`` is that of the written weights; ``"auto"`` means bfloat16 for a run with ``bf16`` and
    float32 for others, and that of the tensors. ``tokenizer_model`` is a tokenizer's file or
    folder, by default the one that was saved with the checkpoint, or that of the Trained.
    ``adapter`` writes the low-rank additions of a run with ``lora_rank`` alone, as HuggingFace's
    PEFT has them.
    ``overwrite`` replaces a model in ``output`` that no export has written; an earlier export is
    replaced without it.

    ```python
    import megatron_llama as ml

    ml.save_hf("runs/small", "runs/hf", dtype="float32")

    # The mean of two models of the same shape.
    small, hf = ml.load("runs/small"), ml.load("runs/hf")
    mean = {name: (small[name] + hf[name]) / 2 for name in small}
    ml.save_hf(mean, "runs/mean", config="runs/hf", tokenizer_model="runs/hf")
    ```

    Raises ConfigError for arguments that cannot be used, CheckpointError for a checkpoint that
    cannot be read or a folder that cannot be written, and DataError for a tokenizer that is not
    the model's."""
    if dtype not in DTYPES:
        raise ConfigError(
            "dtype", got=dtype, expected=f"one of {', '.join(DTYPES)}", do="correct it"
        )
    if tokenizer_model is not None:
        tokenizer_model = local_folder(tokenizer_model, "tokenizer", "tokenizer_model")
    if isinstance(model, str | Path):
        if config is not None:
            raise ConfigError(
                "config", got="one", expected="that of the checkpoint", do="leave it out"
            )
        return _export(model, output, dtype, tokenizer_model, adapter=adapter, overwrite=overwrite)
    if adapter:
        do = "give the folder of the run"
        raise ConfigError("adapter", got="tensors", expected="a checkpoint", do=do)
    chosen: Tokenizer | None = None
    if tokenizer_model is not None:
        chosen = load_tokenizer(tokenizer_model)
    elif isinstance(model, Trained):
        chosen = model.tokenizer
    if isinstance(model, Mapping):
        state = dict(model)
        if config is None:
            do = "give config=FOLDER, that of its config.json, or a ModelConfig"
            raise ConfigError("config", got="nothing", expected="that of the state dict", do=do)
        shape = config if isinstance(config, ModelConfig) else read_hf_config(config)
    else:
        stage = model.stage if isinstance(model, Trained) else model
        state = _stage_state(stage)
        shape = stage.config if config is None else _given(config)
    _require_tensors(state, shape)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    if dtype == "auto":
        written = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(DTYPES) else "float32"
    else:
        written = dtype

    def read(rectangle: Rectangle, out: Tensor) -> None:
        window = (
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        out.copy_(state[rectangle.name][tuple(window)])

    came_with = config if isinstance(config, str | Path) else None
    carried = NO_FILES if came_with is None else read_carried(came_with)
    folder = export_hf(output, shape, read, written, chosen, carried=carried, overwrite=overwrite)
    return SavedHF(folder, None, written, chosen is not None)


def _export(
    run: str | Path,
    output: str | Path,
    dtype: str,
    tokenizer_model: str | Path | None,
    *,
    adapter: bool,
    overwrite: bool,
) -> SavedHF:
    """Export the newest checkpoint of a folder, tensor by tensor."""
    path = checkpoint_dir.find(str(run))
    with local_copy(path.parent / checkpoint_dir.TOKENIZER) as saved:
        chosen = tokenizer_model or (saved if has_tokenizer(saved) else None)
        tokenizer = load_tokenizer(chosen) if chosen is not None else None
        if tokenizer is not None and chosen != saved and has_tokenizer(saved):
            do = "leave --tokenizer-model out, or give a tokenizer that only adds tokens behind"
            where = f"--tokenizer-model {chosen}"
            require_same_ids(tokenizer, load_tokenizer(saved), where=where, owner=saved, do=do)
        if adapter:
            written = export_adapter(path, output, tokenizer, overwrite=overwrite)
        else:
            written = export_checkpoint(
                path,
                output,
                dtype=dtype,
                tokenizer=tokenizer,
                generation=read_generation(saved),
                overwrite=overwrite,
            )
    return SavedHF(Path(output), path, written, tokenizer is not None)


def _given(config: ModelConfig | str | Path) -> ModelConfig:
    return config if isinstance(config, ModelConfig) else read_hf_config(config)


@torch.no_grad()
def _stage_state(stage: Stage) -> dict[str, Tensor]:
    """Return the weights of a whole model by HuggingFace's names: views where a tensor is
    contiguous in its parameter."""
    specs = rank_specs(Config(model=stage.config), stage.mesh)
    parameters = dict(stage.named_parameters())
    state: dict[str, Tensor] = {}
    for spec in specs:
        flat = parameters[spec.name].detach().flatten()
        for piece in rectangles(spec, 0, spec.numel):
            # In one process a slice of a fused parameter is a whole tensor.
            state[piece.name] = flat[piece.start : piece.start + piece.numel].view(piece.size)
    return state


def _require_tensors(state: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Raise CheckpointError unless the tensors are those of the model."""
    shapes = hf_shapes(model)
    problems = []
    for name, shape in shapes.items():
        got = f"shape {tuple(state[name].shape)}" if name in state else "no such tensor"
        if name not in state or tuple(state[name].shape) != shape:
            do = "give the config of these tensors"
            problems.append(describe(name, got=got, expected=f"shape {shape}", do=do))
    for name in state.keys() - shapes.keys():
        if name != "lm_head.weight":  # transformers names a tied head all the same
            do = "leave it out: only plain LLaMA models can be written"
            problems.append(describe(name, got="a tensor", expected="none of this name", do=do))
    refuse("The state dict does not hold the model:", problems)
