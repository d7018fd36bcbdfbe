"""Low-rank additions in the format of HuggingFace's PEFT: ``adapter_model.safetensors`` and
``adapter_config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_llama.checkpoint.adapters import MergedWeights
from megatron_llama.checkpoint.folders import new_folder, sync, write_synced
from megatron_llama.checkpoint.listed_files import seal_files
from megatron_llama.checkpoint.model_folders.formats import ModelReader
from megatron_llama.checkpoint.model_folders.hf.writer import EXPORT_FILES, require_export
from megatron_llama.checkpoint.model_folders.safetensors_file import DTYPES, write_safetensors
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.fields import Fields, shown
from megatron_llama.config.json_file import read_json_object
from megatron_llama.config.limits import LARGEST_ADAPTER_RANK, LARGEST_REAL, SMALLEST_REAL
from megatron_llama.config.model_files import require_model_file
from megatron_llama.config.schema import LoraConfig, ModelConfig
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.model.plan.lora import adapter_shapes, projections, trained_beside_adapters

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix that PEFT's wrappers put before every name."""
READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "modules_to_save")
HARMLESS = (
    # Where the adapter and its model come from, and for which task.
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    # How it was trained: additions that are merged know no dropout.
    "lora_dropout",
    "eva_config",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    # Details of switches that are checked themselves.
    "layers_pattern",
    "exclude_modules",
    "qalora_group_size",
    "ensure_weight_tying",
)
"""Fields that do not change the additions to the weights. Any other field is refused, unless it is
empty, 0 or false."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values of the additions that leave the model's own weights as they are. PEFT changes
those, too, when it reads an adapter with another start, such as ``pissa``."""
COPY = "copy the folder again from where it came from"


def write_peft(
    folder: str | Path,
    model: ModelConfig,
    lora: LoraConfig,
    source: WeightSource,
    *,
    base: str | None,
    tokenizer: Tokenizer | None = None,
    sources: Iterable[str | Path] = (),
    overwrite: bool = False,
) -> None:
    """Write a folder for ``PeftModel.from_pretrained``, in fp32. It appears whole or not at all.
    For what may be replaced see ``require_export``.

    ``source`` has the halves of the additions by name; ``base`` is the place of the model. Raises
    CheckpointError."""
    target = Path(folder).resolve()
    files = (CONFIG, *EXPORT_FILES)
    require_export(target, sources, overwrite=overwrite, files=files, config=CONFIG)
    whole = trained_beside_adapters(model)
    held = adapter_shapes(model, lora) | whole
    shapes = {PREFIX + name: shape for name, shape in held.items()}

    def by_peft_name(rectangle: Rectangle, out: Tensor) -> None:
        source(replace(rectangle, name=rectangle.name.removeprefix(PREFIX)), out)

    with new_folder(target) as fresh:
        write_safetensors(fresh / WEIGHTS, shapes, torch.float32, by_peft_name, is_export=True)
        config = json.dumps(_config(lora, base, whole), indent=2) + "\n"
        write_synced(fresh / CONFIG, config.encode())
        if tokenizer is not None:
            tokenizer.save_hf(fresh)
            for path in fresh.rglob("*"):
                sync(path)
        seal_files(fresh)


def _config(lora: LoraConfig, base: str | None, whole: Iterable[str]) -> dict[str, Any]:
    """Return PEFT's configuration. ``whole`` has the weights that are replaced, not added to."""
    alpha = lora.lora_alpha
    modules = [name.removesuffix(".weight") for name in whole]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if modules else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.lora_target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": modules or None,
        "use_dora": False,
        "use_rslora": False,
    }


class PeftAdapter:
    """The additions in a folder of PEFT: a WeightSource of their halves, memory-mapped."""

    def __init__(self, folder: str | Path, model: ModelConfig) -> None:
        """Open the folder. ``model`` is the one that the additions belong to. Raises
        CheckpointError with all that does not fit."""
        self.folder = Path(folder)
        config = read_json_object(self.folder / CONFIG, do=COPY)
        known = projections(model)
        whole = trained_beside_adapters(model)
        problems = list(_config_problems(self.folder / CONFIG, config, known, whole))
        refuse(f"{self.folder} cannot be merged:", problems)
        rank: int = config["r"]
        alpha = float(config["lora_alpha"])
        targets = tuple(name for name in known if name in config["target_modules"])
        self.lora = LoraConfig(lora_rank=rank, lora_alpha=alpha, lora_target_modules=targets)
        self.scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        self.shapes = adapter_shapes(model, self.lora)
        self.whole = whole if config.get("modules_to_save") else {}
        """Weights that take the place of the model's: the score of a reward model."""
        require_model_file(self.folder / WEIGHTS, do=COPY)
        try:
            self._file = cast(Any, safe_open(self.folder / WEIGHTS, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                self.folder / WEIGHTS, got=error, expected="a safetensors file", do=COPY
            ) from error
        refuse(f"{self.folder} does not fit the model:", list(self._problems()))

    def _problems(self) -> Iterator[str]:
        names = set(self._file.keys())
        wanted = {PREFIX + name: shape for name, shape in (self.shapes | self.whole).items()}
        for name, shape in wanted.items():
            got = (
                tuple(self._file.get_slice(name).get_shape()) if name in names else "no such tensor"
            )
            if got != shape:
                do = "give the model that the adapter was trained on"
                yield describe(
                    f"{self.folder / WEIGHTS} {name}", got=got, expected=f"shape {shape}", do=do
                )
            elif (dtype := self._file.get_slice(name).get_dtype()) not in DTYPES.values():
                expected = " or ".join(DTYPES.values())
                yield describe(
                    f"{self.folder / WEIGHTS} {name}", got=dtype, expected=expected, do=COPY
                )
        for name in sorted(names - wanted.keys()):
            do = "only low-rank additions to the projections of a model can be merged"
            yield describe(
                f"{self.folder / WEIGHTS} {name}",
                got="a tensor",
                expected="none of this name",
                do=do,
            )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        window = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        out.copy_(self._file.get_slice(PREFIX + rectangle.name)[window])


def _config_problems(
    path: Path, config: Mapping[str, Any], known: tuple[str, ...], whole: Iterable[str]
) -> Iterator[str]:
    """Yield the options that cannot be merged. ``known`` are the linear layers of the model's
    blocks, ``whole`` the weights that may be replaced."""
    do = "merge it with PEFT"
    if config.get("peft_type") != "LORA":
        yield describe(f"{path} peft_type", got=config.get("peft_type"), expected="LORA", do=do)
    fields = Fields(config, path, do=COPY)
    fields.integer("r", low=1, high=LARGEST_ADAPTER_RANK)
    fields.number("lora_alpha", low=SMALLEST_REAL, high=LARGEST_REAL)
    for name in ("use_rslora", "use_dora", "fan_in_fan_out"):
        if config.get(name) is not None:
            fields.switch(name)
    for name in ("rank_pattern", "alpha_pattern"):
        fields.mapping(name, default=None, null=True)
    yield from fields.problems
    targets = config.get("target_modules")
    strange = (
        [name for name in targets if not isinstance(name, str) or name not in known]
        if isinstance(targets, list)
        else [targets]
    )
    if strange or not targets:
        yield describe(
            f"{path} target_modules", got=targets, expected=f"a list of {', '.join(known)}", do=do
        )
    if config.get("bias", "none") != "none":
        yield describe(f"{path} bias", got=config["bias"], expected="none", do=do)
    start = config.get("init_lora_weights")
    if not isinstance(start, str | bool | None) or start not in PLAIN_STARTS:
        expected = "a start that leaves the model's own weights as they are"
        yield describe(f"{path} init_lora_weights", got=start, expected=expected, do=do)
    modules = config.get("modules_to_save")
    if modules and not (isinstance(modules, list) and all(isinstance(n, str) for n in modules)):
        yield describe(
            f"{path} modules_to_save", got=shown(modules), expected="a list of names", do=COPY
        )
        modules = None
    replaced = [name.removesuffix(".weight") for name in whole]
    # PEFT names both heads that its classifiers may have.
    if modules and not (replaced and {*replaced} <= {*modules} <= {*replaced, "classifier"}):
        expected = f"{replaced}, the score of a reward model" if replaced else "nothing"
        yield describe(f"{path} modules_to_save", got=modules, expected=expected, do=do)
    for name, value in config.items():
        if value and name not in READ and name not in HARMLESS and name != "init_lora_weights":
            yield describe(f"{path} {name}", got=shown(value), expected="nothing", do=do)


@dataclass(frozen=True)
class MergedReader:
    """A model with an adapter added to it, as a ModelReader."""

    base: ModelReader
    adapter: PeftAdapter

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        if rectangle.name in self.adapter.whole:
            self.adapter(rectangle, out)
            return
        MergedWeights(self.base, self.adapter, self.adapter.shapes, self.adapter.scaling)(
            rectangle, out
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's reader."""
        return getattr(self.base, name)
