"""``generate``: continue prompts with a checkpoint or a HuggingFace folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.commands.options import GenerateConfig
from megatron_llama.config import Config
from megatron_llama.errors import ConfigError, DataError, describe
from megatron_llama.options import Parsed

if TYPE_CHECKING:
    from megatron_llama.model.llama import Stage
    from megatron_llama.tokenizer.base import Tokenizer


def generate(parsed: Parsed) -> None:
    """Print each prompt with its continuation."""
    import torch

    from megatron_llama.generation import Sampling
    from megatron_llama.generation import generate as sample

    options = parsed.get(GenerateConfig)
    stage, tokenizer = _model(options)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p)
    eos = tokenizer.eos_id if tokenizer.eos_id is not None else stage.config.eos_token_id
    for text in options.prompt:
        prompt = [*([tokenizer.bos_id] if tokenizer.bos_id is not None else []), *tokenizer.encode(text)]
        if not prompt:
            expected = "some text, since this tokenizer has no begin token"
            raise DataError(describe("--prompt", got="no token", expected=expected, do="give a prompt"))
        room = stage.config.max_position_embeddings - len(prompt)
        if room < 1:
            expected = f"at most {stage.config.max_position_embeddings - 1}, the model's max_position_embeddings less one"
            raise DataError(describe("--prompt", got=f"{len(prompt)} tokens", expected=expected, do="shorten the prompt"))
        generator = torch.Generator().manual_seed(options.seed)
        new = list(sample(stage, prompt, sampling, eos=eos, generator=generator))
        print(tokenizer.decode([*prompt, *new]), flush=True)


def _model(options: GenerateConfig) -> tuple[Stage, Tokenizer]:
    import torch

    from megatron_llama import device as devices
    from megatron_llama.checkpoint import native, series
    from megatron_llama.checkpoint.hf import HFWeights
    from megatron_llama.checkpoint.places import local_copy
    from megatron_llama.hf_config import read_hf_config
    from megatron_llama.mesh import Mesh
    from megatron_llama.model.llama import build_stages
    from megatron_llama.model.load import load_stages, rank_specs
    from megatron_llama.optim.distributed import WeightSource
    from megatron_llama.tokenizer.load import load_tokenizer

    if (options.load is None) == (options.init_from_hf is None):
        found = "neither" if options.load is None else "both"
        do = "give --load FOLDER or --init-from-hf FOLDER"
        raise ConfigError(describe("--load, --init-from-hf", got=found, expected="one of them", do=do))
    if options.load is not None:
        path = series.find(options.load)
        model, beside = native.read_meta(path).model, path.parent / series.TOKENIZER
        source: WeightSource = native.open_weights(path)
    else:
        assert options.init_from_hf is not None
        model, beside = read_hf_config(options.init_from_hf), Path(options.init_from_hf)
        source = HFWeights(options.init_from_hf)
    with local_copy(beside) as folder:
        tokenizer = load_tokenizer(options.tokenizer_model or folder)
    config, mesh = Config(model=model), Mesh.single(devices.accelerator(0))
    [stage] = build_stages(config, mesh).values()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    load_stages([stage], rank_specs(config, mesh), source, dtype=dtype, device=mesh.device)
    return stage, tokenizer
