"""Muon by itself, without an engine: torch.optim.Muon beside torch.optim.AdamW, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megazero.optim.cpu_adam import CPUAdam
from megazero.optim.muon import Muon, orthogonalized
from megazero.zero.param_groups import hidden_matrices


def make_model() -> nn.Module:
    """Tall, wide and square matrices, beside what is none of a hidden layer."""
    torch.manual_seed(0)
    model = nn.Module()
    model.embedding = nn.Embedding(11, 6)
    model.layers = nn.ModuleList([nn.Linear(6, 17), nn.Linear(17, 6), nn.Linear(6, 6)])
    model.head = nn.Linear(6, 11)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    x = model.embedding(tokens)
    for index in (0, 1, 2):
        x = torch.tanh(model.layers[index](x))
    return nn.functional.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
        {"ns_steps": 3},
    ],
    ids=str,
)
def test_weights_are_those_of_torchs_muon_and_adamw(settings):
    tokens, rates = torch.randint(0, 11, (5, 4, 9), generator=torch.Generator().manual_seed(1)), {"lr": 0.02}
    decay = {"weight_decay": settings.get("weight_decay", 0.1)}
    ours, theirs = make_model(), make_model()
    parts = [
        [p for n, p in m.named_parameters() if (n in hidden_matrices(m)) == is_matrix]
        for m in (ours, theirs)
        for is_matrix in (True, False)
    ]
    mine = Muon([{"params": parts[0], "use_muon": True}, {"params": parts[1]}], **rates, **settings)
    # Fused as ours: another last digit may tip a rounding to bf16 in Muon.
    others = [
        torch.optim.Muon(parts[2], **rates, **settings),
        torch.optim.AdamW(parts[3], **rates, **decay, fused=True),
    ]
    for batch in tokens:
        for model, optimizers in ((ours, [mine]), (theirs, others)):
            model.zero_grad()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy"])
def test_its_state_goes_on_in_another(way):
    tokens = torch.randint(0, 11, (2, 4, 9), generator=torch.Generator().manual_seed(1))

    def make(model: nn.Module) -> Muon:
        names = hidden_matrices(model)
        return Muon([{"params": [p], "use_muon": n in names} for n, p in model.named_parameters()], lr=0.02)

    def train(model: nn.Module, optimizer: Muon, batch: torch.Tensor) -> None:
        model.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    model = make_model()
    optimizer = make(model)
    train(model, optimizer, tokens[0])
    if way == "deepcopy":
        again, other = copy.deepcopy((model, optimizer))
    else:
        again = copy.deepcopy(model)
        other = make(again)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else torch shares the tensors
    for each in ((model, optimizer), (again, other)):
        train(*each, tokens[1])
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_hooks_run_once_in_a_step():
    model, calls = make_model(), []
    torch.optim.AdamW(model.parameters())  # from now on AdamW's step runs hooks, too
    optimizer = Muon(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss_of(model, torch.zeros(2, 5, dtype=torch.int64)).backward()
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("kind", [Muon, CPUAdam])
def test_a_closure_runs_first_with_gradients_and_its_value_is_returned(kind):
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    called, plain = make_model(), make_model()

    def closure() -> torch.Tensor:
        loss = loss_of(called, tokens)
        loss.backward()
        return loss

    loss = kind(called.parameters()).step(closure)
    optimizer = kind(plain.parameters())
    want = loss_of(plain, tokens)
    want.backward()
    optimizer.step()
    torch.testing.assert_close((loss, called.state_dict()), (want, plain.state_dict()), rtol=0, atol=0)


def test_a_matrix_without_a_gradient_stays():
    used, unused = (nn.Parameter(torch.eye(2)) for _ in range(2))
    optimizer = Muon([{"params": [unused, used], "use_muon": True}])
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.eye(2)) and not torch.equal(used, torch.eye(2))


def test_an_orthogonalized_matrix_has_singular_values_near_1_and_the_same_singular_vectors():
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) * 1e-6
    for x in (matrix, matrix.T):
        values = torch.linalg.svdvals(orthogonalized(x).float())
        assert values.min() > 0.6 and values.max() < 1.3, values
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        inner = u.T @ orthogonalized(x).float() @ vh.T
        assert (inner - inner.diag().diag()).abs().max() < 0.05, "bf16"
    assert torch.equal(orthogonalized(torch.zeros(3, 5)), torch.zeros(3, 5, dtype=torch.bfloat16))


def test_which_parameters_are_matrices_of_hidden_layers():
    model = make_model()
    model.layers.append(nn.Sequential(nn.Embedding(3, 4), nn.Conv1d(2, 3, 1), nn.LayerNorm(4)))
    model.layers[1].weight.use_muon = False  # as DeepSpeed's users say it
    model.head.weight.use_muon = True
    assert hidden_matrices(model) == {"layers.0.weight", "layers.2.weight", "head.weight"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"adjust_lr_fn": "spectral"}, "match_rms_adamw"),
        ({"lr": -1.0}, "learning rate"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        Muon([torch.zeros(2, 2, requires_grad=True)], **settings)


def test_what_is_no_matrix_is_refused_where_no_engine_brings_matrices():
    bias = torch.zeros(3, requires_grad=True)
    optimizer = Muon([{"params": [bias], "use_muon": True}])
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"matrices.*\(3,\)"):
        optimizer.step()
