"""The same requests in engines that chunk, share, preempt, spread and restart: tokens and rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latent_santa import naive, naive_noise
from latent_santa.noise import noise_keys

Run = Callable[..., dict[str, Any]]
TOKENS = 24
SMALL = {"LATENT_SANTA_BUDGET": "32", "LATENT_SANTA_SEED": "5"}
FULL = {"LATENT_SANTA_BUDGET": "100000"}
PLAIN = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
LAYERS, HEADS = 6, 8
GQA = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}


def asked(prompts: list[list[int]], tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [{"ids": ids, "tokens": tokens} for ids in prompts]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.fixture(scope="module")
def alone(engine: Run, prompts: list[list[int]]) -> dict[str, Any]:
    """S = 32, every request by itself, prompts in one piece; then all at once; then the first with few tokens."""
    return engine([*([one] for one in asked(prompts)), asked(prompts)], SMALL, **PLAIN)


@pytest.fixture(scope="module")
def own(engine: Run, prompts: list[list[int]]) -> list[list[int]]:
    """vLLM's own tokens, by the attention that it has for every head instead of for latents."""
    found = engine([asked(prompts)], {"VLLM_MLA_DISABLE": "1"}, **PLAIN)
    assert "SANTA++" not in found["log"]
    return tokens(found["answers"][0])


def test_full_budget_gives_vllms_own_tokens(engine: Run, prompts: list[list[int]], own: list[list[int]]) -> None:
    # in blocks that run out: requests are preempted and computed again, chunk by chunk
    found = engine([asked(prompts)], FULL, num_gpu_blocks_override=74, enable_prefix_caching=False,
                   enable_chunked_prefill=True, max_num_batched_tokens=128)  # fmt: skip
    assert tokens(found["answers"][0]) == own
    assert found["preempted"]
    total = found["ledger"]["totals"]
    assert total["percent"] == 100.0 and total["union"] == 0 and total["dense_rows"] == total["dense"]


def test_a_small_budget_changes_tokens_and_a_batch_does_not(alone: dict[str, Any], own: list[list[int]]) -> None:
    *single, together = (tokens(batch) for batch in alone["answers"])
    assert [one[0] for one in single] == together
    assert together != own
    # the prompt's last token is computed in the prefill, which is dense
    assert [made[0] for made in together] == [made[0] for made in own]


def test_rows_of_every_request_add_up(alone: dict[str, Any], prompts: list[list[int]]) -> None:
    for batch in alone["answers"]:
        for answer in batch:
            ids = prompts[[tokens([a]) for a in alone["answers"][-1]].index([answer["tokens"]])]
            seen = range(len(ids) + 1, len(ids) + TOKENS)  # the first token is the prefill's
            found = next(v for k, v in alone["ledger"]["requests"].items() if k.startswith(f"{answer['id']}"))
            assert found["steps"] == TOKENS - 1
            assert found["dense"] == LAYERS * sum(seen)
            assert found["routing"] == LAYERS * sum((n - 1) // 16 * 4 for n in seen)
            assert found["suffix"] == LAYERS * sum(n - (n - 1) // 16 * 16 for n in seen)
            assert 0 < found["union"] < found["dense"] and found["dense_rows"] == 0


def test_union_is_what_the_definition_says(engine: Run, prompts: list[list[int]]) -> None:
    """Algorithms 4, 2 and 1 in loops and float64, on the queries and rows that the engine's steps saw."""
    found = engine([asked([prompts[1][-150:]], 3)], SMALL, record=True, **PLAIN)
    steps = found["steps"]
    assert len(steps) == 2 * LAYERS
    union = sum(_union(step) for step in steps)
    assert found["ledger"]["totals"]["union"] == union == sum(step["counts"][1] for step in steps)
    assert union < sum(len(step["rows"]) for step in steps)


def _union(step: dict[str, Any]) -> int:
    rows = torch.tensor(step["rows"]).double().numpy()
    query = torch.tensor(step["query"]).double().numpy()
    n, full, rank = len(rows), (len(rows) - 1) // step["block"] * step["block"], step["rank"]
    teams = naive.build_teams(rows[:full, :rank], naive.contiguous_parents(full, 16), 4)
    key = noise_keys(step["seed"], [0], "cpu")[0].tolist()
    read: set[int] = set()
    for h in range(HEADS):
        phi = [naive.score(query[h], rows[t.representative], step["scale"]) + math.log(len(t.members))
               for t in teams]  # fmt: skip
        drawn = [naive_noise.gumbel(key, n, step["layer"], 0, h, g, False) for g in range(len(teams))]
        selected, _, _ = naive.select(phi, drawn, step["k"])
        read |= {row for g in selected for row in teams[g].members}
    return len(read)


def test_chunks_and_shared_prefixes_change_no_token(
    engine: Run, prompts: list[list[int]], alone: dict[str, Any]
) -> None:
    # chunks of 128 tokens leave one token of the prompts of 257 and 449; a second time 256 and 448 rows are cached
    found = engine([asked(prompts), asked(prompts[:2])], SMALL, enable_prefix_caching=True, enable_chunked_prefill=True,
                   max_num_batched_tokens=128)  # fmt: skip
    expected = tokens(alone["answers"][-1])
    assert tokens(found["answers"][0]) == expected
    assert tokens(found["answers"][1]) == expected[:2]
    assert [answer["cached"] for answer in found["answers"][1]] == [448, 256]
    assert not found["preempted"]


@pytest.mark.parametrize("estimator, block", [("per_head", 16), ("pooled", 64)])
def test_two_stages_route_fewer_rows_in_blocks_of_either_size(
    engine: Run, prompts: list[list[int]], alone: dict[str, Any], estimator: str, block: int
) -> None:
    settings = {"ROUTING": "two_stage", "PARENTS_PER_HEAD": "1", "ESTIMATOR": estimator}
    found = engine([*([one] for one in asked(prompts)), asked(prompts)], SMALL | {f"LATENT_SANTA_{k}": v for k, v in
                   settings.items()}, block_size=block, **PLAIN)  # fmt: skip
    *single, together = (tokens(batch) for batch in found["answers"])
    assert [one[0] for one in single] == together
    one_stage, two_stages = alone["ledger"]["totals"], found["ledger"]["totals"]
    seen = [n for ids in prompts for n in range(len(ids) + 1, len(ids) + TOKENS)]
    assert two_stages["suffix"] == 2 * LAYERS * sum(n - (n - 1) // block * block for n in seen)
    assert two_stages["dense_rows"] == 0 and two_stages["routing"] < 0.8 * one_stage["routing"]


@pytest.mark.parametrize(
    "changes, refused",
    [({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8: teams"), ({"hf_overrides": GQA}, "has no latent cache")],
    ids=["fp8", "GQA"],
)
def test_what_cannot_be_sampled_is_refused_by_name(engine: Run, changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(AssertionError, match=f"SANTA\\+\\+ in vLLM refuses .*{refused}"):
        engine([], SMALL, load_format="dummy", **changes)


def test_speculated_tokens_are_left_to_vllm_and_counted(
    engine: Run, prompts: list[list[int]], own: list[list[int]]
) -> None:
    guess = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    found = engine([asked(prompts[:1])], FULL, speculative_config=guess, **PLAIN)
    assert tokens(found["answers"][0]) == own[:1]
    ledger = found["ledger"]
    (left,) = ledger["unsampled"].values()
    assert 0 < left["steps"] <= ledger["engine_steps"]
    # a step of three tokens reads the rows of a step of one three times
    assert left["rows"] <= 3 * left["steps"] * LAYERS * (len(prompts[0]) + TOKENS)


def test_a_preempted_request_goes_on_as_if_its_tokens_were_its_prompt(
    engine: Run, prompts: list[list[int]], alone: dict[str, Any]
) -> None:
    # what was decoded is computed again by the prefill, which is dense
    found = engine([asked(prompts)], SMALL, num_gpu_blocks_override=74, **PLAIN)
    assert found["preempted"]
    stopped: dict[str, list[int]] = {}
    for name, made in found["preempted"]:
        stopped.setdefault(name.split("-")[0], []).append(made)
    again = []
    for answer, ids, expected in zip(found["answers"][0], prompts, tokens(alone["answers"][-1]), strict=True):
        places = stopped.get(answer["id"], [])
        first = places[0] if places else TOKENS
        assert answer["tokens"][:first] == expected[:first]
        ends = [*places[1:], TOKENS][: len(places)]
        again += [(answer, ids, start, end) for start, end in zip(places, ends, strict=True)]
    assert again
    fresh = engine([[{"ids": ids + answer["tokens"][:start], "tokens": max(1, end - start)}]
                    for answer, ids, start, end in again], SMALL, **PLAIN)  # fmt: skip
    for (answer, _, start, end), made in zip(again, fresh["answers"], strict=True):
        assert answer["tokens"][start:end] == tokens(made)[0][: end - start]


def test_two_tensor_parallel_ranks_agree_with_one(
    engine: Run, prompts: list[list[int]], alone: dict[str, Any], tmp_path: Path
) -> None:
    settings = SMALL | {"LATENT_SANTA_LEDGER": str(tmp_path / "ledger.json")}
    found = engine([asked(prompts)], settings, tensor_parallel_size=2, **PLAIN)
    assert tokens(found["answers"][0]) == tokens(alone["answers"][-1])
    ranks = [json.loads((tmp_path / f"ledger.rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    one = alone["ledger"]["totals"]
    for rank in ranks:  # each has half of the heads: all representatives, and a smaller union
        assert 2 * rank["totals"]["routing"] == one["routing"] and 2 * rank["totals"]["suffix"] == one["suffix"]
        assert 2 * rank["totals"]["union"] < one["union"]
