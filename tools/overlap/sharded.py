"""The user's module under ``megatron_llama.shard``."""

from __future__ import annotations

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import megatron_llama as ml
from megatron_llama.data.loader import Batch
from tools.overlap.catalogue import USER_BUCKET_ELEMENTS, Mode, configuration
from tools.overlap.contender import Setting
from tools.overlap.user import UserModel


class Sharded:
    """One mode."""

    def __init__(self, mode: Mode, setting: Setting) -> None:
        self._hosts = setting.hosts
        config = configuration(mode, setting.hosts, setting.experts)
        o = config.optimizer
        self._model = UserModel(config, setting.clock)
        self._engine = ml.shard(
            self._model.lm,
            units=[LlamaDecoderLayer, MixtralDecoderLayer],
            strategy=mode.strategy,
            param_slots=2 if mode.param_slots == "default" else int(mode.param_slots),
            bucket_size=USER_BUCKET_ELEMENTS,
            optimizer=ml.AdamW(
                lr=o.lr,
                betas=(o.adam_beta1, o.adam_beta2),
                eps=o.adam_eps,
                weight_decay=o.weight_decay,
            ),
            clip=o.clip_grad,
        )

    def begin(self) -> None:
        """See Contender."""
        self._engine._engine.publish()

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        loss: Tensor = self._model(batch.tokens, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._engine.step()
        return loss.detach()

    def drain(self) -> None:
        """See Contender."""
        self._engine._engine.settle()

    def payload_bytes(self) -> float:
        """See Contender. Scalars travel on the world axis."""
        total = 0.0
        for (axis, operation), traffic in self._engine.mesh.recorder.traffic.items():
            if axis != "world":
                total += traffic.bytes * (2 if operation == "all_reduce" else 1)
        return total * (self._hosts - 1) / self._hosts
