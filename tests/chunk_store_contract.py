"""What holds of every chunk on a server, dense or opaque, see `GradientStore` and `HeldChunk`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytest
import torch

from steepest.core.engine.chunk_store import GradientStore, HeldChunk, StagedPush
from steepest.core.messages.message import PushId
from steepest.errors import ProtocolError
from tests.reference import same_bits

NO_CHANGES: list[dict[str, Any]] = [{}]


def push_of(worker: int, sequence: int = 1) -> PushId:
    return PushId(worker, 0, sequence)


def content(held: HeldChunk) -> dict[str, torch.Tensor]:
    """All that a server holds of a chunk: its weights, and its records by key and place."""
    records = {f"{about['key']} {about['start']}": value.clone() for about, value in held.state()}
    records.pop("life 0", None)  # of tables: drawn by chance for each store
    return {"weights": held.weights.clone(), **records}


def stage(store: GradientStore, payload: torch.Tensor | None, worker: int = 0) -> PushId:
    """Stages a gradient as a server does, of one sample."""
    push = push_of(worker)
    codec = store.codec_of(payload, None)
    store.staged[push] = StagedPush(frozenset({worker}), payload, 1.0, 1.0, frozenset(), codec)
    return push


def update(store: GradientStore, *payloads: torch.Tensor | None, clip: float = 1.0) -> None:
    """Takes one step with the mean of some workers' gradients, as a server does on COMMIT."""
    pushes = [stage(store, payload, worker) for worker, payload in enumerate(payloads)]
    store.reduce(pushes)
    store.clip(clip)
    store.apply(NO_CHANGES, 1.0)
    for push in pushes:
        store.forget(push)


def loaded(target: HeldChunk, source: HeldChunk) -> None:
    """Gives a store the state of another, as an install does, or a hand-over of an opaque chunk."""
    records = [(about, value.clone()) for about, value in source.state()]
    if not target.is_opaque:
        for about, value in records:
            target.check_state(about, value)
        target.try_state(records)
    target.clear_state()
    target.weights.copy_(source.weights)
    for about, value in records:
        target.load_state(about, value)
    target.end_state()


class ChunkStoreContract:
    """Tests of a kind of stores, of which a class derived from this makes new ones and gradients."""

    @abstractmethod
    def make(self) -> GradientStore:
        """A new store, the same each time, whose optimizer has a state."""

    def held(self, store: Any) -> HeldChunk:
        """The chunk that a store's updates change: the store itself."""
        return store

    @abstractmethod
    def gradient(self, value: float) -> torch.Tensor:
        """New bytes of a gradient of which all elements have a value."""

    # -- staging ---------------------------------------------------------------------------------

    def test_a_gradient_fits_and_one_byte_more_does_not(self) -> None:
        store, nbytes = self.make(), self.gradient(1.0).numel()
        assert store.fits(nbytes, None)
        assert not store.fits(nbytes + 1, None)
        assert store.staging_buffer(nbytes).numel() == nbytes

    def test_a_payload_of_another_is_copied_to_be_owned_and_an_own_one_is_not(self) -> None:
        store, lent = self.make(), self.gradient(2.0)
        own = store.own(lent)
        assert own.data_ptr() != lent.data_ptr()
        assert torch.equal(own, lent)
        assert store.own(own) is own

    def test_a_dropped_push_leaves_nothing(self) -> None:
        store = self.make()
        update(store, self.gradient(1.0))
        before = content(self.held(store))
        store.forget(stage(store, self.gradient(3.0)))
        assert store.contributors() == set()
        store.reduce([stage(store, self.gradient(3.0), worker) for worker in range(2)])
        assert store.contributors() == {0, 1}
        store.discard()
        assert store.contributors() == set()
        assert same_bits(content(self.held(store)), before)
        assert store.squares() == 0.0

    # -- updates ---------------------------------------------------------------------------------

    def test_the_same_calls_leave_the_same_bits(self) -> None:
        stores = self.make(), self.make()
        for store in stores:
            update(store, self.gradient(0.3), self.gradient(0.7), None)
            update(store, self.gradient(-0.1), clip=0.3)
        assert same_bits(content(self.held(stores[0])), content(self.held(stores[1])))
        assert not same_bits(content(self.held(stores[0])), content(self.held(self.make())))

    def test_the_update_is_of_the_mean(self) -> None:
        of_two, of_one = self.make(), self.make()
        update(of_two, self.gradient(1.0), self.gradient(3.0))
        update(of_one, self.gradient(2.0), self.gradient(2.0))
        assert same_bits(content(self.held(of_two)), content(self.held(of_one)))

    def test_a_clipped_update_is_that_of_the_smaller_gradient(self) -> None:
        clipped, small = self.make(), self.make()
        update(clipped, self.gradient(4.0), clip=0.5)
        update(small, self.gradient(2.0))
        assert same_bits(content(self.held(clipped)), content(self.held(small)))

    def test_payloads_stay_as_they_are(self) -> None:
        payload = self.gradient(4.0)
        update(self.make(), payload, clip=0.5)
        assert torch.equal(payload, self.gradient(4.0))

    def test_squares_are_those_of_the_mean_and_of_one_push(self) -> None:
        store = self.make()
        push = stage(store, self.gradient(2.0))
        assert store.check(push) > 0.0
        store.reduce([push])
        assert store.squares() == pytest.approx(store.check(push))
        assert store.check(stage(store, None, 1)) == 0.0

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_seen_and_its_worker_named(self, value: float) -> None:
        store = self.make()
        pushes = [stage(store, self.gradient(1.0)), stage(store, self.gradient(value), 1)]
        assert torch.isfinite(torch.tensor(store.check(pushes[0])))
        assert not torch.isfinite(torch.tensor(store.check(pushes[1])))
        store.reduce(pushes)
        assert not torch.isfinite(torch.tensor(store.squares()))
        assert {worker for worker, _ in store.culprits(pushes)} == {1}
        names = {name for _, name in store.culprits(pushes)}
        ((worker, name),) = store.culprits(pushes[:1])  # where only the sum is not finite
        assert worker == -1
        assert name in names

    # -- state -----------------------------------------------------------------------------------

    def test_a_store_with_anothers_state_goes_on_as_that(self) -> None:
        store = self.make()
        update(store, self.gradient(1.0))
        other = self.make()
        update(other, self.gradient(-5.0))  # which is replaced
        loaded(self.held(other), self.held(store))
        assert same_bits(content(self.held(other)), content(self.held(store)))
        for each in (store, other):
            update(each, self.gradient(0.5))
        assert same_bits(content(self.held(other)), content(self.held(store)))

    def test_a_store_without_state_takes_its_step_as_its_first(self) -> None:
        store, fresh = self.make(), self.make()
        update(store, self.gradient(1.0))
        self.held(store).clear_state()
        self.held(store).weights.copy_(self.held(fresh).weights)
        for each in (store, fresh):
            update(each, self.gradient(0.5))
        assert same_bits(content(self.held(store)), content(self.held(fresh)))

    def test_a_record_of_another_chunk_is_refused(self) -> None:
        store = self.make()
        update(store, self.gradient(1.0))
        before = content(self.held(store))
        about, value = self.held(store).state()[0]
        for strange in ({**about, "name": "of nobody"}, {"name": about["name"]}):
            with pytest.raises(ProtocolError):
                self.held(store).check_state(strange, value)
            with pytest.raises(ProtocolError):
                self.held(store).load_state(strange, value)
        assert same_bits(content(self.held(store)), before)

    def test_trying_a_state_changes_nothing(self) -> None:
        store, other = self.make(), self.make()
        update(store, self.gradient(1.0))
        before = content(self.held(other))
        if not self.held(other).is_opaque:
            self.held(other).try_state(self.held(store).state())
        assert same_bits(content(self.held(other)), before)

    def test_weights_may_move(self) -> None:
        store = self.make()
        update(store, self.gradient(1.0))
        before, memory = content(self.held(store)), self.held(store).weights.clone()
        self.held(store).move(memory)
        assert same_bits(content(self.held(store)), before)
        other = self.make()
        loaded(self.held(other), self.held(store))
        for each in (store, other):
            update(each, self.gradient(0.5))
        assert same_bits(content(self.held(store)), content(self.held(other)))

    def test_counts_are_numbers_by_name(self) -> None:
        for counts in self.held(self.make()).counts().values():
            assert all(isinstance(count, int) for count in counts.values())
