"""The GPT2Config of a checkpoint of Megatron-LM, from its weights and, where they are saved, its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.model.config import GPT2Config
from megazero.model.mlp import warn_of_exact_gelu
from megazero.option import flag_of

WORD_EMBEDDINGS = "word_embeddings.weight"
_POSITIONS = "position_embeddings.weight"
_QKV = "transformer.layers.0.attention.query_key_value.bias"
_MLP = "transformer.layers.0.mlp.dense_h_to_4h.bias"
_SHOWN = {WORD_EMBEDDINGS: 2, _POSITIONS: 2, _QKV: 1, _MLP: 1}  # parameters that show the sizes, and their dimensions
# Arguments of the same name and meaning.
_SAME = "make_vocab_size_divisible_by attention_dropout hidden_dropout init_method_std layernorm_epsilon".split()
# Arguments that change what is computed, where no name and no shape of the weights shows it; and the values that do not.
_REFUSED = "apply_residual_connection_post_layernorm apply_layernorm_1p squared_relu window_size softmax_type".split()
_AS_OURS = (None, False, "vanilla", (-1, -1))  # a window without ends


def megatron_config(
    shards: Sequence[Mapping[str, Tensor]],
    args: Mapping[str, Any],
    vocab_size: int | None,
    num_attention_heads: int | None,
    folder: Path,
) -> GPT2Config:
    """The model. Sizes are those of the weights; what they do not show is taken from the arguments.

    Args:
        shards: what each model-parallel rank holds, by our names.
        args: Megatron's arguments; empty where they were not saved.
        vocab_size, num_attention_heads: what the user says.
        folder: for messages.

    Raises:
        ValueError: a size is not known, ranks are missing, or it is a model that ours cannot compute.
    """
    first, ranks = shards[0], len(shards)
    missing = [name for name, ndim in _SHOWN.items() if name not in first or first[name].ndim != ndim]
    if missing:
        raise ValueError(f"{folder} is no GPT-2 with learned positions: its weights lack {', '.join(missing)}.")
    rows, mlp_size, three_hidden = (len(first[name]) * ranks for name in (WORD_EMBEDDINGS, _MLP, _QKV))
    positions, hidden_size = first[_POSITIONS].shape
    if three_hidden != 3 * hidden_size:
        if args.get("group_query_attention"):
            raise ValueError(
                f"{folder} was trained with --group-query-attention and --num-query-groups {args.get('num_query_groups')}: of "
                "Megatron-LM's models, those are imported in which every head has keys and values of its own."
            )
        raise ValueError(
            f"{folder} holds {ranks} model-parallel ranks, but rank 0 has {len(first[_QKV])} of {3 * hidden_size} elements of "
            f"{_QKV}. Copy the directories of all ranks (mp_rank_00, mp_rank_01, ...), and no others."
        )
    heads = num_attention_heads or args.get("num_attention_heads")
    if heads is None:
        raise ValueError(
            f"{folder} does not say how many attention heads the model has, because the first release did not save its "
            f"arguments. Give --num-attention-heads ({max(1, hidden_size // 64)} if they are of 64 elements, as GPT-2's are)."
        )
    if args.get("num_attention_heads", heads) != heads:
        raise ValueError(f"--num-attention-heads {heads}, but {folder} was trained with {args['num_attention_heads']}.")
    _check_arguments(args, folder)
    if "norm_epsilon" in args:  # its name since 2023
        args = {**args, "layernorm_epsilon": args["norm_epsilon"]}
    return GPT2Config(
        num_layers=len({name.split(".")[2] for name in first if name.startswith("transformer.layers.")}),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=None if mlp_size == 4 * hidden_size else mlp_size,
        max_position_embeddings=positions,
        vocab_size=_vocab_size(vocab_size or args.get("vocab_size"), rows, folder),
        **{name: value for name, value in args.items() if name in _SAME},
    )


def _vocab_size(vocab_size: int | None, rows: int, folder: Path) -> int:
    if vocab_size is None:
        raise ValueError(
            f"{folder} has {rows} rows of word embeddings and does not say how many of them are padding. Give --vocab-size: the "
            "tokens of the vocabulary that it was trained with, 50257 for GPT-2's own."
        )
    if vocab_size > rows:
        raise ValueError(f"--vocab-size {vocab_size}, but {folder} has {rows} rows of word embeddings with padding.")
    return vocab_size


def _check_arguments(args: Mapping[str, Any], folder: Path) -> None:
    if refused := [name for name in _REFUSED if args.get(name) not in _AS_OURS]:
        raise ValueError(f"{folder} was trained with {flag_of(refused[0])}, which this model does not compute.")
    is_core = not args.get("use_legacy_models", not args.get("use_mcore_models"))  # which does not read --openai-gelu
    if args and not args.get("bias_gelu_fusion") and (is_core or not args.get("openai_gelu")):
        warn_of_exact_gelu(f"{folder}, without --bias-gelu-fusion,")
