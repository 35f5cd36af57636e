"""Generation paths: equal to the unpatched model when every team is selected, and sensible under a small budget."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import latent_santa
from latent_santa.patches.cache_layer import TeamLayer

from .tiny_models import (
    assert_close,
    assert_same,
    cache_name,
    cache_of,
    decode_by_hand,
    filled_cache,
    generate,
    padded,
    prompt,
    settings_for,
    tiny_model,
)

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
EVERY_TEAM = {**SMALL, "budget": 4096}
LENGTHS = [37, 64, 100]
KINDS = ["deepseek_v2-yarn", "qwen2"]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(request.param)


def greedy(model):
    return [generate(model, prompt(60))]


def sampling(model):
    torch.manual_seed(3)
    return [generate(model, prompt(60), do_sample=True, top_k=20, temperature=1.5)]


def left_padding(model):
    ids, mask = padded(LENGTHS)
    return [generate(model, ids, attention_mask=mask)]


def every_amount_of_padding(model):
    """Short and long padding; fully masked rows have made NaN for some lengths only."""
    outputs = []
    for longest in (9, 24, 41):
        ids, mask = padded([1, 5, 8, longest])
        outputs.append(generate(model, ids, 3, attention_mask=mask))
    return outputs


def several_returned_sequences(model):
    torch.manual_seed(4)
    return [generate(model, prompt(60), do_sample=True, num_return_sequences=3)]


def beams(model):
    ids, mask = padded([37, 60])
    return [
        generate(model, prompt(60), 8, num_beams=4, num_return_sequences=2),
        generate(model, ids, 6, attention_mask=mask, num_beams=3),
    ]


def chunked_prefill(model):
    ids, mask = padded(LENGTHS)
    outputs = [generate(model, prompt(66), prefill_chunk_size=size) for size in (5, 16, 33)]
    return [*outputs, generate(model, ids, attention_mask=mask, prefill_chunk_size=16)]


def chunks_of_padding(model):
    """A sequence whose first chunks are all padding; a chunk of one token and another turn come after them."""
    ids, mask = padded([1, 33])
    first = generate(model, ids, 3, attention_mask=mask, prefill_chunk_size=16)
    assert all(layer.keys.isfinite().all() and layer.values.isfinite().all() for layer in cache_of(first).layers)
    ids = torch.cat((first.sequences, prompt(12, batch=2)), 1)
    mask = torch.cat((mask, torch.ones(2, 15, dtype=torch.long)), 1)
    return [first, generate(model, ids, 3, cache=cache_of(first), attention_mask=mask)]


def three_turns(model):
    """Two further turns, the second shorter than a parent, the third longer."""
    outputs, cache, ids = [], DynamicCache(config=model.config), prompt(40)
    for turn, new_tokens in enumerate((0, 5, 21)):
        ids = torch.cat((ids, prompt(new_tokens, seed=10 + turn)), 1)
        outputs.append(generate(model, ids, 5, cache=cache))
        ids = outputs[-1].sequences
    return outputs


def padded_turns(model):
    """Padding before, in a turn that is grouped, and in a turn so short that its rows and padding are suffix."""
    ids, mask = padded([30, 45])
    outputs = [generate(model, ids, 4, attention_mask=mask)]
    for lengths in ([12, 20], [2, 5]):
        turn, turn_mask = padded(lengths, seed=5)
        ids = torch.cat((outputs[-1].sequences, turn), 1)
        mask = torch.cat((mask, torch.ones(2, 4, dtype=torch.long), turn_mask), 1)
        outputs.append(generate(model, ids, 4, cache=cache_of(outputs[-1]), attention_mask=mask))
    return outputs


def prompt_lookup(model):
    return [generate(model, torch.cat([prompt(20, seed=s)] * 3, 1), 16, prompt_lookup_num_tokens=3) for s in range(2)]


def assisted(model):
    assistant = type(model)(model.config).eval()
    assistant.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.eos_token_id = None
    return [generate(model, prompt(length), 14, assistant_model=assistant) for length in (60, 3)]


def one_token_prompt(model):
    return [generate(model, prompt(1), 12), generate(model, prompt(1, batch=2), 3)]


def without_cache(model):
    return [generate(model, prompt(30), 4, use_cache=False)]


def longer_then_shorter(model):
    return [generate(model, prompt(length, seed=length)) for length in (70, 25, 70)]


def embeddings(model):
    embedded = model.get_input_embeddings()(prompt(60)).detach()
    mask = torch.ones(1, 60, dtype=torch.long)
    return [generate(model, None, inputs_embeds=embedded, attention_mask=mask)]


def hidden_states(model):
    output = generate(model, prompt(40), 3, output_hidden_states=True)
    output.scores = (*output.scores, *(state for step in output.hidden_states for state in step))
    return [output]


def contrastive_copies(model):
    """A cache that is repeated and narrowed by hand, as some decoding strategies do."""
    cache, name = filled_cache(model, prompt(40, batch=2)), cache_name(model)
    scores = []
    with torch.no_grad():
        scores.append(model(prompt(1, batch=2), **{name: cache}).logits)
        cache.batch_repeat_interleave(2)
        scores.append(model(prompt(1, batch=4, seed=1), **{name: cache}).logits)
        cache.batch_select_indices(torch.tensor([3, 0]))
        scores.append(model(prompt(1, batch=2, seed=2), **{name: cache}).logits)
    output = generate(model, prompt(5), 1)
    output.scores = tuple(scores)
    return [output]


PATHS = [
    greedy,
    sampling,
    left_padding,
    every_amount_of_padding,
    several_returned_sequences,
    beams,
    chunked_prefill,
    chunks_of_padding,
    three_turns,
    padded_turns,
    prompt_lookup,
    assisted,
    one_token_prompt,
    without_cache,
    longer_then_shorter,
    embeddings,
    hidden_states,
    contrastive_copies,
]


@pytest.mark.parametrize("first_token", ["replay", "dense"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.filterwarnings("ignore:no call of this generation was sparse")
def test_every_team_selected_equals_the_unpatched_model(model, path, first_token):
    wanted = path(model)
    with latent_santa.patch(model, **EVERY_TEAM, first_token=first_token) as santa:
        found = path(model)
        assert (santa.sparse_calls > 0) == (path is not without_cache)
        assert santa.access.percent == 100 or path is without_cache
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)


def alone(model, santa, lengths, **kwargs):
    """Tokens and ledger of each sequence by itself, under the keys 10, 11, ..."""
    tokens, counts = [], []
    for b, length in enumerate(lengths):
        santa.sequence_keys = [10 + b]
        santa.reset()
        output = generate(model, prompt(length, seed=b), **kwargs)
        tokens.append(output.sequences[0, length:].tolist())
        counts.append({**santa.access.per_sequence()[0], "sequence": b})
    return tokens, counts


@pytest.mark.parametrize("settings", [{}, {"parents": "kmeans"}, {"method": "santa"}, {"estimator": "pooled"}])
def test_padded_batch_is_each_sequence_alone(model, settings):
    with latent_santa.patch(model, settings_for(**{**SMALL, **settings})) as santa:
        tokens, counts = alone(model, santa, LENGTHS)
        santa.sequence_keys = [10, 11, 12]
        santa.reset()
        ids, mask = padded(LENGTHS)
        output = generate(model, ids, attention_mask=mask)
        assert output.sequences[:, 100:].tolist() == tokens
        assert santa.access.per_sequence() == counts
        teams = [layer.grouped.teams for layer in cache_of(output).layers]
    for b, length in enumerate(LENGTHS):
        for t in teams:
            if t is not None:
                assert (t.team_of_row[b, :, : 100 - length] == -1).all()
                assert (t.team_of_row[b, :, 100 - length : 100] >= 0).all() and t.covered == 100
                real = t.representative[b][t.sizes[b] > 0]
                assert (real >= 100 - length).all()


def test_replay_sees_the_right_positions_under_left_padding(model):
    ids, mask = padded(LENGTHS)
    seen = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    with latent_santa.patch(model, **SMALL):
        generate(model, ids, 3, attention_mask=mask)
    hook.remove()
    assert [len(p[0]) for p in seen] == [100, 1, 1, 1]
    assert seen[1] == [[36], [63], [99]]
    assert seen[2] == [[37], [64], [100]]


@pytest.mark.parametrize("first_token", ["replay", "dense"])
@pytest.mark.parametrize("size", [5, 16, 33])
@pytest.mark.parametrize("parents", ["contiguous", "kmeans"])
def test_chunked_prefill_is_the_prefill_in_one(model, parents, size, first_token):
    ids, mask = padded([37, 64, 98])  # no size leaves a last chunk of one token, which would be a decoding call
    with latent_santa.patch(model, **{**SMALL, "parents": parents}, first_token=first_token) as santa:
        santa.shadow = True
        wanted = generate(model, ids, attention_mask=mask)
        counts, errors = santa.access.as_dict(), santa.shadow_errors()
        santa.reset()
        found = generate(model, ids, attention_mask=mask, prefill_chunk_size=size)
        assert_same(found, wanted)
        assert santa.access.as_dict() == counts
        assert santa.sparse_calls == (6 if first_token == "replay" else 5)
        assert santa.shadow_errors().shape == errors.shape


def groups(santa):
    return 1 if santa.layout == "mla" else 2


@pytest.mark.parametrize("drafts", [3, 20])
def test_drafts_are_verified_densely_and_never_grouped(model, drafts, monkeypatch):
    """However many they are, and in the first call too, where they stand behind the whole prompt."""
    ids = torch.cat([prompt(20)] * 3, 1)
    monkeypatch.setattr(TeamLayer, "regroup", lambda self: pytest.fail("a verification regrouped the prompt"))
    with latent_santa.patch(model, **SMALL) as santa:
        output = generate(model, ids, 12, prompt_lookup_num_tokens=drafts)
        assert santa.prefill_calls == 0 and santa.sparse_calls > 0 and santa.dense_calls > 0
        calls = santa.access.per_step()
        assert len(calls) == santa.sparse_calls + santa.dense_calls
        groups = 1 if santa.layout == "mla" else 2
        # the first one reads the prompt and its drafts, all of them densely
        first = calls[0]
        assert first["routing"] == 0 and first["union"] == first["dense"] >= (60 + 2) * santa.layers * groups
        for layer in cache_of(output).layers:
            assert layer.grouped.stop == 60 and layer.grouped.exact == ()
            assert layer.grouped.teams.covered == 60


def test_beams_carry_their_teams(model):
    """Beams of one prompt hold the same prompt rows: after any reordering, teams and rows of all beams agree."""
    ids, mask = padded([37, 60])
    with latent_santa.patch(model, **SMALL) as santa:
        output = generate(model, ids, 8, attention_mask=mask, num_beams=4)
        for layer in cache_of(output).layers:
            t = layer.grouped.teams
            for b in range(2):
                for name in ("sizes", "team_of_row", "representative"):
                    part = getattr(t, name)[4 * b : 4 * b + 4]
                    assert part.equal(part[:1].expand_as(part))
                assert (t.team_of_row[4 * b, 0] >= 0).sum() == (37, 60)[b]
        assert santa.sparse_calls == 8


def test_two_interleaved_caches(model):
    name = cache_name(model)
    prompts = [prompt(50, seed=1), prompt(30, seed=2)]
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = [decode_by_hand(model, ids, 5)[1] for ids in prompts]
        totals = santa.access.totals()
        santa.reset()
        caches, tokens, scores = [None, None], list(prompts), [[], []]
        with torch.no_grad():
            for _ in range(5):
                for i in (0, 1):
                    given = {} if caches[i] is None else {name: caches[i]}
                    output = model(tokens[i], use_cache=True, logits_to_keep=1, **given)
                    caches[i] = cache_of(output)
                    scores[i].append(output.logits[:, -1])
                    tokens[i] = scores[i][-1].argmax(-1, keepdim=True)
        assert santa.access.totals() == totals
    for ours, theirs in zip(scores, wanted, strict=True):
        assert_close(ours, theirs, 0)


def test_no_state_leaks_between_prompts(model):
    with latent_santa.patch(model, **SMALL):
        first = longer_then_shorter(model)
        assert_same(first[0], first[2], 0)
        assert_same(generate(model, prompt(25, seed=25)), first[1], 0)


def test_first_token_dense_is_the_unpatched_first_token(model):
    ids, mask = padded(LENGTHS)
    wanted = generate(model, ids, attention_mask=mask)
    with latent_santa.patch(model, **SMALL, first_token="dense") as santa:
        found = generate(model, ids, attention_mask=mask)
        assert santa.sparse_calls == 5
        assert santa.access.per_step()[0]["suffix"] == 3 * 2 * groups(santa)
        santa.configure(first_token="replay")
        replayed = generate(model, ids, attention_mask=mask)
    assert_close(found.scores[:1], wanted.scores[:1], 0)
    assert not torch.allclose(found.scores[1], wanted.scores[1], atol=1e-2)
    assert not torch.allclose(replayed.scores[0], wanted.scores[0], atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*past_key_values.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_by_hand_without_generate(model, name):
    ids = prompt(50)
    if name == "cache" and cache_name(model) != "cache":
        pytest.skip("this version calls it past_key_values")
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = generate(model, ids)
        counts = santa.access.totals()
        santa.reset()
        tokens, scores, cache = decode_by_hand(model, ids, 6)
        assert tokens.tolist() == wanted.sequences[:, 50:].tolist() and santa.access.totals() == counts
        santa.reset()
        cache = DynamicCache()  # positions, a cache made beforehand, and a base model called as itself
        with torch.no_grad():
            hidden = model.model(ids, **{name: cache}).last_hidden_state
            assert model.lm_head(hidden[:, -1]).allclose(scores[0], atol=1e-4)
            for step in range(1, 6):
                output = model(tokens[:, step - 1 : step], **{name: cache})
                torch.testing.assert_close(output.logits[:, -1], scores[step], rtol=1e-4, atol=1e-4)
        assert santa.access.totals() == counts
        with torch.no_grad():
            plain = model(ids, return_dict=False, logits_to_keep=1)
        torch.testing.assert_close(plain[0][:, -1], scores[0], rtol=1e-4, atol=1e-4)


def test_a_call_that_asks_for_all_logits_is_dense_at_every_position(model):
    """A score must not depend on which position is the last one of a padded batch."""
    ids = prompt(50)
    with torch.no_grad():
        wanted, hidden = model(ids).logits, model.model(ids).last_hidden_state[:, -1:]
        with latent_santa.patch(model, **SMALL) as santa:
            assert model(ids).logits.equal(wanted)
            assert model(ids, labels=ids).logits.equal(wanted)
            assert model(ids, logits_to_keep=torch.tensor([3, 49])).logits.allclose(wanted[:, [3, 49]], atol=1e-5)
            assert (santa.prefill_calls, santa.sparse_calls) == (3, 0)
            assert "every call was a dense prefill" in santa.report()
            with pytest.raises(ValueError):  # a call that fails leaves nothing behind
                model(ids, attention_mask=torch.ones(1, 3))
            assert not model.model(ids).last_hidden_state[:, -1:].allclose(hidden)
            assert santa.sparse_calls == 1  # the base model knows of no logits: it replays


def test_hidden_states_before_the_last_are_dense(model):
    ids = prompt(50)
    with torch.no_grad():
        dense = model(ids, output_hidden_states=True).hidden_states
        with latent_santa.patch(model, **SMALL):
            output = model(ids, output_hidden_states=True, logits_to_keep=1)
            some = model(ids, output_hidden_states=[0], logits_to_keep=1).hidden_states
    hidden = output.hidden_states
    assert len(hidden) == 3 and all(h.shape == (1, 50, hidden[0].shape[-1]) for h in hidden)
    assert len(some) == len(model(ids, output_hidden_states=[0]).hidden_states)
    torch.testing.assert_close(model.lm_head(hidden[-1][:, -1:]), output.logits)
    assert all(h[:, :-1].equal(d[:, :-1]) for h, d in zip(hidden, dense, strict=True))
    assert not torch.allclose(hidden[1][:, -1], dense[1][:, -1], atol=1e-2)
