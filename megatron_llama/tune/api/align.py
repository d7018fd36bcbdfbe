"""Preference tuning, from options to the state in which the run ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron_llama.config.parse import Parsed
from megatron_llama.launch.join import this_place
from megatron_llama.launch.launcher import Place
from megatron_llama.train.api.common.options import Options, read_options
from megatron_llama.train.api.train import SECTIONS as TRAINING
from megatron_llama.train.api.train import run_and_leave, run_training, set_up
from megatron_llama.train.run.callbacks import Callback
from megatron_llama.train.run.result import TrainResult, untrained
from megatron_llama.train.setup.deciders import SAMPLES, ready_of
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.inputs import PairInputs
from megatron_llama.tune.preference.option_problems import valid_options
from megatron_llama.tune.sft.sft_config import SFTConfig

SECTIONS = (AlignConfig, SFTConfig, *TRAINING)
"""The options of a run."""


def align(
    config: Options = None, callbacks: Sequence[Callback] = (), **options: object
) -> TrainResult:
    """Tune a model on preferences, or train a reward model, as ``python -m megatron_llama align``
    does. Processes, options and errors are those of ``train``, with the options of
    [align.md](align.md) beside them; there is no ``data_path``. Collective.

    ``Step.numbers``, ``Run.validation_numbers`` and the ``numbers`` of the result are rewards,
    margins, accuracies and log-probabilities, under TRL's names.

    ```python
    import json

    import megatron_llama as ml

    with open("data/pairs.jsonl", "w") as file:
        for word, opposite in (("import", "export"), ("return", "yield"), ("class", "def")):
            pair = {
                "prompt": f"Name the statement {word}.",
                "chosen": f"The {word} statement.",
                "rejected": f"The {opposite} statement.",
            }
            print(json.dumps(pair), file=file)

    result = ml.align(
        method="dpo",
        train_data=["data/pairs.jsonl"],
        load="runs/small",
        finetune=True,  # begin anew with its weights, which are the reference, too
        split="100,0,0",
        chat_template="plain",
        seq_length=64,
        global_batch_size=3,
        train_iters=10,
        lr=1e-3,
        save="runs/small-dpo",
    )
    print(result.loss, result.numbers["rewards/margins"])
    assert result.numbers["rewards/accuracies"] == 1.0
    ```

    Raises what ``train`` raises."""
    parsed = valid_options(read_options(config, options, SECTIONS))
    return run_and_leave(lambda: run_alignment(parsed, callbacks=callbacks))


def run_alignment(
    parsed: Parsed, *, callbacks: Sequence[Callback] = (), place: Place | None = None
) -> TrainResult:
    """Train on the preferences that valid options name, or only write the reference's scores.
    ``place``: the place of this process, by default from the environment. Collective. Raises
    UserError."""
    pairs = PairInputs()
    if parsed.get(AlignConfig).only_reference_scores:
        place = place or this_place()
        deciders = (*pairs.deciders, *SAMPLES)
        with set_up(parsed, place, deciders, needs_data=False) as (draft, mesh):
            return untrained(pairs.complete(parsed, ready_of(draft), mesh))
    return run_training(
        parsed,
        pairs.deciders,
        callbacks=callbacks,
        needs_data=False,
        place=place,
        complete=partial(pairs.complete, parsed),
    )
