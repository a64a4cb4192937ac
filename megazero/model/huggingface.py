"""Names and layouts of Hugging Face's GPT-2 and Llama, both ways: pure functions on names, shapes and dicts of full tensors.

GPT-2's linear layers are `Conv1D` there, whose weight is [in, out]; ours is [out, in] as in `nn.Linear`. Where several of
Llama's layers are one of ours, as query, key and value, ours has the rows of all of them. Rotary positions turn the same pairs
of rows in both. The transformers package is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.logging import some
from megazero.model.config import GPT2Config
from megazero.model.huggingface_layouts import LAYOUTS, check_supported, layout_of

_BLOCK = re.compile(r"transformer\.layers\.(\d+)\.")
_HEAD = "lm_head.weight"


class Match(NamedTuple):
    """A parameter of ours, and those of theirs whose rows it has, equally many of each."""

    ours: str
    theirs: tuple[str, ...]
    is_transposed: bool  # theirs are [in, out]

    def renamed(self, rename: Callable[[str], str]) -> Match:
        """The same with other names of theirs."""
        return self._replace(theirs=tuple(map(rename, self.theirs)))

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of theirs, if that of ours is `shape`."""
        part = (shape[0] // len(self.theirs), *shape[1:])
        return part[::-1] if self.is_transposed else part

    def split(self, full: Tensor) -> list[Tensor]:
        """Theirs, from ours."""
        return [self._turned(part) for part in full.chunk(len(self.theirs))]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Ours, from theirs."""
        first, *others = map(self._turned, parts)
        return torch.cat([first, *others]) if others else first

    def _turned(self, part: Tensor) -> Tensor:
        return part.t().contiguous() if self.is_transposed else part


def to_huggingface(full_state_dict: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """The state dict of `transformers.GPT2LMHeadModel` or `LlamaForCausalLM` with the same function as our full one.

    GPT-2's has biases, which are zeros if ours has none.
    `lm_head.weight` of a tied head is the same tensor object as the embedding.

    Args:
        full_state_dict: merged and unpadded.

    Raises:
        ValueError: names are missing or unknown, or a tensor has another shape than `config` says; the first are listed. Or the
            model is neither of the two.
    """
    matches = matching_names(config)
    check_names(full_state_dict, (match.ours for match in matches), "the megazero state dict")
    shapes = {name: tuple(tensor.shape) for name, tensor in full_state_dict.items()}
    _check_shapes(shapes, config.full_shapes(), "the megazero state dict")
    out: dict[str, Tensor] = {}
    for match in matches:
        out.update(zip(match.theirs, match.split(full_state_dict[match.ours]), strict=True))
    embedding = out[matches[0].theirs[0]]
    out.update({name: embedding.new_zeros(shape) for name, shape in missing_biases(config).items()})
    if not config.untie_embeddings_and_output_weights:
        out[_HEAD] = embedding
    return out


def from_huggingface(state_dict: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """Our full (unpadded) state dict with the same function as that of a Hugging Face GPT-2 or Llama.

    Args:
        state_dict: of `GPT2LMHeadModel` or `LlamaForCausalLM`, or of `GPT2Model` or `LlamaModel` (without the prefix
            `transformer.` or `model.`). Buffers of masks and of rotary positions are ignored.
        config: its sizes; see `config_from_huggingface`.

    Raises:
        ValueError: names are missing or unknown, a tensor has another shape than `config` says, or `lm_head.weight` is not
            tied to the embedding, as `config` says.
    """
    matches = saved_names(state_dict, config, "the Hugging Face state dict", state_dict.__getitem__)
    return {match.ours: match.join(state_dict[key] for key in match.theirs) for match in matches}


def saved_names(saved: Mapping[str, Any], config: GPT2Config, what: str, read: Callable[[str], Tensor]) -> list[Match]:
    """Every parameter, in our order, with theirs as they are called in `saved`.

    Args:
        saved: as for `from_huggingface`; of what is in it only `shape` is looked at.
        what: how messages call it.
        read: the tensor of a name in `saved`, to compare the head with the embedding.

    Raises:
        ValueError: as `from_huggingface`.
    """
    layout, shapes = layout_of(config), config.full_shapes()
    bare = {name.removeprefix(layout.prefix): name for name in saved}
    bare = {name: key for name, key in bare.items() if not layout.buffers.fullmatch(name)}
    head = None if config.untie_embeddings_and_output_weights else bare.pop(_HEAD, None)
    matches = [match.renamed(lambda name: name.removeprefix(layout.prefix)) for match in matching_names(config)]
    check_names(bare, (name for match in matches for name in match.theirs), what)
    matches = [match.renamed(bare.__getitem__) for match in matches]
    found, expected = {}, {}
    for match in matches:
        step = -1 if match.is_transposed else 1
        for key in match.theirs:
            name = match.ours if len(match.theirs) == 1 else key
            found[name] = tuple(saved[key].shape)[::step]
            expected[name] = match.their_shape(shapes[match.ours])[::step]
    _check_shapes(found, expected, f"{what} (in megazero's names and layout)")
    embedding = matches[0].theirs[0]
    if head is not None and not torch.equal(read(head), read(embedding)):
        raise ValueError(
            f"{what}: {_HEAD} differs from {embedding}, but tie_word_embeddings is true, so this model has no separate head. "
            "Import a checkpoint in which they are equal."
        )
    return matches


def matching_names(config: GPT2Config) -> list[Match]:
    """Every parameter, in our order, with theirs as `GPT2LMHeadModel` or `LlamaForCausalLM` calls them.

    Raises:
        ValueError: the model is neither of the two.
    """
    layout, matches = layout_of(config), []
    for ours, shape in config.full_shapes().items():
        module, _, kind = _BLOCK.sub("", ours).rpartition(".")
        block = _BLOCK.match(ours)
        where = f"{layout.block}.{block[1]}." if block else ""
        theirs = tuple(f"{where}{name}.{kind}" for name in layout.modules[module])
        matches.append(Match(ours, theirs, layout.has_conv and block is not None and len(shape) == 2))
    return matches


def missing_biases(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """The biases that theirs has and ours has not (--disable-bias-linear), and their shapes: as zeros they change nothing."""
    if not (config.disable_bias_linear and layout_of(config).has_biases):
        return {}
    biased, ours = replace(config, disable_bias_linear=False), config.full_shapes()
    others = [match for match in matching_names(biased) if match.ours not in ours]
    return {name: biased.full_shapes()[match.ours] for match in others for name in match.theirs}


def config_to_huggingface(config: GPT2Config) -> dict[str, object]:
    """The `config.json` that goes with `to_huggingface`'s state dict.

    Raises:
        ValueError: the model is no GPT-2, and no Llama.
    """
    layout = layout_of(config)
    return {
        "model_type": next(iter(layout.model_types)),
        "architectures": [layout.model_class],
        **{theirs: getattr(config, ours) for ours, theirs, _ in layout.rows},
        **layout.to_theirs(config),
    }


def config_from_huggingface(config: Mapping[str, Any]) -> GPT2Config:
    """The `GPT2Config` of a Hugging Face `config.json`; keys that it leaves out have transformers' defaults.

    Warns if embeddings have another dropout than the rest there: here they have that of the rest.

    Raises:
        ValueError: it describes something that this model cannot compute (another activation, scaled rotary positions, ...).
    """
    check_supported(config, model_type=tuple(LAYOUTS))
    if config.get("quantization_config"):
        raise ValueError(
            "the Hugging Face config has a quantization_config; quantised checkpoints cannot be read. Import the model that was "
            "quantised."
        )
    if other := re.search(r"\w+For(?!CausalLM)\w+", str(config.get("architectures"))):
        raise ValueError(
            f"the Hugging Face config says architectures: {other[0]}, and only language models can be imported: this one has "
            "another head."
        )
    model_type = config.get("model_type", "gpt2")
    layout = LAYOUTS[model_type]
    config = {**layout.model_types[model_type], **config}
    return layout.to_ours(config, {ours: config.get(theirs, default) for ours, theirs, default in layout.rows})


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
            f"{some(unknown, 4) or 'nothing'}. Check the number of layers, and which model this is."
        )


def _check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    wrong = [
        f"{name} has {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise ValueError(f"{what} has other sizes than the configuration says: {some(wrong, 4)}.")
