"""TorchModel: what torch modules do beyond the contract in test_models.py."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from steepest.core.models.torch import TorchModel, accuracy
from steepest.errors import ConfigurationError, ModelError
from tests.model_contract import Bound, X, Y, network, same, sgd, torch_model

# -- torch: parameters ----------------------------------------------------------------------------


def test_bind_keeps_values_and_makes_views() -> None:
    module = network()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    bound = Bound(torch_model(module))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == bound.weight(name).data_ptr()
    bound.weights.zero_()
    assert not any(p.any() for p in module.parameters())


def test_gradients_are_those_of_plain_autograd() -> None:
    plain, bound = network(), Bound(torch_model())
    F.cross_entropy(plain(X[:4]), Y[:4]).backward()
    bound.compute()
    for name, parameter in plain.named_parameters():
        assert torch.equal(bound.gradient(name), parameter.grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Linear(3, 3, dtype=torch.float64),
            nn.Linear(3, 3, dtype=torch.float64),
        )
        self.head.weight = self.body.weight
        self.unused = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def test_tied_parameters_are_one_entry_and_stay_tied() -> None:
    bound = Bound(torch_model(Tied()))
    module = bound.model.module
    assert module.head.weight is module.body.weight
    assert bound.layout.entries[bound.layout.index["body.weight"]].aliases == ("head.weight",)
    bound.compute()
    (expected,) = torch.autograd.grad(F.cross_entropy(module(X[:4]), Y[:4]), module.body.weight)
    assert torch.equal(bound.gradient("body.weight"), expected)


def test_parameters_without_gradient_are_zero_and_absent() -> None:
    bound = Bound(torch_model(Tied()))
    bound.gradients.fill_(1)
    bound.compute()
    absent = {bound.layout.entries[index].name for index, _, present in bound.calls if not present}
    assert absent == {"unused.weight", "unused.bias"}
    assert len(bound.calls) == len(bound.layout.entries)
    assert not bound.gradient("unused.weight").any()


def test_frozen_parameters_and_those_unknown_to_the_optimizer_are_laid_out_but_not_trained() -> (
    None
):
    module = network()
    module[0].weight.requires_grad_(False)
    known = [p for name, p in module.named_parameters() if name != "2.bias"]
    bound = Bound(torch_model(module, optimizer=lambda _: torch.optim.SGD(known, lr=0.1)))
    bound.compute()
    frozen = {entry.name for entry in bound.layout.entries if not entry.trainable}
    assert frozen == {"0.weight", "2.bias"}
    assert frozen.isdisjoint(bound.layout.entries[index].name for index, _, _ in bound.calls)
    assert len(bound.calls) == len(bound.layout.entries) - 2
    assert all(p.grad is None for p in module.parameters()), "gradients do not pile up anywhere"
    assert torch.equal(bound.weight("2.bias"), module[2].bias)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self, layers: nn.Sequential, times: int) -> None:
            super().__init__()
            self.layers, self.times = layers, times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[:2](x)
            for _ in range(self.times):
                x = checkpoint(
                    nn.Sequential(self.layers[2:4], nn.ZeroPad1d((0, 1))),
                    x,
                    use_reentrant=reentrant,
                )
            return self.layers[4](x[:, :3])

    plain, bound = Bound(torch_model()), Bound(torch_model(Saving(network(), 1)))
    assert plain.compute().loss == bound.compute().loss
    assert torch.equal(plain.gradients, bound.gradients)
    twice = Bound(torch_model(Saving(network(), 2)))
    if reentrant:  # each segment is a backward pass of its own: no gradient is known to be complete
        with pytest.raises(ModelError, match="accumulated twice.*use_reentrant=False"):
            twice.compute()
    else:
        twice.compute()
        assert len(twice.calls) == len(twice.layout.entries)


def test_a_backward_pass_of_the_users_own_is_not_taken_for_a_step() -> None:
    bound = Bound(torch_model())
    bound.compute()
    wanted = bound.gradients.clone()
    bound.model.module(X).sum().backward()
    assert torch.equal(bound.gradients, wanted)
    assert len(bound.calls) == len(bound.layout.entries)
    bound.compute()
    assert torch.equal(bound.gradients, wanted), "what the user accumulated is not added"


# -- torch: state, batches, losses ----------------------------------------------------------------


def normed() -> TorchModel:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    ).double()
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module[2].eval()
    return torch_model(module)


def test_a_model_that_is_dropped_is_freed_with_its_parameters() -> None:
    bound = Bound(torch_model())
    for _ in range(3):
        bound.compute()
    dropped = [weakref.ref(bound.model), *map(weakref.ref, bound.model.module.parameters())]
    del bound
    gc.collect()
    assert [reference() for reference in dropped] == [None] * len(dropped)


def test_a_step_that_is_given_up_leaves_no_graph() -> None:
    """It would stay beside that of the next step, and the collector sees no circle that leads through one."""
    outputs: list[weakref.ref[torch.Tensor]] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs.append(weakref.ref(output))
        raise KeyError

    bound = Bound(torch_model(loss=loss))
    with contextlib.suppress(KeyError):
        bound.compute()
    gc.collect()
    assert [output() for output in outputs] == [None]


def test_buffers_are_the_state_and_evaluation_leaves_them_alone() -> None:
    bound, other = Bound(normed()), Bound(normed())
    flags = [module.training for module in bound.model.module.modules()]
    bound.compute()
    before = bound.everything()
    bound.model.evaluate(bound.batch(5, 6))
    assert same(bound.everything(), before)
    assert [module.training for module in bound.model.module.modules()] == flags
    state = bound.model.state()
    assert state.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert state["1.num_batches_tracked"] == 1
    other.model.load_state(state)
    assert same(list(other.model.state().values()), list(state.values()))
    other.model.state()["1.running_mean"].zero_()
    assert torch.equal(other.model.module[1].running_mean, state["1.running_mean"]), (
        "a state is a copy"
    )


def test_evaluation_restores_the_module_when_the_loss_raises() -> None:
    bound = Bound(normed())
    with pytest.raises(ValueError, match="batch_size"):
        bound.model.evaluate((X, Y[:3]))
    assert bound.model.module.training


@pytest.mark.parametrize(
    "state", [{"nothing": torch.zeros(1)}, {"1.running_mean": torch.zeros(())}]
)
def test_a_state_of_another_model_is_refused(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelError, match="made by another model"):
        Bound(normed()).model.load_state(state)


def test_a_loss_may_say_what_its_batch_weighs() -> None:
    bound = Bound(
        torch_model(loss=lambda scores, y: (F.cross_entropy(scores, y), torch.tensor(2.5)))
    )
    computed = bound.compute()
    assert (computed.weight, computed.samples) == (2.5, 4)
    assert {weight for _, weight, _ in bound.calls} == {2.5}
    assert bound.model.evaluate(bound.batch()).weight == 2.5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda o, y: F.cross_entropy(o, y, reduction="none"),
            "the loss is a tensor of shape (4,)",
        ),
        (lambda o, y: F.cross_entropy(o, y).item(), "the loss is float"),
        (lambda o, y: None, "the loss is NoneType"),
        (lambda o, y: F.cross_entropy(o, y).detach(), "does not depend on any trainable parameter"),
        (lambda o, y: (F.cross_entropy(o, y), -1.0), "the loss weighs -1.0"),
        (lambda o, y: (F.cross_entropy(o, y), float("nan")), "the loss weighs nan"),
        (lambda o, y: (F.cross_entropy(o, y), float("inf")), "the loss weighs inf"),
        (lambda o, y: (F.cross_entropy(o, y), 1.0, 2.0), "the loss is a tuple of 3"),
    ],
)
def test_losses_that_make_no_sense_are_refused(loss: Any, message: str) -> None:
    bound = Bound(torch_model(loss=loss))
    with pytest.raises(ModelError) as caught:
        bound.compute()
    assert message in str(caught.value)
    assert bound.calls == []


def test_metrics_may_be_numpys() -> None:
    def mean(output: torch.Tensor, target: torch.Tensor) -> float:
        return float(output.numpy().mean())

    bound = Bound(torch_model(metrics={"mean": mean}))
    assert bound.compute(metrics=True).metrics == bound.model.evaluate(bound.batch()).metrics


def test_numpy_data_and_named_batches_reach_the_module_as_tensors() -> None:
    pair = namedtuple("pair", "x y")
    bound = Bound(torch_model(data=(X.numpy(), Y.numpy())))
    assert (
        bound.compute()
        == bound.compute(pair(X[:4], Y[:4]))
        == bound.compute([X[:4].numpy(), Y[:4]])
    )


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is one, with something beside its values."""

    def __init__(self, data: Any, made_by: str) -> None:
        super().__init__(data)
        self.made_by = made_by


class Rows(list[Any]):
    """A list that is not made from another one."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__([a, b])


class Graph(dict[str, Any]):
    """A mapping that moves itself, as tensordict's and torch_geometric's do."""

    def to(self, device: torch.device) -> Graph:
        return Graph(self, moved=device)

    def pin_memory(self) -> Graph:
        raise AssertionError


PACKED = nn.utils.rnn.pack_sequence([X[0], X[1]])


@pytest.mark.parametrize(
    "batch",
    [
        Encoding({"x": X, "y": (Y, "text")}, made_by="a tokenizer"),
        OrderedDict(x=X),
        defaultdict(list, x=[X]),
        MappingProxyType({"x": X}),
        Rows(X, Y),
        namedtuple("pair", "x y")(X, Y),
        PACKED,
        (X, {"y": Encoding({"y": Y}, made_by="")}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_keeps_its_type_and_is_not_the_loaders_own(batch: Any) -> None:
    seen: list[Any] = []

    class Sees(TorchModel):
        def loss(self, batch: Any) -> Any:
            seen.append(batch)
            return self.module(X[:2]).sum(), 4

    model = Sees(network(), data=(X, Y), batch_size=4, optimizer=sgd)
    Bound(model).compute(batch)
    assert type(seen[0]) is type(batch)
    assert repr(seen[0]) == repr(batch)
    assert getattr(seen[0], "made_by", "") == getattr(batch, "made_by", "")
    if isinstance(seen[0], (dict, UserDict, list)):
        seen[0].clear()
        assert len(batch) > 0


def test_what_moves_itself_does_and_what_cannot_be_copied_is_named() -> None:
    bound = Bound(torch_model())
    assert bound.model._to_device(Graph(x=X)).keys() == {"x", "moved"}

    class Fixed(Mapping[str, Any]):
        def __init__(self) -> None: ...
        def __getitem__(self, key: str) -> Any:
            return X

        def __iter__(self) -> Iterator[str]:
            return iter("x")

        def __len__(self) -> int:
            return 1

    with pytest.raises(ModelError, match=r"a batch is a Fixed, which .* return a dict from"):
        bound.compute(Fixed())


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), 3),
        ({"a": torch.zeros(5)}, 5),
        ([("long text", "b"), torch.zeros(2)], 2),
        ({"text": ["abc", "de", "f"]}, 3),
        ((torch.tensor(1.0), torch.zeros(6)), 6),
        (torch.tensor(1.0), 1),
        ("text", 1),
    ],
)
def test_samples_are_counted_in_batches_of_any_form(batch: Any, samples: int) -> None:
    class Any_(TorchModel):  # noqa: N801
        def loss(self, batch: Any) -> torch.Tensor:
            return self.module(X[:2]).sum()

    model = Any_(network(), data=(X, Y), batch_size=1, optimizer=sgd)
    assert Bound(model).compute(batch).samples == samples


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.LazyLinear(2), {}, "parameter 'weight' is lazy"),
        (F.relu, {}, "module is a function"),
        (nn.Linear(3, 2).requires_grad_(False), {}, "nothing to train"),
        (None, {"optimizer": lambda module: None}, "returned NoneType"),
        (None, {"batch_size": None}, "batch_size=None"),
        (None, {"loss": nn.MSELoss}, r"loss=MSELoss is a class: give MSELoss\(\)"),
        (None, {"loss": "mse"}, r"loss is of type str: give a function of \(output, target\)"),
        (
            None,
            {"optimizer": sgd(network())},
            "optimizer is of type SGD: give a function of the module",
        ),
        (None, {"optimizer": torch.optim.Adam}, "optimizer=Adam: give a function of the module"),
        (None, {"optimizer": None}, "optimizer=None: give a function of the module"),
        (
            None,
            {"lr_scheduler": StepLR},
            "lr_scheduler=StepLR needs more than the optimizer: give a function",
        ),
        (None, {"lr_scheduler": StepLR(sgd(network()), 1)}, "lr_scheduler is of type StepLR: give"),
        (
            None,
            {"learning_rate": 0.1},
            "of type float: give a function of the step.*optimizer's lr=",
        ),
        (None, {"metrics": [accuracy]}, r"give functions of \(output, target\) by name"),
        (None, {"metrics": {"accuracy": 0.5}}, r"give functions of \(output, target\) by name"),
    ],
)
def test_models_that_cannot_be_are_refused(
    module: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        torch_model(module, **options)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (torch.zeros(2, 3),), {"x": torch.zeros(2)}])
def test_a_batch_that_no_loss_of_output_and_target_takes_is_refused(batch: Any) -> None:
    model = TorchModel(nn.Linear(3, 2), loss=F.mse_loss, data=(X, Y), batch_size=2, optimizer=sgd)
    with pytest.raises(ModelError, match=r"the batch is a .* batches \(\*inputs, target\): give"):
        model.loss(batch)
