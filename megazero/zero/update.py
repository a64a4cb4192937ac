"""One update of all that a rank owns, tile by tile: read ahead, stepped, written in the background, sent to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.optim.adam_kernels import AdamSettings, Operands, mixed, tiled, unmixed
from megazero.zero.bucket import MASTER, Bucket, Tile
from megazero.zero.home import Vector
from megazero.zero.sliced import Slice

if TYPE_CHECKING:
    from megazero.zero.optimizer import BucketOptimizer

# Most elements that a device steps in one call that covers several tiles. A call takes the host about 0.3 ms, however little
# there is to do; in twice that time a fast device steps about this many. Kernels that are not fused get fewer: they take memory
# for a whole batch.
BATCH_NUMEL = 1 << 26
UNFUSED_NUMEL = 1 << 24


class Update:
    """One step of a torch optimizer over the slices of trained buckets.

    Args:
        gradients: the reduced sum of each bucket's owned range.
        factor: multiplies the mean gradients.
        in_background: the update runs beside a schedule that changes the torch optimizer's settings.
        staged: if given, receives the new weights of each bucket, in P's dtype, instead of P.
        done: called with each bucket that has its new weights.
    """

    def __init__(
        self,
        optimizer: BucketOptimizer,
        gradients: Mapping[Bucket, Vector],
        factor: float,
        *,
        in_background: bool = False,
        staged: Mapping[Bucket, Tensor] | None = None,
        done: Callable[[Bucket], None] = Bucket.publish,
    ) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        self._factor = factor * next(iter(gradients)).gradient.to_mean  # of sums: all buckets' are over the same group
        self._in_background, self._staged, self._done = in_background, staged, done
        # As they are at this moment: hooks may come, and a schedule may change settings, while it runs in the background.
        self._steps_apart, self._adam = optimizer.steps_apart, optimizer.adam_apart
        self._scaling = self._kernel_scale() if optimizer.scales_itself else {}
        self._crossing: dict[Tile, Vector] = {}  # tiles of whole gradients, on their way over the link to O

    def run(self) -> None:
        """Steps bucket by bucket, so that one bucket's new parameters are on their way while the next bucket is updated."""
        if not self._in_background:  # else whoever started it has seen to that, if it writes to P
            for bucket in self._gradients:
                bucket.weights.settle()
        tiles = [tile for bucket in self._gradients for tile in bucket.tiles]
        batches = self._batches(tiles) if self._steps_apart else [tiles]
        self._prefetch(batches[0])
        for batch, ahead in zip(batches, [*batches[1:], []], strict=True):
            self._prefetch(ahead)
            self._step_tiles(batch)
            for bucket, _, stop in batch:
                if stop == bucket.owned_numel:
                    self._done(bucket)
        for bucket in self._gradients:
            bucket.optimizer_home.flush()

    def _batches(self, tiles: list[Tile]) -> list[list[Tile]]:
        """The tiles that each call of the torch optimizer steps: one; on a device several, up to BATCH_NUMEL elements together.

        If gradients are cast for the call, tiles are stepped one by one, because the casts take memory for a whole batch.
        """
        batches: list[list[Tile]] = []
        room = 0  # elements that may join the last batch
        for tile in tiles:
            bucket, numel = tile.bucket, tile.stop - tile.start
            joins = bucket.optimizer_home.device.type != "cpu" and bucket.gradient.dtype == torch.float32
            if joins and numel <= room:
                batches[-1].append(tile)
            else:
                batches.append([tile])
                room = BATCH_NUMEL if self._optimizer.scales_itself else UNFUSED_NUMEL
            room = room - numel if joins else 0
        return batches

    def _prefetch(self, tiles: list[Tile]) -> None:
        for tile in tiles:
            bucket, start, stop = tile
            gradient, home = self._gradients[bucket], bucket.optimizer_home
            for vector in (*bucket.states.values(), gradient):
                vector.prefetch(start, stop)
            # Only when stepping tile by tile: else the pages of all tiles would be taken at once, and kept.
            if self._steps_apart and gradient.link is not home.link:
                with gradient.at_hand(start, stop) as owned:
                    self._crossing[tile] = home.memory.hold(owned, room=bucket.tile_numel)

    def _gradient(self, tile: Tile) -> AbstractContextManager[Tensor]:
        """The tile's gradient at hand; ask for it only once."""
        bucket, start, stop = tile
        if tile in self._crossing:
            return self._crossing.pop(tile).at_hand()
        return self._gradients[bucket].at_hand(start, stop)

    def _step_tiles(self, tiles: list[Tile]) -> None:
        with ExitStack() as at_hand:
            states = {tile: self._bring(tile, at_hand) for tile in tiles}
            adam = self._one_pass_adam(tiles[0].bucket)  # if any, there is one tile: the host gets them one by one
            if adam is not None:
                is_written = self._step_in_one_pass(tiles[0], adam)
            else:
                for tile in tiles:
                    self._set_gradients(tile, at_hand)
                self._optimizer.step_slices(**self._scaling)
                is_written = False
            for tile in tiles:
                self._take_back(tile, states[tile])
                if not is_written:
                    self._write_weights(tile, states[tile][MASTER])

    def _bring(self, tile: Tile, at_hand: ExitStack) -> dict[str, Tensor]:
        """O of the tile, at hand. If it does not rest in memory, points the torch optimizer at it."""
        bucket = tile.bucket
        states = at_hand.enter_context(self._optimizer.state_at_hand(tile, bucket.states, writes=True))
        if bucket.is_swapped:
            for piece in self._slices(tile):
                piece.master.data = states[MASTER][piece.in_tile]
                state = self._optimizer.state.get(piece.master, {})
                state.update({key: states[key][piece.in_tile] for key in state if key in states})
        return states

    def _slices(self, tile: Tile) -> list[Slice]:
        """The slices in a tile that are trained."""
        return [piece for piece in self._optimizer.slices_in(tile) if piece.is_trained]

    def _set_gradients(self, tile: Tile, at_hand: ExitStack) -> None:
        """Gives the torch optimizer the tile's gradients, multiplied by the factor unless its kernel does that."""
        owned = at_hand.enter_context(self._gradient(tile))
        for piece in self._slices(tile):
            # The same memory if G is fp32 and lies where O does; else cast here, because scaling 16 bits could underflow.
            piece.master.grad = owned[piece.in_tile].to(piece.master.device, torch.float32)
            if self._factor != 1.0 and not self._optimizer.scales_itself:
                # A division, as in the one-pass kernels and torch's fused kernels: the same bits.
                piece.master.grad.div_(1.0 / self._factor)

    def _kernel_scale(self) -> dict[str, Tensor]:
        """By which torch's fused kernels divide gradients in the pass they make anyway: attributes of the torch optimizer."""
        if self._factor == 1.0:
            return {}
        # On the host if a part of O is there: torch copies a scalar to wherever a slice is, but does not wait for a copy from a
        # device to the host.
        devices = [bucket.optimizer_home.device for bucket in self._gradients]
        device = next((device for device in devices if device.type == "cpu"), devices[0])
        scale = torch.full((), 1.0 / self._factor, dtype=torch.float32, device=device)
        return {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}

    # ---- Adam on the host in one pass over memory: cast, scale, update and write P; the bits are torch's between casts

    def _one_pass_adam(self, bucket: Bucket) -> list[AdamSettings] | None:
        """Adam's settings by group, if the bucket's tiles are stepped so; else None."""
        is_wanted = _has_16_bits(bucket) or self._in_background
        return self._adam if is_wanted and bucket.optimizer_home.device.type == "cpu" else None

    def _step_in_one_pass(self, tile: Tile, adam: list[AdamSettings]) -> bool:
        """Returns whether the kernel has written the new weights as well."""
        bucket, pieces = tile.bucket, self._slices(tile)
        # The compiled kernel takes time and memory to load. That pays off when the device has to wait for the host's Adam.
        kernel = (mixed if bucket.is_offloaded else tiled) if _has_16_bits(bucket) else unmixed
        place = self._place_of_weights(tile, [piece.in_tile for piece in pieces])
        with self._gradient(tile) as owned, place or nullcontext() as weights:
            for piece in pieces:
                settings, state = adam[piece.span.group], self._optimizer.state[piece.master]
                if not state:
                    self._optimizer.begin_adam(piece)
                state["step"] += 1
                part, moments = piece.in_tile, (state["exp_avg"], state["exp_avg_sq"])
                out = None if weights is None else weights[part]
                operands = Operands(piece.master.detach(), owned[part].to("cpu"), *moments, out)
                kernel(settings, operands, float(state["step"]), self._factor)
        return place is not None

    def _place_of_weights(self, tile: Tile, parts: list[slice]) -> AbstractContextManager[Tensor] | None:
        """Where the one-pass kernel writes 16-bit weights, to `parts` of the tile; None if they are copied afterwards."""
        bucket, start, stop = tile
        if not bucket.has_16_bits_beside:
            return None
        if self._staged is not None:
            return nullcontext(self._staged[bucket][start:stop])
        # What is at hand of a file is written to it whole, and `parts` may leave some of it out.
        return None if bucket.weights.resident is None else bucket.p_to_write(start, stop, parts)

    def _write_weights(self, tile: Tile, master: Tensor) -> None:
        bucket, start, stop = tile
        if self._staged is None:
            bucket.write_back(start, stop, master)
        else:
            self._staged[bucket][start:stop].copy_(master)

    def _take_back(self, tile: Tile, states: dict[str, Tensor]) -> None:
        """After a tile's update: moves the torch optimizer's new state into O, and drops views of states not in memory."""
        for piece in self._slices(tile):
            piece.master.grad = None
            self._optimizer.adopt_state(piece, states)
            if tile.bucket.is_swapped:
                piece.master.data = piece.master.data.new_empty(0)


def _has_16_bits(bucket: Bucket) -> bool:
    """Whether an update of the bucket reads or writes a dtype other than fp32."""
    return bucket.gradient.dtype != torch.float32 or bucket.has_16_bits_beside
