"""The cache layer that owns a layer's teams, frozen representatives and exact suffix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from latent_santa.ahead import Need
from latent_santa.step import Suffix

from .layer_state import Grouped, Observed, Snapshot

# rows reserved behind a prompt where nobody says how many will follow, and the most where somebody does
LEAST_RESERVE, MOST_RESERVE = 256, 1024
CPU = torch.device("cpu")


def reserved(rows: int, asked: int | None, last: int) -> int:
    """How many free rows a cache of ``rows`` gets behind them.

    Args:
        rows: those it must hold now.
        asked: rows that a generation may come to hold, or None when unknown.
        last: the reserve that ran full, or 0. The next one is twice as long, so that a long generation moves seldom.
    """
    most = max(MOST_RESERVE, rows // 8)
    wanted = max(LEAST_RESERVE, rows // 64) if asked is None else max(asked - rows, 1)
    return max(min(wanted, most), min(2 * last, most))


class TeamLayer(DynamicLayer):
    """A dynamic cache layer whose rows stay in place and which carries the team records of its rows.

    ``keys`` and ``values`` are views ``(B, heads, N, D)`` of buffers with some free rows behind them, so that a
    decoding step writes one row instead of copying all of them. In MLA ``keys`` holds content latents and ``values``
    rotary keys. Rows that somebody else assigned are noticed (:attr:`foreign`).

    Attributes:
        grouped: team records and spans.
        waiting: span of rows ``(start, stop)`` to be grouped before the next sparse call, or None.
        limit: most rows behind the last grouping in a decoding call, where generated rows are grouped; else 0.
        ahead: steps before that limit in which teams of the oldest of these rows are made.
        coming: these teams, until they come to the records (:mod:`latent_santa.patches.regrouping`); else None.
        noise_key: ``(B, 2)`` int64 noise keys of the sequences; they follow beam reordering.
        observed: queries of the last prompt's end, where somebody asked for them.
        buffers: where the rows lie, with free ones behind them; None while they lie elsewhere.
        asked: rows that the present generation may come to hold, or None when unknown.
        place: while a step with fixed addresses runs, ``(1,)`` int64, the row that it writes; else None.
        graph: the decoding step captured on this cache; its first layer keeps it.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grouped = Grouped()
        self.waiting: tuple[int, int] | None = None
        self.limit = self.ahead = 0
        self.coming: Any = None
        self.noise_key: Tensor | None = None
        self.observed: Observed | None = None
        self.asked: int | None = None
        self.place: Tensor | None = None
        self.graph: Any = None
        self.buffers: tuple[Tensor, Tensor] | None = None
        self._reserve = 0
        self._own: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def foreign(self) -> bool:
        """Whether somebody assigned other rows: cut off an answer, evicted or pruned some."""
        return self.keys is not self._own[0] or self.values is not self._own[1]

    @property
    def open_rows(self) -> int:
        """Rows since the last grouping; -1 while the last grouped row is held back for the replay."""
        return self.get_seq_length() - self.grouped.stop

    @property
    def need(self) -> Need:
        """What this layer's noise depends on."""
        teams = self.grouped.teams
        held = self.get_seq_length() and teams is not None
        if not held or teams is None:
            return Need(CPU, 0, 0, 0)
        return Need(self.keys.device, self.keys.shape[1], teams.M, 0 if teams.parents is None else teams.parents.C)

    def _set(self, keys: Tensor | None, values: Tensor | None) -> None:
        self.keys, self.values, self._own = keys, values, (keys, values)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Rows that a method of this class assigns are not foreign; those that were stay so."""
        foreign = self.foreign
        yield
        if not foreign:
            self._own = (self.keys, self.values)

    @classmethod
    def adopt(cls, layer: DynamicLayer) -> TeamLayer:
        """Take over a plain dynamic layer; rows it already holds wait to be grouped."""
        team_layer = cls()
        if layer.is_initialized and layer.keys is not None:
            team_layer.lazy_initialization(layer.keys, layer.values)
            team_layer._set(layer.keys, layer.values)
            if layer.get_seq_length():
                team_layer.waiting = (0, layer.get_seq_length())
        return team_layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rows in place and return all of them; where gradients are recorded, by concatenation.

        In a step with fixed addresses all reserved rows come back, filled or not.
        """
        if self.place is not None and self.buffers is not None:
            for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
                _write(buffer, self.place, new)
            return self.buffers
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._set(*super().update(key_states, value_states, *args, **kwargs))
            self.buffers = None
            return self.keys, self.values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        buffers = self._with_room(stop, key_states, value_states)
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            _write(buffer, start, new)
        self._set(*(buffer[..., :stop, :] for buffer in buffers))
        return self.keys, self.values

    def make_room(self, stop: int) -> tuple[Tensor, Tensor]:
        """Buffers whose first rows are the present ones, with room for ``stop`` rows."""
        return self._with_room(stop, self.keys, self.values)

    def advance(self, stop: int) -> None:
        """Count the first ``stop`` rows of the buffers as held: a step with fixed addresses wrote the last of them."""
        assert self.buffers is not None
        self._set(*(buffer[..., :stop, :] for buffer in self.buffers))

    @property
    def room(self) -> int:
        """Rows that the cache may hold before it moves."""
        return self.get_seq_length() if self.buffers is None else self.buffers[0].shape[-2]

    def _with_room(self, stop: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers with room for ``stop`` rows that hold the present ones; copied only when they are full.

        Others may assign rows (beam search does), so the buffers count only while both views are the first rows of
        them, each sequence's.
        """
        held, rows = self.buffers, (self.keys, self.values)
        length = self.get_seq_length()
        if held is not None and length and held[0].shape[-2] >= stop and all(map(_begins, held, rows)):
            return held
        ran_full = held is not None and held[0].shape[-2] < stop
        self._reserve = reserved(stop, self.asked, self._reserve if ran_full else 0)
        room = stop + self._reserve
        fresh = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = new.new_empty(*new.shape[:-2], room, new.shape[-1])
            buffer[..., length:, :] = 0  # a masked row still meets a weight of 0, which NaN would survive
            if length:
                _write(buffer, 0, old)
            # a masked row still meets a weight of 0, which does not make up for what memory may hold
            _write(buffer, length, buffer.new_zeros(()).expand_as(buffer[..., length:, :]))
            fresh.append(buffer)
        self.buffers = (fresh[0], fresh[1])
        return self.buffers

    def suffix(self, visible: Tensor | None) -> Suffix:
        """Rows in no team that a query must attend exactly: earlier spans and everything since the last grouping."""
        index = self.suffix_rows(self.get_seq_length())
        open_rows = max(self.open_rows, 0)
        room = index.numel() - open_rows + (self.limit or open_rows + self.room - self.get_seq_length())
        return Suffix(index, self.grouped.attended(index, visible), room)

    def suffix_rows(self, stop: int) -> Tensor:
        """``(E,)`` int64, the rows below ``stop`` that are in no team."""
        spans = (*self.grouped.exact, (self.grouped.stop, stop))
        return torch.cat([torch.arange(a, b, device=self.keys.device) for a, b in spans])

    def hold_back_last(self) -> None:
        """Take the last row out of the cache before its token is replayed (Appendix F).

        The teams, formed before, still list the row, and the replay writes it again.
        """
        if self.get_seq_length():  # an early exit leaves layers without rows
            self._set(self.keys[..., :-1, :], self.values[..., :-1, :])

    def regroup(self) -> None:
        """Drop the teams; every row up to the present length, whoever wrote it, waits to be grouped again."""
        self.grouped, self.coming = Grouped(), None
        if self.foreign:
            self.buffers = None
        self._own = (self.keys, self.values)
        self.waiting = (0, self.get_seq_length()) if self.get_seq_length() else None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove rows from the end; below the grouped rows the teams go too, and what is left waits to be grouped."""
        before = self.get_seq_length()
        with self._ours():
            super().crop(tokens_to_remove)
        length = self.get_seq_length()
        if length == before:
            return
        if self.coming is not None and length < self.coming.stop:
            self.coming = None
        if length < self.grouped.stop:
            self.regroup()
        elif self.waiting is not None:
            start, stop = self.waiting
            self.waiting = (start, min(stop, length)) if length > start else None

    def reset(self) -> None:
        super().reset()
        self._set(None, None)
        self.is_initialized = False
        self.buffers = self.graph = self.coming = None
        self._reserve = 0
        self.grouped, self.waiting, self.noise_key, self.observed = Grouped(), None, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        with self._ours():
            super().reorder_cache(beam_idx)
        self._follow(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.keys.shape[0] if self.get_seq_length() else 0
        with self._ours():
            super().batch_repeat_interleave(repeats)
        if batch:
            self._follow(torch.arange(batch, device=self.keys.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        batch = self.keys.shape[0] if self.get_seq_length() else 0
        with self._ours():
            super().batch_select_indices(indices)
        if batch:
            self._follow(torch.arange(batch, device=self.keys.device)[indices.to(self.keys.device)])

    def _follow(self, index: Tensor) -> None:
        """Let everything beside keys and values follow the sequences ``index``."""
        if self.get_seq_length() == 0:
            return
        index = index.to(self.keys.device)
        self.buffers = None  # the rows were copied
        self.grouped = self.grouped.followed(index)
        if self.coming is not None:
            self.coming = self.coming.followed(index)
        if self.noise_key is not None:
            self.noise_key = self.noise_key.index_select(0, index)
        if self.observed is not None:
            self.observed = self.observed.followed(index)

    def observe(self, states: Tensor, scale: float, most: int) -> None:
        """Keep the queries of the last ``most`` prompt tokens; ``states (B, heads, n, D)`` are those of the last rows.

        Pieces of one prompt follow one another. Drafts behind a prompt are none of its tokens.
        """
        if self.waiting is None:
            return
        start, first = self.waiting[0], self.get_seq_length() - states.shape[2]
        stop = min(self.waiting[1], self.get_seq_length())
        if stop <= first:
            return
        own, before = states[:, :, : stop - first].detach(), self.observed
        if before is not None and start < first == before.stop and before.states.shape[0] == own.shape[0]:
            own = torch.cat((before.states[:, :, -(first - start) :], own), 2)
        self.observed = Observed(own[:, :, -most:].clone(), scale, stop)

    def overwrite_last(self, keys: Tensor, values: Tensor) -> None:
        """Write the last row again, ``(B, heads, 1, D)`` each."""
        place = self.get_seq_length() - 1
        _write(self.keys, place, keys)
        _write(self.values, place, values)

    def snapshot(self) -> Snapshot:
        """The present state, for :meth:`rewind`: views of the rows, not copies."""
        teams = self.grouped.teams
        if teams is not None and teams.room is not None:
            teams.room.shared = True  # later rows are written into a copy
        return Snapshot(self.keys, self.values, self.buffers, self.grouped, self.waiting, self.observed)

    def rewind(self, to: Snapshot) -> None:
        """Go back to an earlier state of this layer. Rows behind those held then may have been written since.

        The noise keys go, so that the next call keys the sequences again.
        """
        self._set(to.keys, to.values)
        self.buffers, self.grouped, self.waiting, self.noise_key = to.buffers, to.grouped, to.waiting, None
        self.observed, self.coming = to.observed, None

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold these rows ``(B, heads, N, D)`` instead of the present ones; the teams stay."""
        self._set(keys, values)

    def offload(self) -> None:
        raise NotImplementedError("latent_santa keeps a cache on its device: offloaded caches are not supported")


def _begins(buffer: Tensor, view: Tensor) -> bool:
    """Whether a view's rows ``(B, heads, N, D)`` are the first N of a buffer."""
    n = view.shape[-2]
    return (
        view.data_ptr() == buffer.data_ptr()
        and view.shape == buffer[..., :n, :].shape
        and (view.stride() == buffer.stride())
    )


@torch.inference_mode()
def _write(buffer: Tensor, start: int | Tensor, new: Tensor) -> None:
    """Write rows into a buffer, which may have been made in inference mode and is then read-only outside it."""
    if isinstance(start, Tensor):
        buffer.index_copy_(2, start, new)
        return
    buffer[..., start : start + new.shape[-2], :] = new


def adopt_cache(cache: Any) -> None:
    """Turn every layer of a dynamic cache into a :class:`TeamLayer`, in place.

    Raises:
        NotImplementedError: a static, quantised, sliding, offloaded or other cache.
    """
    supported = "supported is DynamicCache (what generate() makes by default) without offloading"
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise NotImplementedError(f"got a cache of type {type(cache).__name__}; {supported}")
    if cache.offloading:
        raise NotImplementedError(f"got an offloaded {type(cache).__name__}; {supported}")
    for place, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer and not isinstance(layer, TeamLayer):
            raise NotImplementedError(
                f"got a {type(cache).__name__} whose layer {place} is a {type(layer).__name__}; {supported}, so pass "
                "no cache_implementation and no cache of another kind"
            )
    cache.layers[:] = [layer if isinstance(layer, TeamLayer) else TeamLayer.adopt(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = TeamLayer
