"""GPUs from data sheets: peak rates, memory, and the bandwidths of memory and links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

from megatron_llama.errors import ConfigError
from megatron_llama.metrics.flops import PEAK_FLOPS

MIB = 2**20
GBIT = 1e9 / 8
"""Bytes per second of one Gbit/s."""


@dataclass(frozen=True)
class Gpu:
    """One device and its usual node. Rates are per GPU and second. Rates of links are in one
    direction."""

    name: str
    family: str
    """Family of its kernels: ``v100``, ``a100``, ``h100`` or ``b200``; ``own`` for a device that
    ``plan calibrate`` has measured."""
    peak: float
    """Dense FLOP/s in bfloat16 (V100: float16)."""
    memory: int
    """Bytes that the driver reports."""
    hbm: float
    """Bytes per second of the device's memory."""
    nvlink: float
    nic: float
    """Bytes per second of the network in a usual machine. ``--nic-gbit`` replaces it."""
    node: int = 8
    """GPUs in a node."""
    domain: int = 8
    """GPUs joined by NVLink: those of a node or of a rack."""
    fp8: float = 1.0
    """Dense FLOP/s in 8-bit floats as a multiple of ``peak``; 1 without 8-bit floats."""
    fp4: float = 1.0
    """The same in 4-bit floats."""
    power: float = 1.0
    """Sustained clock relative to the usual variant of the family, if the power limit is known to
    differ."""
    source: str = ""
    single: float = 1 / 16
    """Dense FLOP/s in float32 as a share of ``peak``."""
    pcie: float = 10e9
    """Bytes per second between device and host, in each direction."""
    host: float = 10e9
    """Bytes per second of the host's memory, as each GPU's equal share."""
    host_memory: int = 0
    """Bytes of the host's memory, as each GPU's equal share. 0 if the device is the host itself."""

    @property
    def is_host(self) -> bool:
        """Whether the device is a host, on which no kernels of Triton run."""
        return self.host_memory == 0


_HOSTS: Mapping[str, tuple[float, float, int]] = MappingProxyType(
    {
        # DGX-1 (4 channels of DDR4-2400 a socket, PCIe 3), DGX A100 (8 of DDR4-3200, PCIe 4),
        # DGX H100 (8 of DDR5-4800, PCIe 5), DGX B200 (8 of DDR5-5600, PCIe 5).
        "v100": (16e9, 19e9, 64 << 30),
        "a100": (32e9, 51e9, 256 << 30),
        "h100": (64e9, 77e9, 256 << 30),
        "b200": (64e9, 90e9, 256 << 30),
        # A Grace CPU serves two GPUs, over NVLink-C2C.
        "grace": (225e9, 256e9, 240 << 30),
    }
)
"""``pcie``, ``host`` and ``host_memory`` of the vendor's own machines, by family of the GPU."""

_V100 = Gpu(
    "v100",
    "v100",
    peak=125e12,
    memory=32510 * MIB,
    hbm=0.9e12,
    nvlink=150e9,
    nic=12.5e9,
    source="NVIDIA V100 data sheet (2020)",
)
_A100 = Gpu(
    "a100",
    "a100",
    peak=PEAK_FLOPS["A100"],
    memory=81920 * MIB,
    hbm=2.039e12,
    nvlink=300e9,
    nic=12.5e9,
    source="NVIDIA A100 data sheet (2021)",
)
_H100 = Gpu(
    "h100",
    "h100",
    peak=PEAK_FLOPS["H100"],
    memory=81559 * MIB,
    hbm=3.35e12,
    nvlink=450e9,
    nic=50e9,
    fp8=2.0,
    source="NVIDIA H100 data sheet (2023)",
)
_H200_SOURCE = "NVIDIA H200 data sheet (2024)"
_B200 = Gpu(
    "b200",
    "b200",
    peak=PEAK_FLOPS["B200"],
    memory=183359 * MIB,
    hbm=7.7e12,
    nvlink=900e9,
    nic=50e9,
    fp8=2.0,
    fp4=4.0,
    source="NVIDIA DGX B200, GB200 and GB300 NVL72 data sheets (2025)",
)
# metrics.flops has 2,500 TFLOP/s for a GB200. The coefficients were fitted with the figure here, so
# it may only change together with a new fit.
_GB200 = replace(
    _B200, name="gb200", peak=2450e12, memory=189471 * MIB, hbm=8e12, node=4, domain=72
)
_ALL = (
    replace(_V100, name="v100-16", memory=16160 * MIB),
    _V100,
    replace(_A100, name="a100-40", memory=40960 * MIB, hbm=1.555e12),
    _A100,
    _H100,
    # This variant has HBM2e and a power limit of 500 W.
    replace(
        _H100,
        name="h100-96",
        memory=97871 * MIB,
        hbm=2.4e12,
        power=0.85,
        source="torchtitan benchmarks",
    ),
    replace(_H100, name="h200", memory=143771 * MIB, hbm=4.8e12, source=_H200_SOURCE),
    _B200,
    _GB200,
    # A GB300 may take 1.4 kW, a GB200 1.2 kW.
    replace(_GB200, name="gb300", memory=284208 * MIB, nic=100e9, fp4=6.0, power=1.1),
)


def _with_host(gpu: Gpu) -> Gpu:
    pcie, host, host_memory = _HOSTS["grace" if gpu.domain > gpu.node else gpu.family]
    return replace(gpu, pcie=pcie, host=host, host_memory=host_memory)


GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: _with_host(gpu) for gpu in _ALL})

CPU = Gpu(
    "cpu",
    "own",
    peak=1e11,
    memory=16 << 30,
    hbm=20e9,
    nvlink=1.5e9,
    nic=1.25e9,
    node=64,
    domain=64,
    single=1.0,
    source="a core with AVX-512, gloo, 10 Gbit/s",
)
"""A process on one core of a host. With these rates only the order of layouts is meaningful. ``plan
calibrate`` measures a real host."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("v100-32gb", "v100-32"), "v100"),
        "v100-16gb": "v100-16",
        **dict.fromkeys(("a100-80", "a100-80gb", "a800", "a800-80gb"), "a100"),
        "a100-40gb": "a100-40",
        **dict.fromkeys(("h100-80gb", "h100-80", "h800"), "h100"),
        "h100-96gb-hbm2e-500w": "h100-96",
        "h200-141gb": "h200",
        "b200-180gb": "b200",
        "gb200-186gb": "gb200",
        "gb300-288gb": "gb300",
    }
)
"""Other spellings of names. The Chinese variants (A800, H800) differ in NVLink only."""


def gpu_named(name: str) -> Gpu:
    """Return a GPU by any of its names. Raises ConfigError with the nearest known name."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    if key == CPU.name:
        return CPU
    if key in GPUS:
        return GPUS[key]
    near = get_close_matches(key, [*GPUS, *ALIASES], 1, cutoff=0.5)
    do = f"did you mean {near[0]}?" if near else "take the nearest of these"
    raise ConfigError("--gpu", got=name, expected=f"one of {', '.join(GPUS)}", do=do)


def gpu_of_device(device: str, memory: int) -> Gpu | None:
    """Return the GPU that torch calls ``device``, for example ``NVIDIA A100-SXM4-40GB``. Among
    variants, ``memory`` chooses the nearest. None if the planner does not know the GPU."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    same = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    return min(same, key=lambda gpu: abs(gpu.memory - memory), default=None)
