"""Reads the weights of Megatron-Core's ``torch_dist`` checkpoints; ``names`` has the places of
their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_llama.checkpoint.container import COPY_AGAIN
from megatron_llama.checkpoint.model_folders.formats import Reading
from megatron_llama.checkpoint.model_folders.model_fields import (
    MATCHING_FILES,
    OPTIMIZER_LEFT_OUT,
    read_config,
)
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_files_of
from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.args import SIZES, read_args, stored_vocab_size
from megatron_llama.converter.torch_dist.names import (
    EMBEDDING_KEY,
    HEAD_KEY,
    OPTIMIZER,
    StoredSource,
    find_weights,
    layer_count,
    model_keys,
)
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, UserError, describe


class TorchDistReader:
    """The weights of a checkpoint as a ModelReader."""

    def __init__(
        self,
        path: Path,
        config: str | Path | None,
        vocab_size: int,
        tokens: int = 0,
        ignored: Collection[str] = (),
    ) -> None:
        """Open the checkpoint; the arguments are those of ``open_model``. Raises CheckpointError
        with everything that is missing, unknown, contradictory or of another shape."""
        self.format = "torch_dist"
        opened = TorchDistFolder(path)
        self.checkpoint = opened
        self.folder = opened.folder
        tensors = opened.container.tensors
        self.tokenizer_files = tokenizer_files_of(
            self.folder.parent, self.folder, self.folder.parent / "tokenizer"
        )
        embedding = tensors.get(EMBEDDING_KEY)
        if embedding is None or len(embedding.shape) != 2:
            where = f"{self.folder} {EMBEDDING_KEY}"
            got = "no embedding" if embedding is None else f"shape {embedding.shape}"
            raise CheckpointError(where, got=got, expected="a language model", do=MATCHING_FILES)
        self.dtype = str(embedding.dtype).removeprefix("torch.")
        # Before their shapes are used.
        opened.container.require(model_keys(tensors))
        user, self.extra = read_config(config, opened.args.get("hf_config"), ignored=ignored)
        problems = list(_contradictions(opened, user))
        refuse(f"{self.folder} does not hold the model:", problems)
        where = f"{opened.common_file} args"
        try:
            model = read_args(
                opened.args,
                user,
                tied=HEAD_KEY not in tensors,
                where=where,
                has_experts=True,
                ignored=ignored,
            )
        except UserError:
            raise
        except Exception as error:
            # Arguments of another type than Megatron's fail where they are first read.
            got = f"a value that is none ({type(error).__name__}: {error})"
            raise CheckpointError(
                where, got=got, expected="Megatron's arguments", do=COPY_AGAIN
            ) from error
        size = stored_vocab_size(
            opened.args,
            f"{self.folder}",
            embedding.shape[0],
            self.tokenizer_files,
            tp=opened.tp,
            user=user,
            given=vocab_size,
            believed=tokens,
        )
        self.model = replace(model, vocab_size=size)
        # With this padding the plan's rows are those of the files.
        padded = replace(self.model, make_vocab_size_divisible_by=embedding.shape[0])
        self.weights = find_weights(padded, opened.container)
        self._source = StoredSource(opened.container, self.weights)
        has_optimizer = any(OPTIMIZER.fullmatch(name) for name in tensors)
        self.notes = (OPTIMIZER_LEFT_OUT,) if has_optimizer else ()

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self._source(rectangle, out)


def _contradictions(opened: TorchDistFolder, user: ModelConfig | None) -> Iterator[str]:
    """Yield the contradictions between the tensors and the arguments, or the configuration
    ``user``. Sizes are compared before anything of those sizes is made."""
    tensors = opened.container.tensors
    layers = layer_count(tensors)
    hidden = tensors[EMBEDDING_KEY].shape[1]
    exact = {"num_layers": layers, "hidden_size": hidden}
    largest = max(size for name in model_keys(tensors) for size in tensors[name].shape)
    for name in (*SIZES, "num_query_groups", "kv_channels"):
        value = opened.args.get(name)
        where = f"{opened.common_file} args.{name}"
        if value is not None and (type(value) is not int or not 0 < value <= largest):
            expected = f"a number from 1 to {largest}, the largest dimension of a tensor"
            yield describe(where, got=f"{value}"[:80], expected=expected, do=MATCHING_FILES)
        elif value is not None and value != exact.get(name, value):
            expected = f"{exact[name]}, by the tensors"
            yield describe(where, got=value, expected=expected, do=MATCHING_FILES)
    if user is not None and user.num_hidden_layers != layers:
        got = f"{user.num_hidden_layers} layers in the config"
        yield describe(opened.folder, got=got, expected=layers, do=MATCHING_FILES)
    untied = opened.args.get("untie_embeddings_and_output_weights")
    if untied is not None and untied != (HEAD_KEY in tensors):
        got = "a head" if HEAD_KEY in tensors else "no head"
        expected = f"untie_embeddings_and_output_weights {untied}, as in the arguments"
        yield describe(f"{opened.folder} {HEAD_KEY}", got=got, expected=expected, do=MATCHING_FILES)


def opened(folder: Path, kind: str, reading: Reading) -> TorchDistReader:
    """Open a folder of Megatron-Core (an ``OpenFolder``)."""
    return TorchDistReader(folder, *reading)
