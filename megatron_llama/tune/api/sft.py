"""Instruction tuning, from options to the state in which the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.train.api.common.options import Options, read_options
from megatron_llama.train.api.train import SECTIONS as TRAINING
from megatron_llama.train.api.train import run_and_leave, run_training
from megatron_llama.train.run.callbacks import Callback
from megatron_llama.train.run.result import TrainResult
from megatron_llama.tune.sft.inputs import EXAMPLES
from megatron_llama.tune.sft.option_problems import require_valid
from megatron_llama.tune.sft.sft_config import SFTConfig

SECTIONS = (SFTConfig, *TRAINING)
"""The options of a run."""


def sft(
    config: Options = None, callbacks: Sequence[Callback] = (), **options: object
) -> TrainResult:
    """Tune a model on conversations, as ``python -m megatron_llama sft`` does. Processes, options
    and errors are those of ``train``, with the options of [sft.md](sft.md) beside them; there is no
    ``data_path``. Collective.

    ```python
    import json

    import megatron_llama as ml

    with open("data/talks.jsonl", "w") as file:
        for word in ("import", "return", "class"):
            question = {"role": "user", "content": f"Name the statement {word}."}
            answer = {"role": "assistant", "content": f"The {word} statement."}
            print(json.dumps({"messages": [question, answer]}), file=file)

    result = ml.sft(
        train_data=["data/talks.jsonl"],
        load="runs/small",
        finetune=True,  # begin anew with its weights
        split="100,0,0",
        chat_template="plain",
        seq_length=64,
        global_batch_size=3,
        train_iters=10,
        lr=1e-3,
        save="runs/small-sft",
    )
    print(result.loss, result.checkpoint)
    ```

    Raises what ``train`` raises."""
    parsed = read_options(config, options, SECTIONS)
    require_valid(parsed)
    return run_and_leave(
        lambda: run_training(parsed, EXAMPLES, callbacks=callbacks, needs_data=False)
    )
