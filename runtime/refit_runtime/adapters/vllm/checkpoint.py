"""Which tensors a checkpoint of a model has: names and shapes, without one byte of it.

A directory that holds safetensors says it itself, in the headers. Otherwise (engines start from a bare config) the model's
Hugging Face class is built on the meta device and its state dict turned back into the names that `save_pretrained` writes:
experts one by one, tied tensors once, block FP8 weights with their scales. These are the names trainers publish.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Dtype, TensorSpec


def checkpoint_tensors(directory: str, config: Any, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """`config`: the model's Hugging Face configuration; `dtype`: that of the engine's weights."""
    files = sorted(Path(directory).glob("*.safetensors")) if Path(directory).is_dir() else []
    return _from_files(files) if files else _from_config(config, Dtype(str(dtype).removeprefix("torch.")))


def _from_files(files: list[Path]) -> tuple[TensorSpec, ...]:
    from safetensors import safe_open

    found = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                part = opened.get_slice(name)
                found.append(TensorSpec(name, _DTYPES[part.get_dtype()], tuple(part.get_shape())))
    return tuple(found)


_DTYPES = {
    "F64": Dtype.FLOAT64, "F32": Dtype.FLOAT32, "F16": Dtype.FLOAT16, "BF16": Dtype.BFLOAT16, "F8_E4M3": Dtype.FLOAT8_E4M3FN, "F8_E5M2": Dtype.FLOAT8_E5M2,
    "I64": Dtype.INT64, "I32": Dtype.INT32, "I16": Dtype.INT16, "I8": Dtype.INT8, "U8": Dtype.UINT8,
}  # fmt: skip


def _from_config(config: Any, dtype: Dtype) -> tuple[TensorSpec, ...]:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    architectures = tuple(getattr(config, "architectures", None) or ())
    model_class = next((getattr(transformers, name) for name in architectures if hasattr(transformers, name)), None)
    if model_class is None:
        raise UnsupportedLayout(
            f"model of architectures {list(architectures)}: transformers {transformers.__version__} has none of these classes, so the names of its "
            "checkpoint's tensors are unknown; start the engine from a directory that holds the safetensors files of one checkpoint",
            architectures=architectures,
        )
    try:
        with torch.device("meta"):
            model = model_class(_known_by_type(config, model_class))
            _quantise(model, getattr(config, "quantization_config", None))
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        found = revert_weight_conversion(model, state)
    except UnsupportedLayout:
        raise
    except Exception as error:
        raise UnsupportedLayout(
            f"model of architectures {list(architectures)}: transformers {transformers.__version__} cannot build {model_class.__name__} from its config.json "
            f"({type(error).__name__}: {error}), so the names of its checkpoint's tensors are unknown; correct the config, or start the engine from a "
            "directory that holds the safetensors files of one checkpoint",
            architectures=architectures,
        ) from error
    return tuple(TensorSpec(name, _published(name, tensor, dtype), tuple(tensor.shape)) for name, tensor in found.items())


def _known_by_type(config: Any, model_class: type) -> Any:
    """Conversions of names are found by the type of a model: one of another type in a known class (Kimi K2 is DeepSeek V3) has those of the class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = next((kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == model_class.__name__), None)
    if own is not None and config.model_type not in CONFIG_MAPPING_NAMES:
        config = copy.deepcopy(config)
        config.model_type = own
    return config


def _quantise(model: Any, facts: dict[str, Any] | None) -> None:
    """As transformers does it before it loads such a checkpoint: FP8 weights, and beside each the scales of its blocks."""
    if facts is None:
        return
    if facts.get("quant_method") != "fp8" or not facts.get("weight_block_size"):
        raise UnsupportedLayout(
            f"model with quantization_config {facts.get('quant_method')!r}: the names of its checkpoint's tensors are known from a bare config for block FP8 "
            "only; start the engine from a directory that holds the safetensors files of one checkpoint",
            seen=str(facts.get("quant_method")),
            expected="fp8 with weight_block_size",
        )
    from transformers.quantizers.auto import AutoHfQuantizer

    AutoHfQuantizer.from_config(dict(facts), pre_quantized=True).preprocess_model(model=model)


def _published(name: str, tensor: torch.Tensor, dtype: Dtype) -> Dtype:
    """Quantised weights and their scales keep their dtypes; everything else has that of the engine's weights."""
    return Dtype(str(tensor.dtype).removeprefix("torch.")) if tensor.dtype == torch.float8_e4m3fn or name.endswith("_scale_inv") else dtype
