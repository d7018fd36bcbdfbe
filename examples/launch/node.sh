#!/usr/bin/env bash
# Start a command on all GPUs of this machine:
#   bash examples/launch/node.sh pretrain --config FILE [options]
# PROCESSES in the environment is the number of processes (default: one for each GPU). RESTARTS is
# how often a failed run is started again (default 3). With `load: auto` it then resumes from its
# newest checkpoint. SIGTERM and Ctrl-C end a run after it has saved a checkpoint.
set -euo pipefail
python=${PYTHON:-python}
processes=${PROCESSES:-$("$python" -c 'from megatron_llama.engine.comm.device import accelerator_count; print(accelerator_count() or 1)')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" --max-restarts "${RESTARTS:-3}" \
    -m megatron_llama "$@"
