"""Names and layouts of Hugging Face's GPT-2, both ways: pure functions on names, shapes and dicts of full tensors.

Their linear layers are `Conv1D`, whose weight is [in, out]; ours is [out, in] as in `nn.Linear`. Their `c_attn` stacks
query, key and value along the output, as our `query_key_value` does, so a transpose is all it takes. The transformers package
is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megazero.logging import ALIKE, get_logger, some
from megazero.model.config import GPT2Config

logger = get_logger(__name__)

# ours inside transformer.layers.{i} -> theirs inside h.{i}; whether the weight is a Conv1D
_BLOCK = (
    ("input_layernorm", "ln_1", False),
    ("attention.query_key_value", "attn.c_attn", True),
    ("attention.dense", "attn.c_proj", True),
    ("post_attention_layernorm", "ln_2", False),
    ("mlp.dense_h_to_4h", "mlp.c_fc", True),
    ("mlp.dense_4h_to_h", "mlp.c_proj", True),
)
# our field, their key, their default
_CONFIG = (
    ("vocab_size", "vocab_size", 50257),
    ("max_position_embeddings", "n_positions", 1024),
    ("hidden_size", "n_embd", 768),
    ("num_layers", "n_layer", 12),
    ("num_attention_heads", "n_head", 12),
    ("intermediate_size", "n_inner", None),
    ("attention_dropout", "attn_pdrop", 0.1),
    ("hidden_dropout", "resid_pdrop", 0.1),  # theirs has one more for embeddings, embd_pdrop; GPT-2's are equal
    ("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
    ("init_method_std", "initializer_range", 0.02),
)
PREFIX = "transformer."  # of GPT2LMHeadModel's names, not of GPT2Model's
_HEAD = "lm_head.weight"
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # buffers that old versions of transformers saved


def to_huggingface(full_state_dict: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """The state dict of `transformers.GPT2LMHeadModel` with the same function as our full (merged, unpadded) one.

    `lm_head.weight` is the same tensor object as `transformer.wte.weight`: the head is tied.

    Raises:
        ValueError: names are missing or unknown, or a tensor has another shape than `config` says; the first are listed.
    """
    check_names(full_state_dict, (ours for ours, _, _ in matching_names(config)), "the megazero state dict")
    shapes = {name: tuple(tensor.shape) for name, tensor in full_state_dict.items()}
    _check_shapes(shapes, config.full_shapes(), "the megazero state dict")
    out = {
        f"{PREFIX}{theirs}": (full_state_dict[ours].t().contiguous() if transposed else full_state_dict[ours])
        for ours, theirs, transposed in matching_names(config)
    }
    out[_HEAD] = out["transformer.wte.weight"]
    return out


def from_huggingface(state_dict: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """Our full (unpadded) state dict with the same function as that of a Hugging Face GPT-2.

    Args:
        state_dict: of `GPT2LMHeadModel` or of `GPT2Model` (without the `transformer.` prefix). Causal-mask buffers are ignored.
        config: its sizes; see `config_from_huggingface`.

    Raises:
        ValueError: names are missing or unknown, a tensor has another shape than `config` says, or `lm_head.weight` is not
            tied to the embedding (this model has no separate head).
    """
    names = saved_names(state_dict, config, "the Hugging Face state dict", state_dict.__getitem__)
    return {
        ours: (state_dict[key].t().contiguous() if transposed else state_dict[key]) for ours, key, transposed in names
    }


def saved_names(
    saved: Mapping[str, Any], config: GPT2Config, what: str, read: Callable[[str], Tensor]
) -> list[tuple[str, str, bool]]:
    """(our name, the name in `saved`, whether one is the other's transpose) of every parameter, in our order.

    Args:
        saved: as for `from_huggingface`; of what is in it only `shape` is looked at.
        what: how messages call it.
        read: the tensor of a name in `saved`, to compare the head with the embedding.

    Raises:
        ValueError: as `from_huggingface`.
    """
    bare = {name.removeprefix(PREFIX): name for name in saved}
    bare = {name: key for name, key in bare.items() if not _CAUSAL_MASK.fullmatch(name)}
    head = bare.pop(_HEAD, None)
    check_names(bare, (theirs for _, theirs, _ in matching_names(config)), what)
    names = [(ours, bare[theirs], transposed) for ours, theirs, transposed in matching_names(config)]
    shapes = {ours: tuple(saved[key].shape)[:: -1 if transposed else 1] for ours, key, transposed in names}
    _check_shapes(shapes, config.full_shapes(), f"{what} (in megazero's names and layout)")
    if head is not None and not torch.equal(read(head), read(bare["wte.weight"])):
        raise ValueError(
            f"{what}: {_HEAD} differs from transformer.wte.weight, but this model ties its head to the embedding and has no "
            "separate one. Import a checkpoint with tie_word_embeddings=true."
        )
    return names


def matching_names(config: GPT2Config) -> Iterator[tuple[str, str, bool]]:
    """(our name, their name without `transformer.`, whether one is the other's transpose) of every parameter, in our order."""
    yield "word_embeddings.weight", "wte.weight", False
    yield "position_embeddings.weight", "wpe.weight", False
    for i in range(config.num_layers):
        for ours, theirs, is_conv in _BLOCK:
            yield f"transformer.layers.{i}.{ours}.weight", f"h.{i}.{theirs}.weight", is_conv
            yield f"transformer.layers.{i}.{ours}.bias", f"h.{i}.{theirs}.bias", False
    yield "transformer.final_layernorm.weight", "ln_f.weight", False
    yield "transformer.final_layernorm.bias", "ln_f.bias", False


def config_to_huggingface(config: GPT2Config) -> dict[str, object]:
    """The `config.json` that goes with `to_huggingface`'s state dict.

    Raises:
        ValueError: the model is no GPT-2.
    """
    if config.architecture:
        raise ValueError(
            f"a model with {config.architecture} has no layout of Hugging Face's here: theirs of GPT-2 has none of these."
        )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "embd_pdrop": config.hidden_dropout,
        **{theirs: getattr(config, ours) for ours, theirs, _ in _CONFIG},
    }


def config_from_huggingface(config: Mapping[str, object]) -> GPT2Config:
    """The `GPT2Config` of a Hugging Face `config.json`; keys that it leaves out have GPT-2's defaults.

    Warns if embeddings have another dropout than the rest there: here they have that of the rest.

    Raises:
        ValueError: it describes something that this model cannot compute (another activation, an untied head, ...).
    """
    for key, supported in (
        ("model_type", ("gpt2",)),
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        ("tie_word_embeddings", (True,)),
        ("scale_attn_weights", (True,)),
        ("scale_attn_by_inverse_layer_idx", (False,)),
        ("add_cross_attention", (False,)),
    ):
        if key in config and config[key] not in supported:
            raise ValueError(
                f"the Hugging Face config says {key}={config[key]!r}, and this model supports only "
                f"{' or '.join(map(repr, supported))}."
            )

    given = {ours: config.get(theirs, default) for ours, theirs, default in _CONFIG}
    embeddings = config.get("embd_pdrop", 0.1)
    if embeddings != given["hidden_dropout"]:  # of no account unless the model is trained on
        logger.warning(
            "the Hugging Face config has embd_pdrop=%s and resid_pdrop=%s: --hidden-dropout, %s, is that of embeddings too.",
            embeddings,
            given["hidden_dropout"],
            given["hidden_dropout"],
            extra=ALIKE,
        )
    return GPT2Config(**given)  # type: ignore[arg-type]


def check_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Returns if both are the same names.

    Raises:
        ValueError: names are missing or unknown; the first are listed.
    """
    there, wanted = set(found), set(expected)
    missing, unknown = sorted(wanted - there), sorted(there - wanted)
    if missing or unknown:
        raise ValueError(
            f"{what} does not match the configuration: missing {some(missing, 4) or 'nothing'}; unknown "
            f"{some(unknown, 4) or 'nothing'}. Check the number of layers, and that this is a GPT-2."
        )


def _check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    wrong = [
        f"{name} has {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise ValueError(f"{what} has other sizes than the configuration says: {some(wrong, 4)}.")
