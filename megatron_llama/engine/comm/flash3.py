"""FlashAttention 3 in the place of torch's flash attention, for a process and all its threads:
every call of torch's operators runs it, variable lengths and windows included. Imported where a run
asks for it (--attention-backend fa3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.nn.attention as torch_attention

from megatron_llama.engine.comm.device import capability, is_host, name
from megatron_llama.errors import ConfigError, describe

PACKAGE = "flash_attn_interface"
"""The module of the package flash-attn-3."""
_HOPPER = 9
"""The generation of GPUs for which it is written."""
_OTHERS = "give --attention-backend auto"


def flash3_problem(device: torch.device) -> str | None:
    """Return why this process cannot run FlashAttention 3 on a device; None if it can, as far as
    that is known before the package is loaded."""
    where = "--attention-backend fa3"
    if not hasattr(torch_attention, "activate_flash_attention_impl"):
        got = f"torch {torch.__version__}, which takes no other flash attention than its own"
        return describe(
            where, got=got, expected="torch 2.11 or later", do=f"update it, or {_OTHERS}"
        )
    if is_host(device) or capability(device)[0] != _HOPPER:
        got = "no GPU" if is_host(device) else name(device)
        return describe(where, got=got, expected="a GPU of the Hopper generation", do=_OTHERS)
    if find_spec(PACKAGE) is None:
        return describe(
            where,
            got=f"no package with {PACKAGE}",
            expected="flash-attn-3, of this torch and CUDA",
            do=f"build it from hopper/ of Dao-AILab/flash-attention, or {_OTHERS}",
        )
    return None


def activate_flash3(device: torch.device) -> None:
    """Make torch's flash attention FlashAttention 3. Raises ConfigError where it cannot run."""
    problem = flash3_problem(device)
    if problem is not None:
        raise ConfigError(problem)
    try:
        torch_attention.activate_flash_attention_impl("FA3")
    # A package that was built for another torch fails where its library is loaded.
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "--attention-backend fa3",
            got=f"a {PACKAGE} that cannot be loaded ({error})",
            expected="flash-attn-3, of this torch and CUDA",
            do=f"build it again, or {_OTHERS}",
        ) from error


@contextmanager
def flash3(device: torch.device) -> Iterator[None]:
    """Run FlashAttention 3 in a section, and then what ran before. Raises ConfigError where it
    cannot run."""
    before = flash_in_use()
    activate_flash3(device)
    try:
        yield
    finally:
        if before is None:
            torch_attention.restore_flash_attention_impl()
        else:
            torch_attention.activate_flash_attention_impl(before)


def flash_in_use() -> str | None:
    """Return the name of what stands for torch's flash attention in this process; None: nothing."""
    in_use = getattr(torch_attention, "current_flash_attention_impl", lambda: None)
    return str(in_use()) if in_use() is not None else None


def require_flash3() -> None:
    """Raise ConfigError unless this process runs FlashAttention 3: torch's own would be computed in
    its place, and nobody would know."""
    if flash_in_use() != "FA3":
        raise ConfigError(
            "--attention-backend fa3",
            got=f"{flash_in_use() or 'torch'} as the flash attention of this process",
            expected="FA3",
            do="build stages in a section of flash3(device) (engine/comm/flash3.py)",
        )
