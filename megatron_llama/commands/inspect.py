"""``inspect``: what a file holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_llama.errors import ConfigError, counted, describe

OF_A_RUN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "data_parallel_size",
    "use_distributed_optimizer",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "transformer_impl",
)
"""Megatron's arguments that are shown of a checkpoint."""


def inspect(words: list[str]) -> None:
    """Run ``inspect KIND PATH``. With ``--verify`` all files of a checkpoint or a dataset are read
    and compared with their checksums. Raises UserError."""
    if not words or words[0] not in KINDS:
        found = words[0] if words else "nothing"
        raise ConfigError(
            describe(
                "inspect",
                got=found,
                expected=f"one of {', '.join(KINDS)}",
                do="write inspect KIND PATH",
            )
        )
    kind, *paths = words
    if verify := kind in VERIFIED and "--verify" in paths:
        paths.remove("--verify")
    flags = [word for word in paths if word.startswith("--")]
    if flags:
        raise ConfigError(
            describe(
                f"inspect {kind}",
                got=" ".join(flags),
                expected="--verify at most, with a checkpoint or a dataset",
                do="leave it out",
            )
        )
    if len(paths) != (kind != "presets"):
        expected, usage = (
            ("no path", "inspect presets")
            if kind == "presets"
            else ("one path", f"inspect {kind} PATH")
        )
        raise ConfigError(
            describe(
                f"inspect {kind}",
                got=" ".join(paths) or "nothing",
                expected=expected,
                do=f"write {usage}",
            )
        )
    if verify:
        VERIFIED[kind](*paths)
    KINDS[kind](*paths)


def _rows(rows: Mapping[str, object]) -> None:
    width = max([26, *(len(name) + 2 for name in rows)])
    for name, value in rows.items():
        print(f"{name:<{width}}{value}")


def _config(path: str) -> None:
    """A YAML file of options, or a HuggingFace config.json."""
    from megatron_llama.config.hf import read_hf_config
    from megatron_llama.plans.params import parameter_count

    if path.endswith((".yaml", ".yml")):
        from megatron_llama.commands.pretrain import SECTIONS
        from megatron_llama.config.megatron_names import MEGATRON
        from megatron_llama.config.parse import parse

        _rows(parse(["--config", path], SECTIONS, aliases=MEGATRON).differences())
        return
    model = read_hf_config(Path(path).parent if path.endswith(".json") else path)
    _rows({**vars(model), "parameters": f"{parameter_count(model):,}"})


def _checkpoint(path: str) -> None:
    from megatron_llama.checkpoint import checkpoint_dir, native
    from megatron_llama.conversion.formats import candidates
    from megatron_llama.plans.params import parameter_count

    if list(candidates(Path(path))) == ["torch_dist"]:
        _torch_dist(path)
        return
    newest = checkpoint_dir.find(path)
    meta = native.read_meta(newest)
    _rows(
        {
            "checkpoint": newest,
            "iteration": meta.state.iteration,
            "consumed_samples": meta.state.consumed_samples,
            "parameters": f"{parameter_count(meta.model):,}",
            **vars(meta.model),
        }
    )
    if meta.not_finite:
        print("[not finite]")
        _rows({entry.name: entry.place for entry in meta.not_finite})
    for section in ("parallel", "training", "optimizer", "data"):
        print(f"[{section}]")
        _rows(meta.config[section])


def _torch_dist(path: str) -> None:
    """A folder of Megatron-Core: what its arguments say of the run, and its tensors as they are
    stored."""
    from megatron_llama.conversion.torch_dist.folder import TorchDistFolder
    from megatron_llama.conversion.torch_dist.names import model_keys

    opened = TorchDistFolder(Path(path))
    args = opened.args
    tensors = opened.container.tensors
    keys = list(model_keys(tensors))
    rows: dict[str, object] = {
        "checkpoint": opened.folder,
        "format": "torch_dist",
        "iteration": opened.common.get("iteration"),
        "consumed_samples": args.get("consumed_train_samples"),
        "parameters, with padding": f"{sum(math.prod(tensors[key].shape) for key in keys):,}",
        "optimizer state": "none" if len(keys) == len(tensors) else "there",
    }
    _rows(rows | {name: args[name] for name in OF_A_RUN if args.get(name) is not None})
    print("[tensors]")
    for key in keys:
        tensor = tensors[key]
        shape = " x ".join(map(str, tensor.shape))
        print(f"{key}: {shape} {tensor.dtype}".replace("torch.", ""), end=", ")
        print(counted(len(tensor.chunks), "chunk"))


def _verify_torch_dist(path: str) -> None:
    from megatron_llama.checkpoint.storage import refuse
    from megatron_llama.conversion.torch_dist.folder import TorchDistFolder

    container = TorchDistFolder(Path(path)).container
    container.require(container.tensors)
    refuse(f"{container.folder} is damaged:", list(container.damaged()))
    chunks = sum(len(tensor.chunks) for tensor in container.tensors.values())
    print(f"verified: {chunks} chunks of {len(container.tensors)} tensors are as they were saved")


def _verify(path: str) -> None:
    from megatron_llama.checkpoint import checkpoint_dir, checksums
    from megatron_llama.checkpoint.storage import refuse
    from megatron_llama.conversion.formats import candidates

    if list(candidates(Path(path))) == ["torch_dist"]:
        _verify_torch_dist(path)
        return
    newest = checkpoint_dir.find(path)
    refuse(f"{newest} is damaged:", checksums.damaged_files(newest))
    checkpoint_dir.require_usable(newest)
    print(f"verified: {len(checksums.read_sums(newest))} files are as they were saved")


def _dataset(path: str) -> None:
    from megatron_llama.config.schema import DataConfig
    from megatron_llama.data.meta import SUMS, read_meta
    from megatron_llama.data.remote_indexed import open_dataset

    path = _prefix(path)
    dataset = open_dataset(path, DataConfig())
    lengths = dataset.lengths
    _rows(
        {
            "documents": f"{dataset.num_documents:,}",
            "tokens": f"{dataset.num_tokens:,}",
            "sequence lengths": f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}",
            **{
                name: value
                for name, value in (read_meta(path) or {}).items()
                if name not in ("documents", "tokens", "fingerprint", SUMS)
            },
        }
    )


def _prefix(path: str) -> str:
    """Return the prefix of a dataset. A shell completes the name of a file, not the prefix of
    two."""
    named = path.endswith((".bin", ".idx")) and not Path(f"{path}.idx").exists()
    return path[:-4] if named else path


def _verify_dataset(path: str) -> None:
    from megatron_llama.data.verification import verify_dataset

    sums = verify_dataset(_prefix(path))
    size = sum(file.size for file in sums.by_suffix().values())
    print(f"verified: {size:,} bytes of {_prefix(path)}.bin and .idx are as they were written")


def _presets() -> None:
    from megatron_llama.config.presets import PRESETS
    from megatron_llama.plans.params import parameter_count

    for name, model in PRESETS.items():
        heads = f"{model.num_attention_heads}/{model.num_key_value_heads}"
        shape = (
            f"{model.num_hidden_layers} layers, hidden {model.hidden_size}, heads {heads}, "
            f"vocabulary {model.vocab_size}"
        )
        print(f"{name:<16}{parameter_count(model):>18,}  {shape}")


KINDS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"config": _config, "checkpoint": _checkpoint, "dataset": _dataset, "presets": _presets}
)
VERIFIED: Mapping[str, Callable[[str], None]] = MappingProxyType(
    {"checkpoint": _verify, "dataset": _verify_dataset}
)
"""What ``--verify`` does, by kind."""
