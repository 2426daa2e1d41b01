"""An engine outside of Refit, for comparison: it loads each checkpoint by vLLM's own loader and says what it generates.

    python -m e2e.workloads.reference MODEL_DIRECTORY

One long-lived process, since a start takes a minute: a JSON line on standard input, `{"legs": [[DIRECTORY, 16]], "prompts": [[1, 2, 3]]}`, gives one on
standard output, `{"tokens": [[...]]}`: the greedy continuations, so many tokens by each checkpoint. The first line, `{"ready": true}`, comes when the
engine is up.

Its linear layers stay plain, as those of generators do on CPU: both then add in the same order, and equal weights give equal tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ONE_PROCESS_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Reference:
    def __init__(self, model: Path) -> None:
        from refit_runtime.adapters.vllm.loading import keep_plain_linears
        from vllm import LLM

        keep_plain_linears()
        self._engine: Any = LLM(str(model), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=128, max_num_seqs=8)
        self._engine.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "safetensors"}}})

    def generate(self, legs: Sequence[tuple[str, int]], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy tokens: so many by each checkpoint. A later one goes on with the cache of the one before, like a request that runs across a commit."""
        from vllm import SamplingParams

        self._engine.reset_prefix_cache()
        greedy = SamplingParams(temperature=0, max_tokens=sum(tokens for _, tokens in legs), detokenize=False, ignore_eos=True)
        made: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, prompt in zip(made, prompts, strict=True):
            self._engine.llm_engine.add_request(number, {"prompt_token_ids": list(prompt)}, greedy)
        due = 0
        for checkpoint, tokens in legs:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
            due += tokens
            while any(len(each) < due for each in made.values()):
                for output in self._engine.llm_engine.step():
                    made[output.request_id] = list(output.outputs[0].token_ids)
            assert all(len(each) == due for each in made.values()), "fewer prompts at once: they do not begin together"
        return list(made.values())


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m e2e.workloads.reference MODEL_DIRECTORY")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints goes to standard error
    os.environ.update(ONE_PROCESS_ON_CPU)
    reference = Reference(Path(arguments[0]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps({"tokens": reference.generate(ask["legs"], ask["prompts"])}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
