#!/usr/bin/env bash
# LLaMA 3 70B: tuning of all weights on preferences (DPO),
# on 4 machines with eight GPUs of 80 GB each.
#   bash examples/align_llama3_70b.sh FOLDER --train-data FILE ... [options]
# FOLDER is a HuggingFace folder with config.json, *.safetensors and the tokenizer.
# It submits a Slurm job. sbatch reads its own options from the environment: SBATCH_PARTITION,
# SBATCH_ACCOUNT, ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 0 ] || { echo "usage: bash examples/align_llama3_70b.sh FOLDER --train-data FILE ... [options]" >&2; exit 2; }
weights=$1
shift
exec sbatch --nodes=4 --job-name=align_llama3_70b "$here/launch/slurm.sbatch" align --config "$here/align_llama3_70b.yaml" --init-from-hf "$weights" "$@"
