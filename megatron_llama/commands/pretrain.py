"""``pretrain`` and ``evaluate``: from a command line to a running mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_llama.commands.options import DryRunConfig
from megatron_llama.config import CheckpointConfig, Config
from megatron_llama.errors import ConfigError, describe
from megatron_llama.manual import config_sections
from megatron_llama.options import Parsed

if TYPE_CHECKING:
    from megatron_llama.mesh import Mesh
    from megatron_llama.vocabulary import Vocabulary

SECTIONS = (*config_sections(), DryRunConfig)


def pretrain(parsed: Parsed) -> None:
    """Train from random weights, a HuggingFace folder or a checkpoint."""
    if parsed.get(DryRunConfig).dry_run != "no":
        from megatron_llama.commands.dry_run import dry_run

        dry_run(parsed)
        return
    with prepared(parsed) as (config, mesh, vocabulary):
        from megatron_llama.train import train

        train(config, mesh, eod=vocabulary.eod, tokenizer=vocabulary.tokenizer)


def evaluate(parsed: Parsed) -> None:
    """Measure loss and perplexity on the validation split of a dataset."""
    with prepared(_for_evaluation(parsed)) as (config, mesh, vocabulary):
        from megatron_llama.train import evaluate_only

        if config.training.eval_interval == 0:  # validate.check switched it off
            expected, do = "a share of documents for validation", "give --split 0,100,0 to evaluate on all of them"
            raise ConfigError(describe("--split", got=config.data.split, expected=expected, do=do))
        evaluate_only(config, mesh, eod=vocabulary.eod)


def _for_evaluation(parsed: Parsed) -> Parsed:
    """Nothing is saved, all of the validation split counts unless --eval-iters says otherwise."""
    config = Config(**{name: parsed.get(section) for name, section in zip(Config.__dataclass_fields__, config_sections(), strict=True)})
    training = replace(config.training, train_iters=1, eval_interval=1)
    if "eval_iters" not in parsed.explicit:
        training = replace(training, eval_iters=0)
    changed = {type(training): training, type(config.checkpoint): replace(config.checkpoint, save=None, save_interval=0)}
    return replace(parsed, instances={**parsed.instances, **changed})


@contextmanager
def prepared(parsed: Parsed) -> Iterator[tuple[Config, Mesh, Vocabulary]]:
    """Resolve and check the configuration, join the other processes, and print what was decided on the way."""
    from megatron_llama.comm.agreement import together
    from megatron_llama.mesh import init_mesh, place_from_environment
    from megatron_llama.setup import find_start, trained_model
    from megatron_llama.validate import assemble, check
    from megatron_llama.vocabulary import find_vocabulary, with_vocabulary

    place = place_from_environment()
    options = parsed.get(CheckpointConfig)
    trained = trained_model(options.load)
    if trained is None and options.load is not None:
        find_start(options)  # raises where a checkpoint is missing: better than asking for the model fields that it has
    config = assemble(parsed, trained=trained)
    resolved = check(config, place.world_size, needs_data=True)
    mesh = init_mesh(resolved.config.parallel, place)
    with together(mesh.world):
        vocabulary = find_vocabulary(resolved.config)
        config = with_vocabulary(resolved.config, vocabulary)
    if mesh.rank == 0:
        for line in (*resolved.notes, *(f"warning: {text}" for text in resolved.warnings)):
            print(f" {line}", flush=True)
    yield config, mesh, vocabulary
