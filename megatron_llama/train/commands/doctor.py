"""``doctor``: the abilities of this machine for a run, and what is missing for which feature."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed


def doctor(parsed: Parsed) -> int:
    """Print the page of this machine. Returns 1 if a run would meet a problem, else 0."""
    from megatron_llama.train.doctor.features import features, packages
    from megatron_llama.train.doctor.findings import examined, page, problems
    from megatron_llama.train.doctor.machine import accelerators, disk, limits, memory, processor
    from megatron_llama.train.doctor.network import network
    from megatron_llama.train.doctor.trials import trials

    sections = [
        examined("versions", packages),
        examined("processor", processor),
        examined("devices", accelerators),
        examined("memory", memory),
        examined("disk", disk),
        examined("limits (ulimit)", limits),
        examined("network", network),
        examined("trial", trials),
        examined("features", features),
    ]
    print(page(sections))
    return 1 if problems(sections) else 0
