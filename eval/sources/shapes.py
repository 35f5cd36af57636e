"""One record of official data to one sample: both generations of RULER's own files, and the split columns of kvpress.

The `index` field is never read: RULER's needle generator overwrites it with a character offset.
"""

from __future__ import annotations

from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Sample, join_texts, make_sample

from .tasks import OFFICIAL

_TEMPLATE_MARKS = ("<|im_start|>", "<|start_header_id|>", "[INST]", "<|user|>", "<|begin_of_text|>", "<start_of_turn>")


def sample_of(record: dict[str, Any], task: str, number: int, source: str) -> tuple[Sample, list[str]]:
    """The sample of a record, and what is odd about it.

    New RULER files have `input`, `outputs` and `answer_prefix`; older ones lack the prefix, which is then the tail of
    `input` and stays there. kvpress has `context`, `question`, `answer_prefix`, `answer` and `max_new_tokens`.
    Raises EvalError for other fields, and for values that make no sample.
    """
    warnings = []
    cap = OFFICIAL[task].max_new_tokens
    try:
        if "context" in record:
            text = join_texts(str(record["context"]), str(record["question"])).rstrip()
            references = _texts(record["answer"])
            # The split took the space between question and prefix away from the prefix.
            prefix = " " + str(record["answer_prefix"]).strip()
            cap = _cap(record.get("max_new_tokens") or cap)
            if cap != OFFICIAL[task].max_new_tokens:
                warnings.append(
                    f"{task}: the data cap answers at {cap} tokens, RULER at {OFFICIAL[task].max_new_tokens}"
                )
        else:
            text, references = str(record["input"]), _texts(record["outputs"])
            prefix = str(record.get("answer_prefix") or "")
            if not prefix:
                warnings.append(
                    f"{task}: samples without an answer_prefix field (files before 2025): their prefix is the tail of "
                    "the input and stays in the user's turn, whatever --answer-prefix says"
                )
        sample = make_sample(
            task,
            number,
            text,
            references,
            answer_prefix=prefix.rstrip(),
            metric=OFFICIAL[task].metric,
            max_new_tokens=cap,
            source=source,
        )
    except (TypeError, ValueError) as error:
        raise EvalError(f"{source}: record {number} of {task}: {error}") from error
    except KeyError as error:
        raise EvalError(
            f"{source}: record {number} of {task} lacks the field {error.args[0]!r}; it has "
            f"{', '.join(sorted(record))}. Known are RULER's files (input, outputs, answer_prefix) and kvpress's "
            "(context, question, answer_prefix, answer)"
        ) from error
    mark = next((mark for mark in _TEMPLATE_MARKS if mark in text), None)
    if mark:
        warnings.append(
            f"{task}: the input holds {mark!r}, so the data were made with a chat template in them; they should be "
            "made with the base template, or be run with --no-chat-template"
        )
    return sample, warnings


def _texts(value: Any) -> list[str]:
    if not isinstance(value, (str, list)):
        raise ValueError(f"answers must be a text or a list of texts, got {value!r}")
    return [value] if isinstance(value, str) else [str(item) for item in value]


def _cap(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"max_new_tokens must be a number of tokens, got {value!r}") from None
