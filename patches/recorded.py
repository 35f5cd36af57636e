"""Dense decoding of one prompt, kept call by call, so that any settings can attend the same queries and rows.

Under settings of its own a model drifts: what a layer estimates changes the queries of the layers behind it, and soon
the tokens. Here every setting sees what dense decoding saw (the dense trajectory of Appendix B.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latent_santa.methods import METHODS
from latent_santa.rows import Rows
from latent_santa.teams import Teams

from .calls import Kind, ModelCall
from .regrouping import regroup_generated

if TYPE_CHECKING:
    from .control import Control
    from .prefilled import Prefilled


class Recorded:
    """Queries of dense decoding behind one prefilled prompt, with the rows that they saw. Made by ``prompt.record``.

    Call 0 has the query of the prompt's last token, which dense decoding computes in its prefill; call t that of the
    t-th generated token. It sees N + t rows, N being the prompt's.

    Attributes:
        tokens: ``(1, T)`` int64, the generated tokens; call t led to token t.
        prompt: the prefilled prompt.
    """

    @torch.no_grad()
    def __init__(self, prompt: Prefilled, control: Control, max_new_tokens: int) -> None:
        self.prompt, self._control = prompt, control
        batch, length = prompt.input_ids.shape
        if batch != 1:
            raise ValueError(f"the prompt is a batch of {batch} sequences: record one at a time, as they end apart")
        before = control.handle.config
        control.handle.configure(method="dense")
        control.thread.heard = {}
        greedy = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
        try:
            with prompt._alone():
                cache = prompt.held_back()
                kwargs = {"max_new_tokens": max_new_tokens, **greedy}
                output = prompt._generate(prompt.input_ids, prompt.attention_mask, cache, kwargs)
                self._rows = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            self._heard = control.thread.heard
        finally:
            control.thread.heard = None
            control.handle.configure(before)
        self.tokens: Tensor = output[:, length:]

    @property
    def calls(self) -> int:
        """T, the recorded calls."""
        return len(self._heard[0])

    @property
    def layers(self) -> int:
        """Attention layers."""
        return len(self._rows)

    def query(self, layer: int, call: int) -> tuple[tuple[Tensor, ...], float]:
        """A call's query in one layer, parts ``(1, G, H, D_i)`` float32 that match the rows' keys, and its scale."""
        states, scale = self._heard[layer][call]
        return self._control.adapters[layer].query(states), scale

    def rows(self, layer: int) -> Rows:
        """A layer's rows at the end: the prompt's N, then the generated ones."""
        return self._control.adapters[layer].rows(*self._rows[layer])

    def prompt_rows(self, layer: int) -> Rows:
        """A layer's rows of the prompt alone."""
        keys, values = (part[:, :, : self.prompt.input_ids.shape[1]] for part in self._rows[layer])
        return self._control.adapters[layer].rows(keys, values)

    def points(self, layer: int) -> Tensor:
        """What a layer's prompt rows are grouped by, ``(1, G, N, D)``: content latents (MLA) or rotated keys (GQA)."""
        points: Tensor = self._control.adapters[layer].points(self._rows[layer][0])
        return points[:, :, : self.prompt.input_ids.shape[1]]

    def teams(self) -> list[Teams | None]:
        """Each layer's records of the prompt's rows, grouped under the settings in force."""
        with self.prompt._alone():
            return [layer.grouped.teams for layer in self.prompt.rewound().layers]

    @torch.no_grad()
    def attend(self) -> None:
        """Let the settings in force attend every call, as decoding does: the handle counts rows and shadow errors.

        Raises:
            ValueError: the method samples nothing.
        """
        control, prompt = self._control, self.prompt
        if not METHODS[control.config.method].sampled:
            raise ValueError(f'method "{control.config.method}" leaves decoding dense: there is nothing to compare')
        length, mask = prompt.input_ids.shape[1], prompt.attention_mask
        device = prompt.input_ids.device
        with prompt._alone():
            layers = prompt.rewound().layers
            control.key_sequences(layers, 1, 0, device)
            for number in range(self.calls):
                seen = length + number
                visible, step = None, torch.tensor([seen], device=device)
                if mask is not None:
                    visible = torch.nn.functional.pad(mask.bool(), (0, number), value=True)
                    step = visible.sum(-1)
                if number:
                    before = None if visible is None else visible[:, : seen - 1]
                    regroup_generated(layers, control.adapters, before, control.config)
                for layer, rows in zip(layers, self._rows, strict=True):
                    layer.hold(*(part[..., :seen, :] for part in rows))
                call = ModelCall(Kind.DECODE if number else Kind.REPLAY, layers, visible, step=step)
                control.begin(call)
                for place, layer in enumerate(layers):
                    states, scale = self._heard[place][number]
                    module = self._control.adapters[place].module
                    module._latent_santa(states, layer.keys, layer.values, None, scaling=scale)
                control.end(call)
