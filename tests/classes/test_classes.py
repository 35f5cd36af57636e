"""Every causal, image-text and multimodal class of the installed transformers: refused, or equal at full budget.

``make test-classes`` runs it. A class runs in its default configuration with small sizes; if that is refused, with full
attention in all layers, and then without a window (``configs.VARIANTS``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import latent_santa

from ..tiny_models import assert_same, generate
from .cases import CHANGES, LEFT_OUT
from .configs import VARIANTS, classes, config_class, text, tiny
from .images import image_inputs

pytestmark = pytest.mark.classes
# the version that the list was made with, then a class per line that must be accepted there, with "image" behind it if
# an image must reach it
LISTED, *LINES = (Path(__file__).parent / "accepted.txt").read_text().splitlines()
EXACT = f"transformers {transformers.__version__}".startswith(LISTED)
ACCEPTED = {name: "image" in rest for name, *rest in map(str.split, LINES)} if EXACT else {}
EVERY_TEAM = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 4096}


@pytest.mark.parametrize("name", classes())
def test_class(name: str, record_property: Any) -> None:
    if name in LEFT_OUT:
        pytest.skip(f"left out: {LEFT_OUT[name]}")
    changes = CHANGES.get(name) or CHANGES.get(config_class(name).__name__, {})
    reasons: list[str] = []
    failures: list[Exception] = []
    for variant in VARIANTS:
        try:
            model = tiny(name, changes, variant)
        except Exception as error:
            failures.append(error)  # the class has no such variant
            continue
        try:
            latent_santa.patch(model, **EVERY_TEAM).unpatch()
        except NotImplementedError as error:
            reasons.append(str(error))
            continue
        try:
            generate(model, text(41), 1)
        except Exception as error:
            failures.append(error)  # it can be built, but not run
            continue
        inputs = {"text": {"input_ids": text(41), "attention_mask": torch.ones(1, 41, dtype=torch.long)}}
        image = image_inputs(model)
        if image is not None:
            inputs["image"] = image
        try:
            for given in inputs.values():
                check(model, given)
        except NotImplementedError as error:
            reasons.append(f"at the first call: {error}")
            continue
        record_property("outcome", f"accepted: {' and '.join(inputs)}")
        assert image is not None or not ACCEPTED.get(name), "its image could be given before"
        return
    assert name not in ACCEPTED, (reasons, failures)
    if not reasons and not EXACT:
        pytest.skip(f"no tiny configuration under this transformers: {failures[0]}")
    if not reasons:
        raise failures[0]
    record_property("outcome", f"refused: {' / '.join(dict.fromkeys(reasons))}")
    assert all("supported" in reason for reason in reasons)


def check(model: Any, given: dict[str, Any]) -> None:
    """At full budget the patched model is the unpatched one; at a small budget it samples."""
    wanted = generate(model, None, 5, **given)
    assert all(score.isfinite().all() for score in wanted.scores)
    for first_token, sparse in (("replay", 5), ("dense", 4)):
        with latent_santa.patch(model, **EVERY_TEAM, first_token=first_token) as santa:
            assert_same(generate(model, None, 5, **given), wanted)
            assert santa.sparse_calls == santa.full_calls == sparse
            santa.configure(budget=16)
            sampled = generate(model, None, 5, **given)
            assert all(score.isfinite().all() for score in sampled.scores)
            assert not torch.allclose(sampled.scores[1], wanted.scores[1], atol=1e-4)
