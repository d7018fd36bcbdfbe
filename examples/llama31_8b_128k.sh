#!/usr/bin/env bash
# LLaMA 3.1 8B on sequences of 131072 tokens, the last phase of its training,
# on 4 machines with eight GPUs of 80 GB each.
#   bash examples/llama31_8b_128k.sh --data-path PREFIX [options]
# It submits a Slurm job. sbatch reads its own options from the environment: SBATCH_PARTITION,
# SBATCH_ACCOUNT, ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --nodes=4 --job-name=llama31_8b_128k "$here/launch/slurm.sbatch" pretrain --config "$here/llama31_8b_128k.yaml" "$@"
