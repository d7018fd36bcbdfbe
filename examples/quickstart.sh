#!/usr/bin/env bash
# usage: bash examples/quickstart.sh
#
# From nothing to a trained LLaMA in HuggingFace format:
# It makes .venv, trains a tokenizer and a small model on Python's documentation with several
# processes, prints a sample of text, and exports the model. All files stay in the clone, in
# runs/quickstart. You may start it again: an interrupted run is resumed, and a finished one is only
# evaluated and sampled.
set -euo pipefail
if [ $# -gt 0 ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [ "$1" = --help ] || [ "$1" = -h ] && exit 0 || exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh hf
out=runs/quickstart
python=.venv/bin/python
mkdir -p "$out"

gpus=$("$python" -c 'from megatron_llama.distributed.device import accelerator_count; print(accelerator_count())')
processes=2 tensor=2
if [ "$gpus" -gt 0 ]; then
    processes=$gpus
    [ $((gpus % 2)) -eq 0 ] || tensor=1
fi
export OMP_NUM_THREADS=1

if [ ! -e "$out/docs.meta.json" ]; then
    echo "== 1. text: the documentation that comes with Python"
    "$python" -c "from megatron_llama.data.corpus import write_corpus; write_corpus('$out/corpus.jsonl')"
    echo "== 2. tokenizer and tokens"
    "$python" -m megatron_llama preprocess --input "$out/corpus.jsonl" --output-prefix "$out/docs" \
        --train-tokenizer --vocab-size 4096 --append-eod --overwrite
fi

echo "== 3. training: $processes processes, tensor parallel $tensor with sequence parallelism"
"$python" -m torch.distributed.run --nproc-per-node "$processes" --standalone \
    -m megatron_llama pretrain --config examples/quickstart.yaml --data-path "$out/docs" \
    --tensor-model-parallel-size "$tensor" --sequence-parallel --save "$out/checkpoints" --load "$out/checkpoints"

echo "== 4. a sample"
"$python" -m megatron_llama generate --load "$out/checkpoints" --prompt "Return the" "The with statement" --max-new-tokens 48

echo "== 5. export to HuggingFace"
"$python" -m megatron_llama export --load "$out/checkpoints" --output "$out/hf"
"$python" - "$out" <<'PY'
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

out = sys.argv[1]
lines = [json.loads(line) for line in open(f"{out}/checkpoints/log.jsonl")]
curve = [line["validation_loss"] for line in lines if "validation_loss" in line]
model = AutoModelForCausalLM.from_pretrained(f"{out}/hf")
tokenizer = AutoTokenizer.from_pretrained(f"{out}/hf")
text = tokenizer.decode(model.generate(**tokenizer("Return a list of", return_tensors="pt"), max_new_tokens=24, do_sample=False)[0])
print(f"transformers loads it ({sum(p.numel() for p in model.parameters()):,} parameters) and continues: {text!r}")
print(f"\nvalidation loss: {curve[0]:.3f} before training, {curve[-1]:.3f} after")
print(f"HuggingFace export: {out}/hf")
PY
cat <<TXT

Next:
  source .venv/bin/activate && export OMP_NUM_THREADS=1
  # the same run under pipeline parallelism, without starting it
  python -m megatron_llama pretrain --config examples/quickstart.yaml --data-path $out/docs --pipeline-model-parallel-size 2 --micro-batch-size 4 --dry-run --world-size 4
  # four processes: two pipeline stages of two data-parallel ranks
  torchrun --nproc-per-node 4 -m megatron_llama pretrain --config examples/quickstart.yaml --data-path $out/docs --pipeline-model-parallel-size 2 --micro-batch-size 4 --train-iters 20 --log-interval 5
  # another prompt; all options
  python -m megatron_llama generate --load $out/checkpoints --prompt "If the argument is" --temperature 0.5
  python -m megatron_llama pretrain --help
TXT
