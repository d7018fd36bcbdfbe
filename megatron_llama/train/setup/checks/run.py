"""Checks of the course of a run, whatever its model and layout: bad steps, evaluations, records."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config
from megatron_llama.errors import describe


def bad_step_problems(config: Config) -> Iterator[str]:
    """Yield options that --on-bad-step and --on-bad-checkpoint lack."""
    training = config.training
    saving = config.checkpoint
    if training.on_bad_step == "skip" and config.optimizer.clip_grad == 0 and not training.fp16:
        wanted = (
            "--clip-grad above 0: without it weights change while their gradients arrive, "
            "before a bad step is known"
        )
        yield describe(
            "--on-bad-step skip",
            got="--clip-grad 0",
            expected=wanted,
            do="give --clip-grad 1, a huge number to clip nothing",
        )
    policies = (
        ("--on-bad-step", training.on_bad_step),
        ("--on-bad-checkpoint", saving.on_bad_checkpoint),
    )
    missing = " and ".join(
        [flag(name) for name in ("save", "save_interval") if not getattr(saving, name)]
    )
    for option, policy in policies:
        if policy == "rollback" and missing:
            yield describe(
                f"{option} rollback",
                got=f"no {missing}",
                expected="checkpoints to go back to",
                do="give --save FOLDER and --save-interval N",
            )


def attention_problems(config: Config) -> Iterator[str]:
    """Yield options that --attention-backend excludes."""
    training = config.training
    backend = training.attention_backend
    # FlashAttention 3 has an argument for a fixed order, and its gradients of queries differed
    # from call to call nevertheless (Dao-AILab/flash-attention#2244).
    if training.deterministic_mode and backend in ("fused", "fa3"):
        whose = "cuDNN's attention" if backend == "fused" else "FlashAttention 3"
        yield describe(
            "--deterministic-mode",
            got=f"--attention-backend {backend}",
            expected=f"flash or auto: the backward pass of {whose} adds in any order",
            do="leave one of the two out",
        )
    if backend != "fa3":
        return
    width = config.model.head_dim
    dtype = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32 or fp64"
    if "16" not in dtype or width % 8 or width > 256:
        yield describe(
            "--attention-backend fa3",
            got=f"{dtype} and --head-dim {width}",
            expected="--bf16 or --fp16 and a head_dim of at most 256, a multiple of 8",
            do="give --attention-backend auto",
        )


def restart_problems(config: Config) -> Iterator[str]:
    """Yield options that --max-restarts-in-place lacks or excludes. ``config`` is as it was
    given."""
    if config.parallel.max_restarts_in_place <= 0:
        return
    options = config.checkpoint
    lacking = [] if config.training.global_batch_size else ["--global-batch-size"]
    lacking += [] if options.save and options.load == "auto" else ["--save with --load auto"]
    if lacking:
        yield describe(
            "--max-restarts-in-place",
            got=f"no {' and no '.join(lacking)}",
            expected="a checkpoint from which ranks begin again, and a batch that stays",
            do="give --save FOLDER --load auto --global-batch-size N",
        )
    fresh = [] if options.load_optim else ["--no-load-optim"]
    fresh += ["--finetune"] if options.finetune else []
    if fresh:
        yield describe(
            "--max-restarts-in-place",
            got=" ".join(fresh),
            expected="ranks that begin again with all of their state",
            do="leave one of them out; first weights can come from --init-from-hf",
        )


def run_problems(config: Config) -> Iterator[str]:
    """Yield problems of traces, evaluations and samples of text."""
    first = config.log.profile_step_start
    last = config.log.profile_step_end
    if (config.log.profile or config.log.record_timeline is not None) and last <= first:
        yield describe(
            "--profile-step-end",
            got=last,
            expected=f"more than profile_step_start {first}",
            do="trace one step or more",
        )
    if config.log.record_timeline is not None and 0 < config.training.train_iters <= first:
        expected = f"less than train_iters {config.training.train_iters}"
        yield describe(
            "--profile-step-start", got=first, expected=expected, do="record a step of this run"
        )
    shares = split_shares(config.data.split)
    if len(shares) != 3 or not any(shares):
        wanted = "three shares of 0 or more, not all 0, such as 969,30,1"
        yield describe(
            "--split", got=config.data.split, expected=wanted, do="give training,validation,test"
        )
    if config.training.early_stop_patience > 0 and config.training.eval_interval == 0:
        do = "give --eval-interval N and a share of --split, or leave it out"
        patience = config.training.early_stop_patience
        yield describe(
            "--early-stop-patience",
            got=patience,
            expected="evaluations whose losses it compares",
            do=do,
        )
    weights = config.checkpoint
    padding = config.model.pad_token_id
    if weights.resize_embeddings and padding is not None and padding < 0:
        yield describe(
            flag("pad_token_id"),
            got=padding,
            expected="an id: --resize-embeddings adds rows, from whose end it would be counted",
            do="give --pad-token-id of your tokenizer, or null",
        )
    if weights.resize_embeddings and weights.load is None and weights.init_from_hf is None:
        do = "leave it out: a new model has rows for all tokens, or give --init-from-hf or --load"
        yield describe(
            "--resize-embeddings", got="no weights", expected="those of a trained model", do=do
        )
    if config.log.sample_interval > 0 and not config.log.sample_prompt:
        yield describe(
            "--sample-interval",
            got="no --sample-prompt",
            expected="texts to continue",
            do="give --sample-prompt TEXT ...",
        )


def data_order_problems(config: Config) -> Iterator[str]:
    """Yield options that --megatron-data-order excludes."""
    if not config.data.megatron_data_order:
        return
    others = []
    if config.data.data_order != "shuffled":
        others.append((f"--data-order {config.data.data_order}", "Megatron's order, shuffled"))
    if config.training.epochs:
        others.append(("--epochs", "--train-iters or --train-samples, on which the order depends"))
    if config.training.on_bad_step == "rollback":
        # Samples that are left out need others, which lie behind those of the run.
        others.append(("--on-bad-step rollback", "a run that leaves out no samples"))
    for got, expected in others:
        yield describe(
            "--megatron-data-order", got=got, expected=expected, do="leave one of the two out"
        )


def split_shares(split: str) -> list[float]:
    """Return the numbers of ``--split``; none if any is not finite or below 0."""
    try:
        shares = [float(word) for word in split.split(",")]
    except ValueError:
        return []
    return shares if all(0 <= share < float("inf") for share in shares) else []
