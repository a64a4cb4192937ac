"""The shape of a GPT-2 or a Llama: its flags, their checks, and what follows (padded vocabulary, parameters, FLOPs)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from megazero.logging import some
from megazero.mpu.sequence_mappings import sequence_slice_length
from megazero.option import as_given, check_options, flag_of, option

Recompute: TypeAlias = Literal["none", "selective", "full", "auto"]
RECOMPUTE = get_args(Recompute)
BLOCK_MODES = RECOMPUTE[:3]  # what one block can recompute
_Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of a module's parameters

# Fields that make another model: those that the shapes of its parameters show, and those that none does.
SIZES = ("num_layers", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size")
SEEN_IN_SHAPES = (
    *SIZES,
    "normalization",
    "swiglu",
    "position_embedding_type",
    "num_query_groups",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
)
_ROTARY = ("rotary_base", "use_rope_scaling", "rope_scaling_factor")
UNSEEN_IN_SHAPES = ("num_attention_heads", "layernorm_epsilon", *_ROTARY)
_BEYOND_GPT2 = {*SEEN_IN_SHAPES, *_ROTARY, "group_query_attention"} - {*SIZES}


@dataclass(frozen=True)
class GPT2Config:
    """Architecture of a GPT-2 (Radford et al. 2019) with Megatron-LM's flag names and defaults; by further flags, of a Llama.

    Raises:
        ValueError: a size is not positive, or absurd, a probability not in [0, 1), heads do not divide the hidden size, or
            options exclude each other.
    """

    # The upper bounds are beyond any model: a slip is told by its flag, before the bytes of a tensor overflow.
    num_layers: int = option(24, "transformer blocks", at_least=1, at_most=10**4)
    hidden_size: int = option(1024, "width of the residual stream", at_least=1, at_most=10**6)
    num_attention_heads: int = option(16, "attention heads; must divide the hidden size", at_least=1)
    intermediate_size: int | None = option(
        None,
        "width of the MLP (default: 4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to 64s)",
        at_least=1,
        at_most=10**7,
        aliases=("--ffn-hidden-size",),
    )
    max_position_embeddings: int = option(
        512, "positions: the longest sequence the model can read", at_least=1, at_most=10**9
    )
    vocab_size: int | None = option(
        None,
        "tokens in the vocabulary, before padding (default: the tokenizer's)",
        at_least=1,
        at_most=10**9,
    )
    make_vocab_size_divisible_by: int = option(
        128, "the vocabulary is padded to a multiple of this x model-parallel size", at_least=1, at_most=10**9
    )
    vocab_chunk_size: int = option(
        0,
        "number of vocabulary ids whose logits the loss computes at a time, and again in backward, instead of storing all "
        "logits (0: all at once, faster)",
        at_least=0,
    )
    sequence_chunk_size: int = option(
        0,
        "like --vocab-chunk-size, for positions of the sequence; with both, a chunk holds those ids at those positions "
        "(0: all at once, faster)",
        at_least=0,
    )
    attention_dropout: float = option(0.1, "dropout probability of attention weights", at_least=0, below=1)
    hidden_dropout: float = option(
        0.1, "dropout probability of embeddings and of each sub-block's output", at_least=0, below=1
    )
    layernorm_epsilon: float = option(
        1e-5, "added to the variance in layer norm", at_least=0, aliases=("--norm-epsilon",)
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option(
        "LayerNorm", "norm before attention, MLP and head; RMSNorm is Llama's", choices=("LayerNorm", "RMSNorm")
    )
    swiglu: bool = option(
        False, "MLPs of silu(gate) x up, Llama's, in place of GELU: both layers are --intermediate-size wide"
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = option(
        "learned_absolute",
        "one learned vector for each position; or rope, Llama's: attention turns queries and keys by their position",
        choices=("learned_absolute", "rope"),
    )
    rotary_base: int = option(10000, "with --position-embedding-type rope: base of the wavelengths", at_least=1)
    use_rope_scaling: bool = option(
        False, "with --position-embedding-type rope: long wavelengths are longer, as from Llama 3.1 on"
    )
    rope_scaling_factor: float = option(
        8.0, "with --use-rope-scaling: by what factor (8 in Llama 3.1, 32 in Llama 3.2)", at_least=1
    )
    group_query_attention: bool = option(
        False, "several attention heads share their keys and values, in --num-query-groups groups"
    )
    num_query_groups: int | None = option(
        None, "with --group-query-attention: heads of keys and values; must divide the attention heads", at_least=1
    )
    disable_bias_linear: bool = option(False, "linear layers without biases, as Llama's")
    untie_embeddings_and_output_weights: bool = option(
        False, "the head has a weight of its own, instead of the word embeddings'"
    )
    init_method_std: float = option(0.02, "standard deviation of initial weights", at_least=0)
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass instead of storing them")
    checkpoint_num_layers: int = option(1, "blocks recomputed together with --checkpoint-activations", at_least=1)
    recompute: Recompute | None = option(
        None,
        "what backward recomputes: none, selective (the inside of attention), full (whole blocks, as --checkpoint-activations), "
        "or auto (per block, whatever is fastest within --recompute-budget-gb)",
        choices=RECOMPUTE,
    )
    recompute_budget_gb: float | None = option(
        None, "with --recompute auto: GB (10^9 bytes) per rank for what the blocks keep for backward"
    )
    sequence_parallel: bool = option(
        False, "split norms, dropout and residuals along the sequence, over the model-parallel ranks"
    )
    # Kernels of the same norm. Another norm makes another model, and is a field of its own.
    layernorm: Literal["torch", "apex"] = option(
        "torch",
        "layer norm kernel; apex needs NVIDIA apex (not the package of that name on PyPI)",
        choices=("torch", "apex"),
    )
    compile: bool = option(False, "torch.compile each transformer block, and the loss if its logits are not chunked")
    memory_centric_tiled_linear: bool = option(
        False, "split the MLP's two layers into tiles, which --zero-stage 3 gathers one at a time"
    )
    tile_factor: int = option(
        1, "with --memory-centric-tiled-linear: N x 4N tiles per layer, N along the hidden size", at_least=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_recompute()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}: "
                "every head has the same size. Change one of them."
            )
        self._check_attention()
        if self.normalization == "RMSNorm" and self.layernorm != "torch":
            raise ValueError(
                f"--layernorm {self.layernorm} is a kernel of layer norm, and --normalization is RMSNorm. Drop one of them."
            )
        self._check_tiles()

    def _check_recompute(self) -> None:
        if self.checkpoint_activations and self.recompute not in (None, "full"):
            raise ValueError(
                f"--checkpoint-activations is --recompute full, and --recompute {self.recompute} was given too. Give one of them."
            )
        budget = self.recompute_budget_gb
        if (self.recompute == "auto") != (budget is not None):
            raise ValueError(
                f"--recompute is {self.recompute or 'not given'} and --recompute-budget-gb is "
                f"{'not given' if budget is None else budget}: auto works within a budget. Give --recompute auto and a number of "
                "GB, or neither."
            )
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError(f"--recompute-budget-gb is {budget}; it is a number of GB above 0.")
        if self.recompute == "auto" and self.checkpoint_num_layers > 1:
            raise ValueError(
                f"--recompute auto decides for each block by itself, and --checkpoint-num-layers {self.checkpoint_num_layers} "
                "recomputes several together. Drop one of them."
            )

    def _check_attention(self) -> None:
        if self.group_query_attention != (self.num_query_groups is not None):
            raise ValueError(
                f"--group-query-attention is {'' if self.group_query_attention else 'not '}given and --num-query-groups is "
                f"{self.num_query_groups or 'not given'}: one says that heads share keys and values, the other in how many "
                "groups. Give both, or neither."
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by --num-query-groups "
                f"{self.num_query_groups}: groups have the same number of heads. Change one of them."
            )
        if self.position_embedding_type == "rope" and self.head_size % 2:
            raise ValueError(
                f"--position-embedding-type rope turns pairs of a head's elements, and heads have {self.head_size}: "
                f"--hidden-size {self.hidden_size} / --num-attention-heads {self.num_attention_heads}. Change one of them."
            )
        for given, name, needed in (
            (self.position_embedding_type == "rope", "rotary_base", "--position-embedding-type rope"),
            (self.position_embedding_type == "rope", "use_rope_scaling", "--position-embedding-type rope"),
            (self.use_rope_scaling, "rope_scaling_factor", "--use-rope-scaling"),
        ):
            field = GPT2Config.__dataclass_fields__[name]
            if not given and getattr(self, name) != field.default:
                raise ValueError(
                    f"{as_given(field, getattr(self, name))} is of {needed}, which is not given. Give both, or neither."
                )

    def _check_tiles(self) -> None:
        if self.memory_centric_tiled_linear and self.sequence_parallel and self.layernorm != "torch":
            raise ValueError(
                f"--memory-centric-tiled-linear with --sequence-parallel needs --layernorm torch, not {self.layernorm}: the "
                "norms sum their gradients over slices of the sequence by themselves there."
            )
        if self.tile_factor > 1 and not self.memory_centric_tiled_linear:
            raise ValueError(
                f"--tile-factor {self.tile_factor} is the number of tiles of --memory-centric-tiled-linear, which is not given. "
                "Give both, or none."
            )
        if self.memory_centric_tiled_linear and not self.tile_factor <= min(self.hidden_size, self.mlp_size // 4):
            raise ValueError(
                f"--tile-factor {self.tile_factor} asks for more tiles than --hidden-size {self.hidden_size} or a quarter of "
                f"the MLP's width {self.mlp_size} has features. Choose a smaller one."
            )

    @classmethod
    def of_saved(cls, client_state: Any, where: object) -> GPT2Config:
        """The model of a checkpoint of the GPT-2 job, from its client state; `where` it lies is for messages.

        Raises:
            ValueError: the client state does not say, or not as this version does.
        """
        saved = client_state.get("model") if isinstance(client_state, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(
                f"{where} does not say what model it is of: its client state has no 'model', the fields of a GPT2Config, as "
                "checkpoints of pretrain_gpt2.py and imported ones have. zero_to_fp32.py writes the weights of any; those of "
                "a Hugging Face model can be imported beside its config.json (docs/checkpoints.md)."
            )
        try:
            return cls(**saved)
        except TypeError as error:
            raise ValueError(f"{where} is of a model that this version does not know: {error}.") from error

    def for_inference(self) -> GPT2Config:
        """The same model of the same weights, without what only training needs, or only some machines have."""
        return replace(
            self,
            checkpoint_activations=False,
            recompute=None,
            recompute_budget_gb=None,
            memory_centric_tiled_linear=False,
            tile_factor=GPT2Config.tile_factor,
            sequence_parallel=False,
            compile=False,
            layernorm="torch",
        )

    @property
    def blocks_add_biases(self) -> bool:
        """Whether attention and MLP leave their last bias to the block, which uses it on slices of the sequence.

        Tiles add it themselves: beside them attention and MLP are ZeRO units of their own, whose parameters the block cannot
        read.
        """
        return self.sequence_parallel and not self.memory_centric_tiled_linear

    @property
    def recompute_mode(self) -> Recompute:
        """What backward recomputes, from `recompute` and `checkpoint_activations`."""
        return self.recompute or ("full" if self.checkpoint_activations else "none")

    def differences(self, other: GPT2Config) -> dict[str, tuple[Any, Any]]:
        """The fields that make `other` another model, with the values of both."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in (*SEEN_IN_SHAPES, *UNSEEN_IN_SHAPES)}
        for name, number in (("intermediate_size", "mlp_size"), ("num_query_groups", "key_value_heads")):
            if getattr(self, name) != getattr(other, name):  # None is a number, too
                pairs[name] = getattr(self, number), getattr(other, number)
        if self.key_value_heads != other.key_value_heads and self.group_query_attention > other.group_query_attention:
            pairs["group_query_attention"] = True, False  # the number alone would be refused
        if self.position_embedding_type == other.position_embedding_type == "rope":
            del pairs["max_position_embeddings"]  # a limit alone, which no parameter has
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def architecture(self) -> str:
        """The flags that make the model another than a GPT-2, as given."""
        plain = replace(self, **{name: getattr(GPT2Config, name) for name in _BEYOND_GPT2})
        others = self.differences(plain)
        return " ".join(as_given(each, getattr(self, each.name)) for each in fields(self) if each.name in others)

    @property
    def recomputed_together(self) -> int:
        """Blocks that one checkpointed call recomputes."""
        return self.checkpoint_num_layers if self.recompute_mode == "full" else 1

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: `num_query_groups`, or as many as of queries."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP's hidden layer: `intermediate_size`, or what Megatron-LM takes, also for SwiGLU's three matrices."""
        default = 64 * max(1, self.hidden_size // 24) if self.swiglu else 4 * self.hidden_size
        return self.intermediate_size or default

    def require_vocab_size(self) -> int:
        """`vocab_size`, once it is known.

        Raises:
            ValueError: it was neither given nor taken from a tokenizer.
        """
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set: pass --vocab-size, or let the job take that of its tokenizer.")
        return self.vocab_size

    def padded_vocab_size(self, model_parallel_size: int) -> int:
        """`vocab_size` rounded up so that every model-parallel rank holds the same, hardware-friendly number of rows."""
        multiple = self.make_vocab_size_divisible_by * model_parallel_size
        return -(-self.require_vocab_size() // multiple) * multiple

    @property
    def parallel_sizes(self) -> list[int]:
        """The numbers of tensor-parallel ranks over which heads and widths split evenly, ascending."""
        common = math.gcd(self.key_value_heads, self.hidden_size, self.mlp_size)  # groups divide heads
        return [size for size in range(1, common + 1) if common % size == 0]

    def check_parallel(self, model_parallel_size: int) -> None:
        """Checks that heads and widths split evenly over `model_parallel_size` ranks. Communicates nothing.

        Raises:
            ValueError: one does not; the message names both flags.
        """
        for name, value in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_query_groups", self.key_value_heads),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.mlp_size),
        ):
            if value % model_parallel_size:
                raise ValueError(
                    f"{flag_of(name)} {value} is not divisible by --model-parallel-size {model_parallel_size}: every rank holds "
                    f"an equal share. Change {flag_of(name)}, or use a --model-parallel-size of "
                    f"{', '.join(map(str, self.parallel_sizes))}."
                )
        tiles = 4 * self.tile_factor if self.memory_centric_tiled_linear else 1
        if model_parallel_size > 1 and self.mlp_size % (tiles * model_parallel_size):
            raise ValueError(
                f"the MLP's width {self.mlp_size} does not make {tiles} tiles (4 x --tile-factor) that can each be cut over "
                f"--model-parallel-size {model_parallel_size}: it must be a multiple of {tiles * model_parallel_size}. Choose "
                "another --tile-factor."
            )

    def check_sequence(self, seq_length: int, model_parallel_size: int = 1) -> None:
        """Checks that there is a position for every token of a sequence, and that it can be cut. Communicates nothing.

        Raises:
            ValueError: the sequence is longer than `max_position_embeddings`; or the model is sequence-parallel and it does not
                divide by `model_parallel_size`.
        """
        if self.sequence_parallel:
            sequence_slice_length(seq_length, model_parallel_size)
        if seq_length > self.max_position_embeddings:
            is_learned = self.position_embedding_type == "learned_absolute"
            raise ValueError(
                f"a sequence of {seq_length} tokens (--seq-length) does not fit --max-position-embeddings "
                f"{self.max_position_embeddings}{': positions are learned, one vector each' if is_learned else ''}. Shorten the "
                "sequence or train a model with more positions."
            )

    def full_shapes(self) -> _Shapes:
        """Name and full shape (uncut, vocabulary without padding) of every parameter of a `GPT2Model`, in its order."""
        h, f, kv = self.hidden_size, self.mlp_size, self.key_value_heads * self.head_size

        def layer(*weight: int, has_bias: bool = not self.disable_bias_linear) -> _Shapes:
            return {"weight": weight, "bias": weight[:1]} if has_bias else {"weight": weight}

        norm = layer(h, has_bias=self.normalization == "LayerNorm")
        table = layer(self.require_vocab_size(), h, has_bias=False)
        qkv = {"query": layer(h, h), "key_value": layer(2 * kv, h)} if kv < h else {"query_key_value": layer(3 * h, h)}
        block = {
            "input_layernorm": norm,
            **{f"attention.{name}": shapes for name, shapes in qkv.items()},
            "attention.dense": layer(h, h),
            "post_attention_layernorm": norm,
            "mlp.dense_h_to_4h": layer((1 + self.swiglu) * f, h),
            "mlp.dense_4h_to_h": layer(h, f),
        }
        model = {"word_embeddings": table}
        if self.position_embedding_type == "learned_absolute":
            model["position_embeddings"] = layer(self.max_position_embeddings, h, has_bias=False)
        for i in range(self.num_layers):
            model.update({f"transformer.layers.{i}.{name}": shapes for name, shapes in block.items()})
        model["transformer.final_layernorm"] = norm
        if self.untie_embeddings_and_output_weights:
            model["output_layer"] = table
        return {f"{module}.{name}": shape for module, shapes in model.items() for name, shape in shapes.items()}

    def refuse_other_names(self, names: Iterable[str], where: object) -> None:
        """Raises a ValueError if a checkpoint has parameters that a `GPT2Model` has not: without them it is another model."""
        shapes = self.full_shapes()
        if others := [name for name in names if name not in shapes]:
            raise ValueError(
                f"{where} is not of this library's GPT2Model: it has {some(others)}. Merge adapters into the weights that they "
                "change, or open a changed GPT2Model by open_checkpoint(config, changed); use another model of your own by "
                "megazero.initialize without an optimizer, and load_checkpoint."
            )

    def num_parameters(self) -> int:
        """Logical parameters: the vocabulary without padding, the tied head counted once."""
        return sum(math.prod(shape) for shape in self.full_shapes().values())

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs per token of a forward and a backward pass, without recomputation.

        Counts matrix products only: 6 per weight that multiplies (the head included, embedding look-ups not), and
        12 x seq_length x hidden_size per block for attention scores and values. The scores count in full although half are
        masked, as in Megatron-LM (arXiv:2104.04473) and PaLM (arXiv:2204.02311, app. B), so that numbers compare.
        """
        h, f, kv = self.hidden_size, self.mlp_size, self.key_value_heads * self.head_size
        block = 2 * h * h + 2 * h * kv + (2 + self.swiglu) * h * f
        weights = self.num_layers * block + self.require_vocab_size() * h
        return 6 * weights + 12 * self.num_layers * seq_length * h
