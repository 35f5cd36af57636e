"""HELMET's and LongBench's metrics, on answers whose score is plain to see."""

from __future__ import annotations

import math
import sys

import pytest

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import answers
from latent_santa.eval.run.scoring import opening, score


@pytest.mark.parametrize(
    ("output", "references", "wanted"),
    [
        ("It was the Eiffel-Tower, in Paris.", ("eiffeltower",), 1),  # punctuation goes, articles too
        ("a the an", ("the",), 1),  # nothing is left of the reference, which is then everywhere
        ("Rome", ("Paris", "Rome"), 1),
        ("Rome", ("Paris",), 0),
        ("", ("Paris",), 0),
    ],
)
def test_substring(output, references, wanted):
    assert score(output, references, "substring") == wanted


@pytest.mark.parametrize(
    ("output", "opened", "wanted"),
    [
        (" 14", "label:", 1),
        (" 14\n\nanother text\nlabel: 3", "label:", 1),  # the first line counts
        (" label: 14", "label:", 1),  # chat models say the prefix again
        ("The label: 14", "", 1),
        ("14", "", 1),
        ("\n14", "label:", 0),
        (" 141", "label:", 0),
        (" 14 or 15", "label:", 0),
    ],
)
def test_exact_label(output, opened, wanted):
    assert score(output, ("14",), "exact", opened) == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("B", 1),
        (" B.", 1),
        ("The answer: B", 1),
        ("Clearly B. The Sea, as told", 1),
        ("A", 0),
        ("The sea", 0),
        ("b or c", 0),
    ],
)
def test_option(output, wanted):
    assert score(output, ("B", "B. The sea"), "option") == wanted


def test_ranking_and_its_gain():
    assert answers.ranked("Ranking: [ID: 12] > [ID: 3] > 12 > 7. Also 4 > 5") == ["12", "3", "7"]
    assert answers.ranked("none") == []
    judged = ("12 0", "3 3", "7 1", "4 2")
    best = 3 + 2 / math.log2(3) + 1 / 2
    assert score("3 > 4 > 7 > 12", judged, "ndcg_10") == pytest.approx(1)
    assert score("12 > 3 > 99 > 7", judged, "ndcg_10") == pytest.approx((3 / math.log2(3) + 1 / math.log2(5)) / best)
    assert score("no ranking", judged, "ndcg_10") == 0
    many = [f"{i} 1" for i in range(40)]  # only ten places count
    assert score(" > ".join(str(i) for i in range(10)), many, "ndcg_10") == pytest.approx(1)
    assert score("1 > 2", ("1 0", "2 0"), "ndcg_10") == 0


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("Two things speak for it. Final Answer: [C]", "C"),
        ("Final Answer: [A]? No.\n**Final Answer: B**", "B"),
        ("The correct answer is (D)", "D"),
        ("The correct answer is (D)\nFinal Answer: (A)", "A"),
        ("Final Answer: a dog", None),
        ("Final Answer: [X]", None),
        ("C", None),
        ("", None),
    ],
)
def test_letter(output, letter):
    assert answers.chosen_letter(output) == letter
    assert score(output, ("C",), "letter") == (letter == "C")


def test_the_prefix_counts_only_where_the_answer_goes_on_from_it():
    assert opening("text\nAnswer:", "\nAnswer:") == "Answer:"
    assert opening("text\nAnswer:<end of turn>", "\nAnswer:") == ""
    assert opening("text", "") == ""


def test_rouge_needs_its_package(monkeypatch):
    answers._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(EvalError, match=r"pip install 'latent-santa\[helmet\]'"):
        score("a ship", ("the ship",), "rouge_l")


def test_rouge_takes_the_better_reading_and_reference():
    pytest.importorskip("rouge_score")
    answers._rouge.cache_clear()
    assert score("Answer: running ships\nand more words behind", ("run ship", "no"), "rouge_l") == 1  # stemmed
    assert score("three words here", ("three other words",), "rouge_l") == pytest.approx(2 / 3)
