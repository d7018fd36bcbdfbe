"""``python -m megatron_llama``."""

import sys

from megatron_llama.cli import main

if __name__ == "__main__":
    sys.exit(main())
