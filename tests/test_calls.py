"""What a call is, from numbers alone."""

from __future__ import annotations

import pytest

from latent_santa.patches.calls import Kind, classify

PREFILL, VERIFY, DECODE, DENSE = Kind.PREFILL, Kind.VERIFY, Kind.DECODE, Kind.DENSE


@pytest.mark.parametrize(
    "held, new, options, wanted",
    [
        (0, 40, {}, (PREFILL, 40)),
        (0, 1, {}, (PREFILL, 1)),
        (40, 1, {}, (DECODE, 0)),
        (40, 1, {"sampled": False}, (DENSE, 0)),
        (40, 7, {}, (VERIFY, 0)),
        (40, 8, {}, (PREFILL, 8)),
        # chunks of a prompt, however short the last one is
        (40, 1, {"chunked": True}, (PREFILL, 1)),
        (40, 3, {"chunked": True}, (PREFILL, 3)),
        # drafts: behind the whole prompt in the first call, alone later, however many
        (0, 40, {"prompt": 40}, (PREFILL, 40)),
        (0, 60, {"prompt": 40}, (VERIFY, 40)),
        (40, 30, {"prompt": 40}, (VERIFY, 0)),
        (45, 1, {"prompt": 40}, (DECODE, 0)),
        # a further turn with drafts behind it is grouped from a parent's size on
        (40, 15, {"prompt": 50}, (VERIFY, 10)),
        (40, 15, {"prompt": 45}, (VERIFY, 0)),
        (40, 10, {"prompt": 50}, (PREFILL, 10)),
    ],
)
def test_classify(held, new, options, wanted):
    assert classify(held, new, **{"turn": 8, "sampled": True, **options}) == wanted


def test_what_is_sampled_and_counted():
    assert {kind for kind in Kind if kind.sampled} == {Kind.DECODE, Kind.REPLAY}
    assert {kind for kind in Kind if not kind.counted} == {Kind.PREFILL, Kind.UNCACHED}
