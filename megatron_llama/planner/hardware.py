"""GPUs and how they are wired: peaks, memory, speeds of memory and links, from data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

from megatron_llama.errors import ConfigError, describe

MIB = 2**20
TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """One device and the node it usually stands in. Rates are per GPU and per second, links in one
    direction."""

    name: str
    family: str
    """Whose kernels it runs: ``v100``, ``a100``, ``h100`` or ``b200``; ``own``: those that ``plan
    calibrate`` has measured."""
    peak: float
    """Dense FLOP/s in bfloat16 (V100: float16)."""
    memory: int
    """Bytes that the driver reports."""
    hbm: float
    nvlink: float
    nic: float
    """Of a common machine; ``--nic-gbit`` replaces it."""
    node: int = 8
    """GPUs in a node."""
    domain: int = 8
    """GPUs that NVLink joins: a node, or a rack."""
    fp8: float = 1.0
    """Dense FLOP/s in 8-bit floats as a multiple of ``peak``; 1: none."""
    fp4: float = 1.0
    """The same in 4-bit floats."""
    power: float = 1.0
    """Sustained clock beside the usual variant of the family, where a lower power limit is
    known."""
    source: str = ""
    single: float = 1 / 16
    """Dense FLOP/s in float32 as a share of ``peak``."""
    pcie: float = 10e9
    """Between device and host, in each direction."""
    host: float = 10e9
    """Of the host's memory, of what a node has an equal part for each GPU."""
    host_memory: int = 0
    """Bytes, the same part; 0: the device is the host, and there is nowhere else to go."""


_A100 = "NVIDIA A100 data sheet (2021)"
_H100 = "NVIDIA H100 data sheet (2023)"
_B200 = "NVIDIA DGX B200, GB200 and GB300 NVL72 data sheets (2025)"

_HOSTS: Mapping[str, tuple[float, float, int]] = MappingProxyType(
    {
        # DGX-1 (4 channels of DDR4-2400 a socket, PCIe 3), DGX A100 (8 of DDR4-3200, PCIe 4),
        # DGX H100 (8 of DDR5-4800, PCIe 5), DGX B200 (8 of DDR5-5600, PCIe 5).
        "v100": (16e9, 19e9, 64 << 30),
        "a100": (32e9, 51e9, 256 << 30),
        "h100": (64e9, 77e9, 256 << 30),
        "b200": (64e9, 90e9, 256 << 30),
        # A Grace for two GPUs, NVLink-C2C between them.
        "grace": (225e9, 256e9, 240 << 30),
    }
)
"""``pcie``, ``host`` and ``host_memory`` of the vendor's own machines, by family."""


def _in_its_machine(gpu: Gpu) -> Gpu:
    pcie, host, memory = _HOSTS["grace" if gpu.domain > gpu.node else gpu.family]
    return replace(gpu, pcie=pcie, host=host, host_memory=memory)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: _in_its_machine(gpu)
        for gpu in (
            Gpu(
                "v100-16",
                "v100",
                125 * TERA,
                16160 * MIB,
                0.9e12,
                150e9,
                12.5e9,
                source="NVIDIA V100 data sheet (2020)",
            ),
            Gpu(
                "v100",
                "v100",
                125 * TERA,
                32510 * MIB,
                0.9e12,
                150e9,
                12.5e9,
                source="NVIDIA V100 data sheet (2020)",
            ),
            Gpu("a100-40", "a100", 312 * TERA, 40960 * MIB, 1.555e12, 300e9, 12.5e9, source=_A100),
            Gpu("a100", "a100", 312 * TERA, 81920 * MIB, 2.039e12, 300e9, 12.5e9, source=_A100),
            Gpu(
                "h100", "h100", 989 * TERA, 81559 * MIB, 3.35e12, 450e9, 50e9, fp8=2.0, source=_H100
            ),
            # HBM2e and 500 W.
            Gpu(
                "h100-96",
                "h100",
                989 * TERA,
                97871 * MIB,
                2.4e12,
                450e9,
                50e9,
                fp8=2.0,
                power=0.85,
                source="torchtitan benchmarks",
            ),
            Gpu(
                "h200",
                "h100",
                989 * TERA,
                143771 * MIB,
                4.8e12,
                450e9,
                50e9,
                fp8=2.0,
                source="NVIDIA H200 data sheet (2024)",
            ),
            Gpu(
                "b200",
                "b200",
                2250 * TERA,
                183359 * MIB,
                7.7e12,
                900e9,
                50e9,
                fp8=2.0,
                fp4=4.0,
                source=_B200,
            ),
            Gpu(
                "gb200",
                "b200",
                2450 * TERA,
                189471 * MIB,
                8e12,
                900e9,
                50e9,
                node=4,
                domain=72,
                fp8=2.0,
                fp4=4.0,
                source=_B200,
            ),
            # 1.4 kW beside 1.2 kW.
            Gpu(
                "gb300",
                "b200",
                2450 * TERA,
                284208 * MIB,
                8e12,
                900e9,
                100e9,
                4,
                72,
                fp8=2.0,
                fp4=6.0,
                power=1.1,
                source=_B200,
            ),
        )
    }
)

CPU = Gpu(
    "cpu",
    "own",
    10**11,
    16 << 30,
    20e9,
    1.5e9,
    1.25e9,
    64,
    64,
    single=1.0,
    source="a core with AVX-512, gloo, 10 Gbit/s",
)
"""A process on one core of a host. Only the order of layouts is worth anything; ``plan calibrate``
measures the host at hand."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{
            "a100-80": "a100",
            "a100-80gb": "a100",
            "a100-40gb": "a100-40",
            "a800": "a100",
            "a800-80gb": "a100",
        },
        **{
            "h100-80gb": "h100",
            "h100-80": "h100",
            "h800": "h100",
            "h100-96gb-hbm2e-500w": "h100-96",
            "h200-141gb": "h200",
        },
        **{"b200-180gb": "b200", "gb200-186gb": "gb200", "gb300-288gb": "gb300"},
        **{"v100-32gb": "v100", "v100-32": "v100", "v100-16gb": "v100-16"},
    }
)
"""Other spellings; the Chinese variants differ in NVLink only."""


def gpu_named(name: str) -> Gpu:
    """A GPU by any of its names. Raises ConfigError with the nearest known name."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    if key == CPU.name:
        return CPU
    if key in GPUS:
        return GPUS[key]
    near = get_close_matches(key, [*GPUS, *ALIASES], 1, cutoff=0.5)
    do = f"did you mean {near[0]}?" if near else "take the nearest of these"
    raise ConfigError(describe("--gpu", got=name, expected=f"one of {', '.join(GPUS)}", do=do))


def gpu_of_device(device: str, memory: int) -> Gpu | None:
    """The GPU that torch calls so (``NVIDIA A100-SXM4-40GB``), of several the one whose memory is
    nearest; None: nobody has planned it."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    same = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    return min(same, key=lambda gpu: abs(gpu.memory - memory), default=None)
