#!/usr/bin/env bash
# LLaMA 2 13B from scratch on 4 machines with eight GPUs of 80 GB each.
#   bash examples/llama2_13b.sh --data-path PREFIX [options]
# It submits a Slurm job. sbatch reads its own options from the environment: SBATCH_PARTITION,
# SBATCH_ACCOUNT, ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --nodes=4 --job-name=llama2_13b "$here/launch/slurm.sbatch" pretrain --config "$here/llama2_13b.yaml" "$@"
