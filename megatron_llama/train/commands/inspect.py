"""``inspect``: the content of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_llama.errors import ConfigError, describe
from megatron_llama.hooks import Format, formats
from megatron_llama.registry import imported


def inspect(words: list[str]) -> None:
    """Run ``inspect KIND PATH``. With ``--verify`` all files of a checkpoint or a dataset are read
    and compared with their checksums. Raises UserError."""
    if not words or words[0] not in KINDS:
        got = words[0] if words else "nothing"
        raise ConfigError(
            describe(
                "inspect",
                got=got,
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


def print_rows(rows: Mapping[str, object]) -> None:
    """Print names and values in two columns."""
    width = max([26, *(len(name) + 2 for name in rows)])
    for name, value in rows.items():
        print(f"{name:<{width}}{value}")


def _config(path: str) -> None:
    """Print a YAML file of options, or a HuggingFace config.json."""
    from megatron_llama.model.hf import read_hf_config
    from megatron_llama.model.plan.params import parameter_count

    if path.endswith((".yaml", ".yml")):
        from megatron_llama.config.megatron_names import MEGATRON
        from megatron_llama.config.parse import parse
        from megatron_llama.train.commands.pretrain import SECTIONS

        print_rows(parse(["--config", path], SECTIONS, aliases=MEGATRON).differences())
        return
    model = read_hf_config(Path(path).parent if path.endswith(".json") else path)
    print_rows({**vars(model), "parameters": f"{parameter_count(model):,}"})


def _foreign(path: str) -> Format | None:
    """Return the format of another program's folder."""
    from megatron_llama.checkpoint.model_folders.formats import candidates

    names = list(candidates(Path(path)))
    return formats().get(names[0]) if len(names) == 1 else None


def _checkpoint(path: str) -> None:
    from megatron_llama.checkpoint import checkpoint_dir, native
    from megatron_llama.model.plan.params import parameter_count

    if (format := _foreign(path)) is not None and format.shown:
        imported(format.shown)(path)
        return
    newest = checkpoint_dir.find(path)
    meta = native.read_meta(newest)
    print_rows(
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
        print_rows({entry.name: entry.place for entry in meta.not_finite})
    for section in ("parallel", "training", "optimizer", "data"):
        print(f"[{section}]")
        print_rows(meta.config[section])


def _verify(path: str) -> None:
    from megatron_llama.checkpoint import checkpoint_dir, checksums
    from megatron_llama.checkpoint.storage import refuse

    if (format := _foreign(path)) is not None and format.verified:
        imported(format.verified)(path)
        return
    newest = checkpoint_dir.find(path)
    refuse(f"{newest} is damaged:", checksums.damaged_files(newest))
    checkpoint_dir.require_usable(newest)
    print(f"verified: {len(checksums.read_sums(newest))} files are as they were saved")


def _dataset(path: str) -> None:
    from megatron_llama.config.schema import DataConfig
    from megatron_llama.data.datasets import open_dataset
    from megatron_llama.data.meta import SUMS, read_meta

    path = _prefix(path)
    dataset = open_dataset(path, DataConfig())
    lengths = dataset.lengths
    print_rows(
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
    from megatron_llama.model.plan.params import parameter_count
    from megatron_llama.model.presets import PRESETS

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
"""The functions of ``--verify``, by kind."""
