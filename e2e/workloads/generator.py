"""The model directory of a generator: a configuration, and no weights. An example to copy.

    python -m e2e.workloads.generator /tmp/model
    vllm serve /tmp/model --served-model-name tiny --load-format dummy --skip-tokenizer-init

That is all a generator needs: the first version puts the weights in. The pod is not ready, and every inference route answers 503, until then.
"""

from __future__ import annotations

import sys
from pathlib import Path

from e2e.workloads.tiny_llama import TinyLlama


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m e2e.workloads.generator MODEL_DIRECTORY")
    TinyLlama().write_config(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
