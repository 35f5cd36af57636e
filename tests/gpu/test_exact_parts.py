"""Norms and the glue of grouped experts in few launches on a CUDA device: no bit of a decoding step changes."""

from __future__ import annotations

import sys

import pytest
import torch

from latent_santa.patches.exact_parts import exact_parts
from latent_santa.patches.patch import Edits

from ..tiny_models import tiny_model
from .test_compiled import generated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2-experts", "deepseek_v3", "qwen2"])
def test_outputs_have_the_bits_of_the_models_own_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name).bfloat16().cuda()
    base = model.base_model
    norms = {id(part) for part in base.modules() if type(part).__name__.endswith("RMSNorm")}
    assert norms <= {id(part) for part, _, _ in exact_parts(base)}
    found, _ = generated(model)
    monkeypatch.setattr(sys.modules[Edits.__module__], "exact_parts", lambda base: [])
    wanted, _ = generated(model)
    assert torch.equal(found, wanted)
