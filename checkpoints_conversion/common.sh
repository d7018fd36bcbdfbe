# Options of Megatron-LLaMA's own conversion scripts -> those of `python -m megatron_llama convert`. Sourced by the two scripts.

python=${PYTHON:-python}
source= target= forward=()

help() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$script"
  cat <<'END'

  --load_path FOLDER                       the model to read
  --save_path FOLDER                       the folder to write
  --target_params_dtype fp32|bf16|fp16     dtype of the written weights (default: the source's)
  --target_tensor_model_parallel_size N    tensor-parallel size to write
  --target_pipeline_model_parallel_size N  pipeline stages to write
  --make_vocab_size_divisible_by N         how the written embedding is padded
  --config_path FILE                       a config.json, for what the source does not say of its model
  --max_shard_size 5GB                     largest weight file
  --convert_checkpoint_from_megatron_to_transformers, --print-checkpoint-structure, --use_distributed_optimizer,
  --target_data_parallel_size N, --megatron-path PATH, --tokenizer_name NAME
                                           accepted: nothing depends on them here
PYTHON in the environment is the Python to run (default: python).
END
}

die() { echo "error: $*" >&2; exit 2; }

dtype_of() {
  case $1 in
    fp32) echo float32 ;;
    bf16) echo bfloat16 ;;
    fp16) echo float16 ;;
    *) die "--target_params_dtype: got $1, expected fp32, bf16 or fp16; correct it" ;;
  esac
}

read_options() {
  while (($#)); do
    case $1 in
      -h | --help) help; exit 0 ;;
      --convert_checkpoint_from_megatron_to_transformers | --print-checkpoint-structure | --use_distributed_optimizer) shift; continue ;;
    esac
    local name=${1%%=*} value
    case $1 in
      --*=*) value=${1#*=}; shift ;;
      --*) (($# > 1)) || die "$1: got nothing, expected a value; give one"; value=$2; shift 2 ;;
      *) die "$1: got a word, expected an option; see --help" ;;
    esac
    case $name in
      --load_path) source=$value ;;
      --save_path) target=$value ;;
      --target_tensor_model_parallel_size) forward+=(--tensor-model-parallel-size "$value") ;;
      --target_pipeline_model_parallel_size) forward+=(--pipeline-model-parallel-size "$value") ;;
      --make_vocab_size_divisible_by) [[ $to == hf ]] || forward+=(--make-vocab-size-divisible-by "$value") ;;
      --target_params_dtype) value=$(dtype_of "$value") || exit 2; forward+=(--dtype "$value") ;;
      --config_path) forward+=(--hf-config "$value") ;;
      --max_shard_size) forward+=(--max-shard-bytes "$(bytes_of "$value")") ;;
      --target_data_parallel_size | --megatron-path | --tokenizer_name) ;; # nothing depends on them here
      --*) forward+=("${name//_/-}" "$value") ;;
    esac
  done
  [[ -n $source && -n $target ]] || die "--load_path, --save_path: got nothing, expected two folders; give both"
}

bytes_of() {
  case $1 in
    *GB) echo $((${1%GB} * 1000000000)) ;;
    *MB) echo $((${1%MB} * 1000000)) ;;
    *) echo "$1" ;;
  esac
}
