"""What an accelerator does in other ways for models with an engine: it clips their gradients, saves
and loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import CheckpointError
from megatron_llama.integrations.steps import EngineSteps, load_engine, save_engine

SAFETENSORS = "model.safetensors"


class Engines:
    """The engines of an accelerator, and what it does for their models in a way of its own."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._all: list[EngineSteps] = []
        self._clip_grad_norm = accelerator.clip_grad_norm_
        self._get_state_dict = accelerator.get_state_dict
        accelerator.clip_grad_norm_ = self.clip_grad_norm_
        accelerator.get_state_dict = self.get_state_dict
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def add(self, steps: EngineSteps) -> None:
        """Do so for the model of one more engine."""
        self._all.append(steps)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Stand for ``accelerator.clip_grad_norm_``."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for steps in self._all:
            if steps.owns(given):
                return steps.clip(float(max_norm), norm_type)
        norm: Tensor = self._clip_grad_norm(given, max_norm, norm_type)
        return norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Stand for ``accelerator.get_state_dict``: whole masters on rank 0, and nothing on the
        others, as with FSDP. Collective."""
        if self._engine(model) is None:
            return self._get_state_dict(model, unwrap=unwrap)
        if not unwrap:
            return {}  # only save_state asks so, and ``save`` has it all
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        # Tied weights are one tensor, as in a plain model: writers of files keep one of them.
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) in state:
                state[name] = state[first[id(parameter)]]
        return state

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save what engines have in place of their models, in ``save_state``. Collective."""
        for index in reversed(range(len(models))):
            engine = self._engine(models[index])
            if engine is not None:
                weights.pop(index)
                save_engine(engine, str(self._folder(output_dir, engine)))

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load it again, in ``load_state``, or the weights of a run without the engine.
        Collective."""
        for number, model in enumerate(list(models)):
            engine = self._engine(model)
            if engine is None:
                continue
            models[:] = [other for other in models if other is not model]
            folder = self._folder(input_dir, engine)
            if folder.is_dir():
                load_engine(engine, str(folder))
            else:
                file = Path(input_dir, f"model_{number}.safetensors" if number else SAFETENSORS)
                if not file.is_file():
                    raise CheckpointError(
                        input_dir,
                        got=f"neither {folder.name}/ nor {file.name}",
                        expected="a folder of accelerator.save_state",
                        do="save with safe_serialization=True",
                    )
                model.load_state_dict(load_file(file))

    def _engine(self, model: nn.Module) -> ModuleEngine | None:
        engines = (steps.engine for steps in self._all)
        return next((engine for engine in engines if engine.model is model), None)

    def _folder(self, root: str, engine: ModuleEngine) -> Path:
        number = next(n for n, steps in enumerate(self._all) if steps.engine is engine)
        return Path(root, f"engine_{number}" if number else "engine")
