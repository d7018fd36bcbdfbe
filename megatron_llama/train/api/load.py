"""A model folder of any format, as tensors or as a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import ModelReader
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import ConfigError
from megatron_llama.model.llama import Stage
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.train.api.common.hub import local_folder
from megatron_llama.train.api.common.trained import Trained, load_stage, load_trained, open_reader

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMS = ("state_dict", "stage", "trained")


@overload
def load(
    path: str | Path,
    form: Literal["state_dict"] = "state_dict",
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    hf_config: str | Path | None = None,
    vocab_size: int = 0,
    ignore_hf_config_fields: Sequence[str] = (),
) -> dict[str, Tensor]: ...


@overload
def load(
    path: str | Path,
    form: Literal["stage"],
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    hf_config: str | Path | None = None,
    vocab_size: int = 0,
    ignore_hf_config_fields: Sequence[str] = (),
) -> Stage: ...


@overload
def load(
    path: str | Path,
    form: Literal["trained"],
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    tokenizer_model: str | Path | None = None,
    hf_config: str | Path | None = None,
    vocab_size: int = 0,
    ignore_hf_config_fields: Sequence[str] = (),
) -> Trained: ...


def load(
    path: str | Path,
    form: Literal["state_dict", "stage", "trained"] = "state_dict",
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    tokenizer_model: str | Path | None = None,
    hf_config: str | Path | None = None,
    vocab_size: int = 0,
    ignore_hf_config_fields: Sequence[str] = (),
) -> dict[str, Tensor] | Stage | Trained:
    """Read a model folder of any format: checkpoints of a run (the newest complete one, in any
    layout, with low-rank additions added to the weights), HuggingFace, Megatron, Meta. A path that
    is not there and looks like ``org/name`` or ``org/name@revision`` is looked up on the hub. It
    works in one process.

    ``form`` says what is returned:

    - ``"state_dict"``: a dict of tensors with the names and shapes of HuggingFace, on the host
      unless ``device`` is given. A head that is tied to the embedding is not in it.
    - ``"stage"``: the model as an ``nn.Module`` without gradients, on ``device``, by default the
      first GPU, or the host without one. ``stage(ids, stage.positions(s, ids.device))`` takes token
      ids [s, b] and returns logits [s, b, v], v being the vocabulary padded to a multiple of 128;
      padded columns mean nothing.
    - ``"trained"``: a Trained, which has the stage and the tokenizer, for ``generate``.
      ``tokenizer_model`` is a tokenizer's file or folder, by default the one of the model folder.

    ``dtype="auto"`` keeps the dtype of the folder; that of a checkpoint is the one in which the run
    computed, though its masters are fp32. ``hf_config``, ``vocab_size`` and
    ``ignore_hf_config_fields`` are those of ``convert``.

    ```python
    import megatron_llama as ml
    import torch

    state = ml.load("runs/small")
    print(state["model.embed_tokens.weight"].shape)

    stage = ml.load("runs/small", "stage", device="cpu")
    ids = torch.tensor([[1, 2, 3]]).t()  # [s, b]
    logits = stage(ids, stage.positions(3, ids.device))
    assert logits.shape[:2] == (3, 1)
    ```

    Raises ConfigError for arguments that cannot be used, CheckpointError for a folder that cannot
    be read, and DataError for a tokenizer that does not fit."""
    for name, value, known in (("form", form, FORMS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise ConfigError(
                name, got=value, expected=f"one of {', '.join(known)}", do="correct it"
            )
    if tokenizer_model is not None and form != "trained":
        raise ConfigError(
            "tokenizer_model",
            got=tokenizer_model,
            expected='load(path, "trained")',
            do="leave it out, or ask for that form",
        )
    path = local_folder(path, "model", "path")
    if tokenizer_model is not None:
        tokenizer_model = local_folder(tokenizer_model, "tokenizer", "tokenizer_model")
    source = open_reader(
        path, hf_config=hf_config, vocab_size=vocab_size, ignored=ignore_hf_config_fields
    )
    kept: torch.dtype = getattr(torch, source.dtype if dtype == "auto" else dtype)
    where = torch.device(device) if device is not None else None
    if form == "state_dict":
        return _state_dict(source, kept, where)
    if form == "stage":
        return load_stage(source, kept, where)
    return load_trained(source, kept, where, tokenizer_model)


def _state_dict(
    source: ModelReader, dtype: torch.dtype, device: torch.device | None
) -> dict[str, Tensor]:
    state = {}
    for name, shape in hf_shapes(source.model).items():
        tensor = torch.empty(shape, dtype=dtype)
        source(Rectangle(name, shape, (0,) * len(shape), shape, 0), tensor)
        state[name] = tensor if device is None else tensor.to(device)
    return state
