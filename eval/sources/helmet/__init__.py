"""The 13 tasks of HELMET that the paper ran (Tables 2, 8, 9, 10), from the user's copy of the benchmark.

Prompts are those of HELMET's own loaders, to the letter, for the same records; its texts are read from that copy and
are no part of this package. Data sets that HELMET takes from the hub are read from files. Of the tasks over documents n
*prompts* are drawn, as the paper's scores (multiples of 1/500) say of it; HELMET draws n questions and keeps each with
every place of its answer, which is select="questions" here. The other tasks are drawn as in HELMET.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import answers
from latent_santa.eval.sources.request import Loaded, Request
from latent_santa.eval.sources.samples import Sample, make_sample
from latent_santa.eval.sources.tasks import HELMET, RAG

from . import books, documents, files, labels, templates
from .items import Item, shuffled

if TYPE_CHECKING:
    from latent_santa.eval.run.render import Renderer

# loader of a task in HELMET's data.py, its name for the data set, and the texts that are read
_TEXTS = ("user_template", "system_template", "prompt_template")
_PASSAGE = ("passage_template",)
LOADERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{task: ("load_qa", f"kilt_{task}", (*_TEXTS, "demo_template", *_PASSAGE)) for task in RAG},
    "msmarco": ("load_msmarco_rerank", "msmarco_rerank_psg", (*_TEXTS, *_PASSAGE, "passage_template if")),
    **{
        task: ("load_icl", task.replace("clinc", "clinic"), (*_TEXTS, "item_template", "text_field", "label_field"))
        for task in files.HUB
    },
    "infbench_qa": ("load_infbench", "infbench_qa_eng", (*_TEXTS, "temp", "demo")),
    "infbench_mc": ("load_infbench", "infbench_choice_eng", (*_TEXTS, "temp", "demo", "options")),
    "json_kv": ("load_json_kv", "json_kv", (*_TEXTS, "demo_template")),
}
NEWLINES = ("\n", "\n\n")  # tokens that end an answer, in all tasks but those of long answers
ATTEMPTS = 8


def load(request: Request, renderer: Renderer, advance: Callable[[str], None]) -> Loaded:
    """The request's prompts, at most n of each task. Raises EvalError, before anything is read where it can.

    request.more: `shots` (examples before the question), `book_tokenizer`, and `chat`: "all" or "none" of the prompts
    go through the chat template, or "helmet", those whose configuration in HELMET says so.
    """
    directory = Path(request.data.partition(":")[2])
    module, source = templates.parse(directory)
    texts = {task: templates.texts(module, *LOADERS[task]) for task in request.tasks}
    paths = files.find(directory, request.tasks, request.length)
    if "infbench_qa" in request.tasks:
        answers.check_rouge()
    tokenizer = None
    if any(task in files.BOOKS for task in request.tasks):
        tokenizer = books.open_tokenizer(request.more["book_tokenizer"], request.offline)
        postfix = templates.texts(module, "truncate_llama2", "", ["postfix_text"])
        texts = {task: texts[task] | postfix for task in texts}
    if not renderer.tokenizer.is_fast:
        raise EvalError("HELMET's prompts are cut where a token begins, which the model's slow tokenizer does not tell")
    samples: list[Sample] = []
    hashes: dict[str, str] = {}
    for task in request.tasks:
        try:
            for item in _items(request, task, paths[task], texts[task], tokenizer, hashes):
                samples.append(_sample(request, task, item, texts[task], renderer))
                advance(task)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EvalError(
                f"{task}: a record of {' or '.join(map(str, paths[task]))} is not of HELMET's form: "
                f"{type(error).__name__} {error}"
            ) from error
    origin = {
        "data": "helmet",
        "files_sha256": hashes,
        "templates_sha256": hashlib.sha256(source.encode()).hexdigest(),
    }
    return Loaded(samples, origin)


def _items(
    request: Request, task: str, paths: Sequence[Path], texts: dict[str, str], tokenizer: Any, hashes: dict[str, str]
) -> Iterator[Item]:
    """The chosen prompts of a task; notes the hashes of its files."""
    shots, seed = request.more["shots"], request.seed
    if task in files.HUB:
        tables = [files.table(path) for path in paths]
        hashes |= {f"{task}/{path.name}": digest for path, (_, digest) in zip(paths, tables, strict=True)}
        tested = tables[0][0]
        train, tested = (tables[1][0], tested) if len(tables) == 2 else labels.split(tested, seed)
        numbers = labels.chosen(tested, texts["label_field"], request.n, seed, request.select)
        shown = labels.shots_at(task, request.length)
        yield from labels.labelled(task, train, tested, numbers, shown, seed, texts)
        return
    keep = documents.rare if task == "popqa" else None
    questions, *demos = (files.Lines(path, keep) for path in paths)
    hashes |= {f"{task}/{path.name}": lines.sha256 for path, lines in zip(paths, (questions, *demos), strict=True)}
    numbers = _chosen(request, questions, over_documents=bool(demos))
    if task in files.BOOKS:
        yield from books.questions(
            questions, task == "infbench_mc", shots, numbers, texts, tokenizer, request.length, seed
        )
    elif task == "json_kv":
        yield from documents.values(questions, shots, numbers, texts)
    elif task == "msmarco":
        yield from documents.rankings(questions, demos[0].all(), shots, numbers, texts)
    else:
        yield from documents.answers(questions, demos[0].all(), shots, numbers, texts, apart=task == "popqa")


def _chosen(request: Request, questions: files.Lines, over_documents: bool) -> list[int]:
    """Numbers of the chosen records: the first n, n at random, or those of n questions at random."""
    if request.select == "first":
        return list(range(min(request.n, len(questions))))
    if request.select == "sample" or not over_documents:
        return shuffled(len(questions), request.seed)[: request.n]
    keys = [documents.key(record) for record in questions.take(range(len(questions)))]
    every = sorted(set(keys))
    wanted = set(random.Random(request.seed).sample(every, min(request.n, len(every))))
    return [number for number, key in enumerate(keys) if key in wanted]


def _sample(request: Request, task: str, item: Item, texts: dict[str, str], renderer: Renderer) -> Sample:
    """The item as a sample whose prompt and answer fit into the length: too long a context loses its end."""
    user, form = texts["user_template"], HELMET[task]
    prefix = texts["prompt_template"].removeprefix(user)
    chat = request.more["chat"] == "all"
    if request.more["chat"] == "helmet" and task in files.BOOKS and renderer.uses_template:
        chat, prefix = True, ""  # in HELMET's chat prompts nothing opens the answer
    budget = request.length - form.max_new_tokens
    context = item.context
    for _ in range(ATTEMPTS):
        text = item.user(user, context)
        excess = renderer.count(text, prefix, chat) - budget
        if excess <= 0:
            return make_sample(
                task,
                item.number,
                text,
                item.references,
                answer_prefix=prefix,
                metric=form.metric,
                max_new_tokens=form.max_new_tokens,
                source="helmet",
                chat=chat,
                stop=() if task in (*files.BOOKS, "json_kv") else NEWLINES,
            )
        offsets = renderer.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]
        if excess >= len(offsets):
            break
        context = context[: offsets[-excess][0]]
    raise EvalError(f"--length {request.length}: {task}/{item.number:06d} does not fit, not even without its context")
