"""How transformers saves a GPT-2 and a Llama: names of modules, keys of config.json, and what our model cannot compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megazero.logging import ALIKE, get_logger
from megazero.model import rotary
from megazero.model.config import GPT2Config
from megazero.model.mlp import warn_of_exact_gelu

logger = get_logger(__name__)


@dataclass(frozen=True)
class Layout:
    """How transformers saves models of one class.

    Attributes:
        model_types: in config.json, the one that we write first -> what it has for a key that is left out, if not as in `rows`.
        prefix: of most names; a model without a head is saved without it.
        modules: ours, without `transformer.layers.{i}.` -> theirs.
        buffers: what old versions of transformers saved beside parameters, without the prefix.
        rows: our field, their key, their default.
        to_theirs: the other keys of config.json.
        to_ours: the configuration, from config.json and the fields of `rows`.
    """

    model_class: str
    model_types: Mapping[str, Mapping[str, object]]
    prefix: str
    block: str
    modules: Mapping[str, tuple[str, ...]]
    has_conv: bool  # linear layers inside of blocks are Conv1D
    has_biases: bool  # linear layers inside of blocks have them
    buffers: re.Pattern[str]
    rows: tuple[tuple[str, str, object], ...]
    to_theirs: Callable[[GPT2Config], dict[str, object]]
    to_ours: Callable[[Mapping[str, Any], dict[str, Any]], GPT2Config]


def _gpt2_to_theirs(config: GPT2Config) -> dict[str, object]:
    return {"activation_function": "gelu_new", "tie_word_embeddings": True, "embd_pdrop": config.hidden_dropout}


def _gpt2_to_ours(config: Mapping[str, Any], given: dict[str, Any]) -> GPT2Config:
    check_supported(
        config,
        activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        tie_word_embeddings=(True,),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    if config.get("activation_function") == "gelu":
        warn_of_exact_gelu('the Hugging Face model, with activation_function="gelu",')
    embeddings = config.get("embd_pdrop", 0.1)
    if embeddings != given["hidden_dropout"]:  # of no account unless the model is trained on
        logger.warning(
            "the Hugging Face config has embd_pdrop=%s and resid_pdrop=%s: --hidden-dropout, %s, is that of embeddings too.",
            embeddings,
            given["hidden_dropout"],
            given["hidden_dropout"],
            extra=ALIKE,
        )
    return GPT2Config(**given)


_GPT2 = Layout(
    model_class="GPT2LMHeadModel",
    model_types={"gpt2": {}},
    prefix="transformer.",
    block="transformer.h",
    modules={
        "word_embeddings": ("transformer.wte",),
        "position_embeddings": ("transformer.wpe",),
        "input_layernorm": ("ln_1",),
        "attention.query_key_value": ("attn.c_attn",),
        "attention.dense": ("attn.c_proj",),
        "post_attention_layernorm": ("ln_2",),
        "mlp.dense_h_to_4h": ("mlp.c_fc",),
        "mlp.dense_4h_to_h": ("mlp.c_proj",),
        "transformer.final_layernorm": ("transformer.ln_f",),
    },
    has_conv=True,
    has_biases=True,
    buffers=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),  # causal masks
    rows=(
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
    ),
    to_theirs=_gpt2_to_theirs,
    to_ours=_gpt2_to_ours,
)

_LLAMA_FLAGS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
}


# What is beside the factor in config.json, of every Llama from 3.1 on.
_LLAMA3_SCALING = {
    "low_freq_factor": rotary.LOW,
    "high_freq_factor": rotary.HIGH,
    "original_max_position_embeddings": rotary.ORIGINAL_POSITIONS,
}


def _llama_to_theirs(config: GPT2Config) -> dict[str, object]:
    scaling = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **_LLAMA3_SCALING}
    return {
        "hidden_act": "silu",
        "intermediate_size": config.mlp_size,
        "num_key_value_heads": config.key_value_heads,
        "rope_theta": float(config.rotary_base),  # in rope_parameters since transformers 5, which reads both here too
        "rope_scaling": scaling if config.use_rope_scaling else None,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def _llama_to_ours(config: Mapping[str, Any], given: dict[str, Any]) -> GPT2Config:
    groups = config.get("num_key_value_heads")
    if groups == given["num_attention_heads"]:
        groups = None
    rope = {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or config.get("rope_parameters") or {}),
    }
    rope.setdefault("rope_type", rope.get("type", "default"))
    base, is_scaled = int(rope["rope_theta"]), rope["rope_type"] == "llama3"
    if is_scaled:
        scaling = {
            "factor": (rope.get("factor") or "a number",),
            **{key: (value,) for key, value in _LLAMA3_SCALING.items()},
        }
        check_supported({**dict.fromkeys(scaling), **rope}, **scaling)
    ours = GPT2Config(
        **given,
        **_LLAMA_FLAGS,
        hidden_dropout=0.0,
        group_query_attention=groups is not None,
        num_query_groups=groups,
        rotary_base=base,
        use_rope_scaling=is_scaled,
        rope_scaling_factor=float(rope["factor"]) if is_scaled else GPT2Config.rope_scaling_factor,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )
    check_supported(
        {**config, **rope},
        hidden_act=("silu",),
        attention_bias=(False,),
        mlp_bias=(False,),
        head_dim=(None, ours.head_size),
        rope_type=("default", "llama3"),
        rope_theta=(base,),
    )
    window = config.get("sliding_window")
    if window is not None and window < ours.max_position_embeddings:
        raise ValueError(
            f"the Hugging Face config says sliding_window={window} and max_position_embeddings={ours.max_position_embeddings}, "
            f"and attention reaches all positions here. With max_position_embeddings={window} the model is the same for as many."
        )
    return ours


_LLAMA = Layout(
    model_class="LlamaForCausalLM",
    model_types={
        "llama": {},
        "mistral": {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    },
    prefix="model.",
    block="model.layers",
    modules={
        "word_embeddings": ("model.embed_tokens",),
        "input_layernorm": ("input_layernorm",),
        "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query": ("self_attn.q_proj",),
        "attention.key_value": ("self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
        "transformer.final_layernorm": ("model.norm",),
        "output_layer": ("lm_head",),
    },
    has_conv=False,
    has_biases=False,
    buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    rows=(
        ("vocab_size", "vocab_size", 32000),
        ("max_position_embeddings", "max_position_embeddings", 2048),
        ("hidden_size", "hidden_size", 4096),
        ("num_layers", "num_hidden_layers", 32),
        ("num_attention_heads", "num_attention_heads", 32),
        ("intermediate_size", "intermediate_size", 11008),
        ("attention_dropout", "attention_dropout", 0.0),
        ("layernorm_epsilon", "rms_norm_eps", 1e-6),
        ("init_method_std", "initializer_range", 0.02),
    ),
    to_theirs=_llama_to_theirs,
    to_ours=_llama_to_ours,
)
LAYOUTS = {model_type: layout for layout in (_GPT2, _LLAMA) for model_type in layout.model_types}


def layout_of(config: GPT2Config) -> Layout:
    """The class of the model.

    Raises:
        ValueError: it is neither a GPT-2 nor a Llama.
    """
    if not replace(config, disable_bias_linear=False).architecture:  # theirs has zeros then
        return _GPT2
    if all(getattr(config, name) == value for name, value in _LLAMA_FLAGS.items()):
        return _LLAMA
    raise ValueError(
        f"a model with {config.architecture} has no layout of Hugging Face's here: theirs of GPT-2 has none of these, and "
        f"Llama's needs {GPT2Config(**_LLAMA_FLAGS).architecture}."
    )


def check_supported(config: Mapping[str, Any], **supported: tuple[object, ...]) -> None:
    """Returns if every key is left out of config.json, or has one of these values.

    Raises:
        ValueError: one has another.
    """
    for key, values in supported.items():
        if key in config and config[key] not in values:
            raise ValueError(
                f"the Hugging Face config says {key}={config[key]!r}, and this model supports only "
                f"{' or '.join(map(repr, values))}."
            )
