"""The walk over a GPT model: every parameter and every persistent buffer belongs to a leaf, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from refit_api.errors import UnsupportedLayout

from refit_runtime.adapters.megatron.attention import attention
from refit_runtime.adapters.megatron.layout import Halves, Layout, Words
from refit_runtime.adapters.megatron.linear import At, Leaf, derives, kind_of, linear, norm
from refit_runtime.adapters.megatron.mesh import Mesh
from refit_runtime.adapters.megatron.mlp import mlp
from refit_runtime.adapters.megatron.names import Slot

WRAPPERS = ("DistributedDataParallel", "Float16Module")


def unwrapped(chunk: Any) -> Any:
    """The GPT model inside Megatron's own wrappers, which hold no tensors themselves."""
    while any(derives(chunk, wrapper) for wrapper in WRAPPERS):
        chunk = chunk.module
    if not derives(chunk, "GPTModel"):
        raise UnsupportedLayout(f"model chunk: {type(chunk).__module__}.{type(chunk).__name__}; expected megatron.core's GPTModel", seen=type(chunk).__name__)
    return chunk


def leaves(chunk: Any, mesh: Mesh, vocabulary: int, name: str = "") -> tuple[Leaf, ...]:
    """`vocabulary` is the checkpoint's number of words; Megatron pads it. `name` tells chunks apart. Raises UnsupportedLayout."""
    gpt = unwrapped(chunk)
    mesh.check(gpt.config)
    found = tuple(walk(At(gpt, name, mesh), vocabulary))
    for leaf in found:
        check(leaf)
    refuse_rest(gpt, found, name)
    return found


def walk(at: At, vocabulary: int) -> Iterator[Leaf]:
    gpt = at.module
    words = Layout((gpt.vocab_size, gpt.config.hidden_size), 0, at.mesh.tp, Words(vocabulary))
    inputs = at.child("embedding")
    table = inputs.child("word_embeddings") if inputs is not None else None
    embedding = [] if table is None or kind_of(table.module) != "VocabParallelEmbedding" else [table.leaf("weight", Slot.EMBEDDING, words)]
    yield from embedding
    decoder = at.child("decoder")
    if decoder is not None and derives(decoder.module, "TransformerBlock"):
        for index, layer in enumerate(decoder.module.layers):
            if derives(layer, "TransformerLayer"):
                yield from transformer_layer(replace(decoder, module=layer, path=f"{decoder.path}.layers.{index}", layer=layer.layer_number - 1))
        yield from norm(decoder, "final_layernorm", Slot.FINAL_NORM, gpt.config.hidden_size)
    slot = Slot.EMBEDDING if gpt.share_embeddings_and_output_weights else Slot.OUTPUT
    head = [replace(leaf, layout=words) for leaf in linear(at, "output_layer", slot, words.shape, at.mesh.tp)]
    yield from head
    predictions = at.child("mtp")
    if predictions is not None and derives(predictions.module, "MultiTokenPredictionBlock"):
        yield from multi_token_predictions(predictions, embedding, head)


def multi_token_predictions(at: At, embedding: Sequence[Leaf], head: Sequence[Leaf]) -> Iterator[Leaf]:
    """Layers after the last one, each with the model's own embedding and head: a draft engine asks for those by the layer's names."""
    config = at.module.config
    for index, module in enumerate(at.module.layers):
        if not derives(module, "MultiTokenPredictionLayer"):
            continue
        layer = replace(at, module=module, path=f"{at.path}.layers.{index}", layer=config.num_layers + module.layer_number - 1)
        yield from norm(layer, "enorm", Slot.MTP_EMBEDDING_NORM, config.hidden_size)
        yield from norm(layer, "hnorm", Slot.MTP_HIDDEN_NORM, config.hidden_size)
        yield from linear(layer, "eh_proj", Slot.MTP_PROJECTION, (config.hidden_size, 2 * config.hidden_size), at.mesh.tp)
        inner = layer.child("transformer_layer")
        if inner is not None and derives(inner.module, "TransformerLayer"):
            yield from transformer_layer(inner)
        yield from norm(layer, "final_layernorm", Slot.MTP_FINAL_NORM, config.hidden_size)
        for shared, slot in ((embedding, Slot.MTP_EMBEDDING), (head or embedding, Slot.MTP_OUTPUT)):
            yield from (replace(leaf, slot=slot, layer=layer.layer) for leaf in shared)


def transformer_layer(at: At) -> Iterator[Leaf]:
    """Megatron numbers layers over all stages, from 1."""
    hidden = at.module.config.hidden_size
    yield from norm(at, "input_layernorm", Slot.ATTENTION_NORM, hidden)
    for name, find in (("self_attention", attention), ("mlp", mlp)):
        if name == "mlp":
            yield from norm(at, "pre_mlp_layernorm", Slot.MLP_NORM, hidden)
        child = at.child(name)
        if child is not None:
            yield from find(child)


def check(leaf: Leaf) -> None:
    """The tensor is plain memory of the expected shape, and what Megatron wrote on it agrees with the module's type."""
    held, layout = leaf.held(), leaf.layout
    where = f"{leaf.path} ({type(leaf.module).__name__})"
    plain = type(held.data).__name__
    if plain != "Tensor":
        raise UnsupportedLayout(f"{where}: memory of type {plain}; expected a plain tensor (turn parameter quantisation off)", tensor=leaf.path, seen=plain)
    seen, expected = tuple(leaf.view().shape), layout.local(where)
    if seen != expected:
        raise UnsupportedLayout(f"{where}: shape {seen}; expected {expected}, a part of {layout.shape}", tensor=leaf.path, seen=seen, expected=expected)
    if leaf.lens is not None:
        return
    stride = getattr(held, "partition_stride", 1)
    if getattr(held, "tensor_model_parallel", False):
        dim = held.partition_dim
        strides = {1, 2} if isinstance(layout.rows, Halves) else {1}
        if layout.axis.size > 1 and (dim != layout.dim or stride not in strides):
            raise UnsupportedLayout(
                f"{where}: partition_dim {dim}, partition_stride {stride}; expected dim {layout.dim}, stride {sorted(strides)}", tensor=leaf.path, seen=dim
            )


def refuse_rest(gpt: Any, found: tuple[Leaf, ...], name: str) -> None:
    known = {id(leaf.held()) for leaf in found}
    for path, module in gpt.named_modules(prefix=name):
        held = [tensor for tensor, _ in module.named_parameters(recurse=False)]
        held += [tensor for tensor, _ in module.named_buffers(recurse=False) if tensor not in module._non_persistent_buffers_set]
        for tensor in held:
            if id(getattr(module, tensor)) not in known:
                raise UnsupportedLayout(
                    f"{path} ({type(module).__module__}.{type(module).__name__}) holds {tensor}, and its role in the checkpoint is unknown; "
                    "give the tensors of such models from your own weight source",
                    module=path,
                    tensor=f"{path}.{tensor}",
                )
