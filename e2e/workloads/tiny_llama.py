"""The model of the demo: a Llama small enough to train and serve on two CPU cores, with random weights.

Every size has a reason: grouped queries, a padded vocabulary and an MLP that two ranks can halve. No library here: trainer and generator both read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TinyLlama:
    layers: int = 2
    hidden: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    head: int = 32
    ffn: int = 256
    words: int = 512
    padded_words: int = 640  # Megatron pads to a multiple of 128 x ranks; engines pad otherwise
    positions: int = 256
    epsilon: float = 1e-5
    rotary_base: int = 10000

    def scaled(self, factor: int) -> TinyLlama:
        """As deep, and as many times as wide: `factor` squared times the bytes, of which scale 1 has 0.85 MB and scale 18 has 276 MB."""
        heads = {"query_heads": factor * self.query_heads, "kv_heads": factor * self.kv_heads}
        return replace(self, hidden=factor * self.hidden, ffn=factor * self.ffn, words=factor * self.words, padded_words=factor * self.padded_words, **heads)

    def huggingface(self) -> dict[str, object]:
        """config.json of its checkpoints."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "intermediate_size": self.ffn,
            "vocab_size": self.words,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.epsilon,
            "rope_theta": float(self.rotary_base),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }

    def write_config(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.huggingface(), indent=2) + "\n")
