"""One dense prefill, used many times: under other settings, for further questions, and to score continuations."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache

import latent_santa

from .tiny_models import cache_name, cache_of, filled_cache, generate, padded, prompt, settings_for, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
SETTINGS = [
    {"estimator": "pooled"},
    {"budget": 32},
    {"parents": "kmeans", "noise": "shared"},
    {"method": "centroid", "parent_size": 4},
    {"method": "gumbel_rows", "budget": 6},
    {"method": "santa", "budget": 6},
    {"routing_dtype": "int8"},
    {"budget": 4096},
]


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def test_every_setting_as_from_its_own_prefill(model):
    ids, mask = padded([19, 40])
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    with latent_santa.patch(model, **SMALL) as santa:
        prefilled = santa.prefill(ids, mask)
        assert (santa.prefill_calls, santa.sparse_calls, santa.dense_calls) == (1, 0, 0)
        for settings in [*SETTINGS, *SETTINGS[::-1]]:
            santa.configure(settings_for(**{**SMALL, **settings}))
            santa.sequence_keys = [7, 9]
            santa.reset()
            wanted = generate(model, ids, 6, attention_mask=mask)
            rows = santa.access.as_dict()
            santa.reset()
            found = prefilled.generate(**options)
            assert found.sequences.equal(wanted.sequences) and santa.access.as_dict() == rows
            assert all(a.equal(b) for a, b in zip(found.scores, wanted.scores, strict=True))
            assert santa.prefill_calls == 0
        santa.configure(method="dense")
        assert prefilled.generate(**options).sequences.equal(generate(model, ids, 6, attention_mask=mask).sequences)


def test_a_long_generation_and_beams_leave_the_prompt_alone(model):
    ids = prompt(40)
    with latent_santa.patch(model, **SMALL) as santa:
        prefilled = santa.prefill(ids)
        held = prefilled.bytes
        wanted = generate(model, ids, 4).sequences
        prefilled.generate(max_new_tokens=200, do_sample=False)  # more than the buffer's spare rows
        beams = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3}
        assert prefilled.generate(**beams).shape == model.generate(ids, **beams).shape == (1, 45)
        several = prefilled.generate(max_new_tokens=5, do_sample=True, num_return_sequences=2)
        assert several.shape == (2, 45)
        assert prefilled.generate(max_new_tokens=4, do_sample=False).equal(wanted)
        assert prefilled.bytes == held > 0


def test_answers_are_those_of_further_turns(model):
    context, questions = prompt(40), [prompt(20, seed=2), prompt(5, seed=3), prompt(12, seed=4)]
    with latent_santa.patch(model, **SMALL) as santa:
        found = santa.answer(context, questions, max_new_tokens=4, do_sample=False)
        assert santa.prefill_calls == 1 + 2  # the short question joins the suffix
    for ids, answer in zip(questions, found, strict=True):
        with latent_santa.patch(model, **SMALL) as santa:
            cache = filled_cache(model, context)
            santa.prepare(cache)
            output = generate(model, torch.cat((context, ids), 1), 4, cache=cache)
        assert output.sequences[:, 40 + ids.shape[1] :].equal(answer)


def by_hand(model, ids, continuation):
    """Log-probabilities of one continuation by feeding it to a patched model."""
    logs, fed, cache = [], ids, None
    for token in continuation:
        with torch.no_grad():
            given = {cache_name(model): cache} if cache is not None else {}
            output = model(fed, use_cache=True, logits_to_keep=1, **given)
        logs.append(output.logits[0, -1].log_softmax(-1)[token].item())
        fed, cache = torch.tensor([[token]]), cache_of(output)
    return logs


def test_scores_are_those_of_decoding_step_by_step(model):
    ids, mask = padded([19, 40])
    continuations = [[5, 9, 3, 7], [11, 2]]
    batch = torch.tensor([[5, 9, 3, 7], [11, 2, -100, -100]])
    with latent_santa.patch(model, **SMALL) as santa:
        santa.sequence_keys = [4, 8]
        found = santa.score(ids, batch, mask)
        assert found.shape == (2, 4) and found.dtype == torch.float32
        assert found[1, 2:].tolist() == [0, 0]
        assert santa.sparse_calls == 4
        for b, length in enumerate((19, 40)):
            santa.sequence_keys = [(4, 8)[b]]
            wanted = by_hand(model, ids[b : b + 1, 40 - length :], continuations[b])
            torch.testing.assert_close(found[b, : len(wanted)], torch.tensor(wanted), rtol=1e-4, atol=1e-4)
            alone = santa.score(ids[b : b + 1, 40 - length :], torch.tensor([continuations[b]]))
            torch.testing.assert_close(alone[0], torch.tensor(wanted), rtol=1e-4, atol=1e-4)
        santa.sequence_keys = None
        with pytest.raises(ValueError, match="continuation has shape .1, 2., but 2 prompts need"):
            santa.score(ids, torch.tensor([[1, 2]]), mask)


def test_scores_at_full_budget_are_those_of_one_dense_call(model):
    ids, continuation = prompt(40), prompt(6, seed=9)
    whole = torch.cat((ids, continuation), 1)
    with torch.no_grad():
        logs = model(whole).logits[0, 39:-1].log_softmax(-1).gather(1, continuation[0][:, None])[:, 0]
    with latent_santa.patch(model, **{**SMALL, "budget": 4096}) as santa:
        torch.testing.assert_close(santa.score(ids, continuation)[0], logs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ("some text", TypeError, "input_ids is a str: give token ids"),
        ([[1, 2]], TypeError, "input_ids is a list"),
        (torch.rand(1, 4), TypeError, "input_ids is a tensor of torch.float32"),
        (prompt(4)[0], ValueError, r"input_ids has shape \(4,\)"),
        (prompt(4)[:, :0], ValueError, r"input_ids has shape \(1, 0\)"),
        (prompt(4)[:0], ValueError, r"input_ids has shape \(0, 4\)"),
    ],
)
def test_what_are_no_token_ids(model, given, error, message):
    with latent_santa.patch(model, **SMALL) as santa:
        for use in (santa.prefill, lambda ids: santa.score(ids, prompt(2)), lambda ids: santa.answer(ids, [prompt(2)])):
            with pytest.raises(error, match=message):
                use(given)
        if isinstance(given, torch.Tensor) and given.shape == (1, 0):
            return  # an empty turn is one
        with pytest.raises(error, match=message.replace("input_ids", "turn")):
            santa.prefill(prompt(9)).follow(given)


def test_an_empty_turn_adds_no_row(model):
    options = {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    with latent_santa.patch(model, **SMALL) as santa:
        prefilled = santa.prefill(prompt(40))
        wanted, found = prefilled.generate(**options), prefilled.follow(prompt(40)[:, :0], **options)
        assert all(a.equal(b) for a, b in zip(wanted.scores, found.scores, strict=True))
        assert cache_of(found).get_seq_length() == 43


def test_masks_that_do_not_fit_a_prompt(model):
    with latent_santa.patch(model, **SMALL) as santa:
        with pytest.raises(ValueError, match="must have the shape of input_ids"):
            santa.prefill(prompt(9), torch.ones(1, 8))
        with pytest.raises(ValueError, match="pad on the left"):
            santa.score(prompt(9), prompt(2), torch.tensor([[1] * 8 + [0]]))


def test_turns_and_questions_that_do_not_fit(model):
    with latent_santa.patch(model, **SMALL) as santa:
        with pytest.raises(ValueError, match="turn has 1 sequences behind 2 prompts"):
            santa.answer(prompt(20, 2), [prompt(4)])
        given = prompt(20), [prompt(4)]
        plain = santa.answer(*given, max_new_tokens=3, do_sample=False)
        assert santa.answer(*given, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)[0].equal(plain[0])


def test_continuations_that_cannot_be_scored(model):
    ids = prompt(20)
    with latent_santa.patch(model, **SMALL) as santa:
        assert santa.score(ids, torch.empty(1, 0, dtype=torch.long)).shape == (1, 0)
        assert santa.score(ids, torch.tensor([[-100, 96]]))[0, 0] == 0
        for token in (97, -1):
            with pytest.raises(ValueError, match=f"holds {token}: token ids go from 0 to 96"):
                santa.score(ids, torch.tensor([[1, token]]))
        for given in ([[1]], torch.rand(1, 2)):
            with pytest.raises(TypeError, match="continuation is .*: give token ids"):
                santa.score(ids, given)


def test_after_unpatching_a_prompt_is_refused(model):
    """Nothing would be sampled, and nothing would say so."""
    with latent_santa.patch(model, **SMALL) as santa:
        kept = santa.prefill(prompt(20))
    for use in (kept.generate, lambda: kept.follow(prompt(3)), lambda: santa.prefill(prompt(20))):
        with pytest.raises(RuntimeError, match="no longer patched under this handle"):
            use()
    with latent_santa.patch(model, **SMALL), pytest.raises(RuntimeError, match="prefill with the new handle"):
        kept.generate()


def test_uses_of_one_prompt_never_overlap(model):
    options = {"do_sample": False, "max_new_tokens": 6}
    with latent_santa.patch(model, **SMALL) as santa:
        prefilled, found = santa.prefill(prompt(40)), {}
        wanted = prefilled.generate(**options)
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: prefilled.generate(**options)})) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(tokens.equal(wanted) for tokens in found.values())

        class Meddling:
            def put(self, tokens):
                prefilled.generate(**options)

            def end(self):
                pass

        with pytest.raises(RuntimeError, match="is being generated from"):
            prefilled.generate(streamer=Meddling(), **options)
        assert prefilled.generate(**options).equal(wanted)


def test_generation_settings_of_the_model(model, monkeypatch):
    ids, settings = prompt(40), model.generation_config
    with latent_santa.patch(model, **SMALL) as santa:
        monkeypatch.setattr(settings, "do_sample", True)
        monkeypatch.setattr(settings, "num_return_sequences", 3)
        assert santa.prefill(ids).generate(max_new_tokens=2).shape == (3, 42)
        monkeypatch.undo()
        monkeypatch.setattr(settings, "use_cache", False)
        with pytest.raises(ValueError, match="use_cache=False: a prefilled prompt is its cache"):
            santa.prefill(ids).generate(max_new_tokens=2)


def test_an_empty_cache_has_nothing_to_prepare(model):
    with latent_santa.patch(model, **SMALL) as santa:
        cache = DynamicCache()
        santa.prepare(cache)
        assert cache.get_seq_length() == 0
