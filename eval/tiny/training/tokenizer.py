"""Trains the embedded model's tokenizer: byte-level BPE in which every listed word and every digit is one token.

    python -m latent_santa.eval.tiny.training.tokenizer OUT_DIRECTORY

The corpus is made from the running interpreter's help topics and docstrings, so another Python version gives another
tokenizer; train the network again after training the tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from .. import haystack, sentences, words

SPECIALS = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
SIZE = 4096
_SPLIT = r" ?[A-Za-z]+| ?[0-9]|\n| ?[^\sA-Za-z0-9]+|\s"


def _task_texts(rng: Random) -> list[str]:
    """Every sentence and question form, several hundred times with different words."""
    texts = []
    for _ in range(300):
        key, other = rng.sample(words.KEYS, 2)
        person = sentences.people(rng, 1)[0]
        gap = rng.randrange(sentences.MAX_GAP + 1)
        for pieces in (
            sentences.needle(rng, key, "1", gap),
            sentences.store(rng, "1", key, gap),
            sentences.copy(rng, key, other, gap),
            sentences.note(rng, 1, person, gap),
        ):
            texts.append("".join(pieces))
        questions = [
            sentences.ask_single(key, ["1"]),
            sentences.ask_multivalue(key, ["1", "2"]),
            sentences.ask_multiquery([key, other], ["1", "2"]),
            sentences.ask_trace("1", [key]),
            sentences.ask_frequent([key, other, key]),
            *(sentences.ask_fact(kind, person) for kind in sentences.FACTS),
        ]
        for asked in questions:
            texts += ["".join(asked.question), "".join(asked.prefix + asked.answer)]
        texts += [f" {digit}" for digit in range(10)] * 10
        texts += [*sentences.INTRO.values(), *haystack.NOISE, *haystack.SHORT, " ..."]
    return texts


def train() -> Any:
    """The trained `tokenizers.Tokenizer`. Raises RuntimeError if a listed word did not become one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = Random(0)
    listed = words.KEYS + words.CIPHERS + words.NAMES + words.TOWNS
    listed += words.INSTRUMENTS + words.FOODS + words.SUBJECTS
    corpus = [*haystack.topics(held_out=False), *haystack.docstrings()[:6000], *haystack.grammar(rng, 4000)]
    corpus += [" " + word for word in listed for _ in range(700)]
    corpus += _task_texts(rng)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    split = [word for word in listed if len(tokenizer.encode(" " + word, add_special_tokens=False).ids) != 1]
    if split:
        raise RuntimeError(f"{len(split)} listed words are not single tokens, among them {split[:5]}")
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Write tokenizer.json into a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for tokenizer.json")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    train().save(str(out / "tokenizer.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
