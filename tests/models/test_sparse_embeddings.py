"""torch's embeddings with sparse gradients are refused, before anything travels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steepest import TorchModel
from steepest.errors import ModelError
from tests.model_contract import Bound
from tests.reference import sgd

WORDS, SIZE = 1000, 8
SAID = (
    f"a sparse gradient, but parameters are sent whole: {WORDS * SIZE * 4:,} bytes from each worker "
    "in each step, whatever the batch; use steepest.Embedding or steepest.EmbeddingBag, .* or "
    "sparse=False"
)


class Functional(nn.Module):
    """A sparse look-up that no module of torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WORDS, SIZE))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, sparse=True)


def model(table: nn.Module, trained: str = "") -> TorchModel:
    net = nn.Sequential(table, nn.Linear(SIZE, 1))
    return TorchModel(
        net,
        loss=lambda output, target: (output - target).square().mean(),
        data=(torch.arange(12)[:, None], torch.ones(12, 1)),
        batch_size=2,
        optimizer=lambda m: sgd()(m if not trained else m.get_submodule(trained)),
    )


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=rf"^'0', {kind.__name__}\(sparse=True\), has {SAID}"):
        model(kind(WORDS, SIZE, sparse=True))


@pytest.mark.long
def test_one_of_a_compiled_module_is_named_plainly() -> None:
    with pytest.raises(ModelError, match="^'0', Embedding"):
        model(torch.compile(nn.Embedding(WORDS, SIZE, sparse=True), backend="eager"))


def test_dense_gradients_and_untrained_weights_are_taken() -> None:
    model(nn.Embedding(WORDS, SIZE))
    model(nn.Embedding(WORDS, SIZE, sparse=True).requires_grad_(False))
    model(nn.Embedding(WORDS, SIZE, sparse=True), trained="1")


def test_a_sparse_gradient_of_anything_else_ends_the_first_step() -> None:
    with pytest.raises(ModelError, match=f"^'0.weight' has {SAID}"):
        Bound(model(Functional())).compute()
