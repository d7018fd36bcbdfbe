"""The marks by which other libraries know a module whose parameters are sharded."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

MARKS = MappingProxyType({"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True})
"""Attributes that torch's ``fully_shard`` sets. transformers asks for the first: then all ranks run
each layer of wav2vec2 that some rank would drop, and ``generate`` goes on until all ranks have
ended. torch.compile asks for both."""


class Marks:
    """The marks of a model and of all modules below it."""

    def __init__(self, model: nn.Module, *, marked: bool) -> None:
        """Set them, if ``marked``: only where a pass on one rank needs the others."""
        # Not what somebody else has set, and takes away.
        self._modules = [
            module
            for module in (model.modules() if marked else ())
            if MARKS.keys().isdisjoint(vars(module))
        ]
        self.attach()

    def attach(self) -> None:
        """Let the modules have the marks."""
        for module in self._modules:
            # Past ``nn.Module.__setattr__``, and so past any that a user's class has.
            vars(module).update(MARKS)

    def detach(self) -> None:
        """Take the marks away, until ``attach``: parameters are whole, or the engine has ended."""
        for module in self._modules:
            for name in MARKS:
                vars(module).pop(name, None)
