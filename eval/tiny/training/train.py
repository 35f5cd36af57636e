"""Trains the embedded model from scratch (one GPU, under ten minutes), or a small one on the CPU to try the code.

    python -m latent_santa.eval.tiny.training.train --resume
    python -m latent_santa.eval.tiny.training.train --out OUT --device cpu --steps 60 --small --tokens 1088 --workers 0

OUT receives model.safetensors (bfloat16, the names of transformers' DeepseekV2ForCausalLM), checkpoint.pt (weights,
optimizer and progress, replaced atomically) and log.jsonl. Copy model.safetensors over the one in `model/` to ship it.
The data are made while training runs; see `curriculum` for what is shown when, `samples` for the tasks.

Loss: mean cross-entropy of the answers' tokens + 0.1 times that of an eighth of all tokens. Learning rates: warm-up
over 100 steps (a tenth of a shorter run), constant to 12 % of the run, then linear to zero. Every step has the same
number of tokens, whatever the sequence length. With --steps and --workers 0 a resumed run repeats the
uninterrupted one exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..encoder import PAD, PieceEncoder
from ..load import MODEL_DIRECTORY
from ..tasks import HARD_TASKS, TASKS
from .data import Batch, BatchMaker, Feed
from .evaluate import Prompt, prompts
from .network import SMALL, Network, Shape
from .optimizer import MuonAdamW
from .samples import KINDS

LM_WEIGHT = 0.1
WARMUP_STEPS = 100
FLAT = 0.12
_TIMED_FROM = 3  # steps before the clock starts: they compile


@dataclass(frozen=True)
class Settings:
    """One training run; see `main` for the meaning of each field."""

    out: Path
    seconds: float = 415.0
    steps: int = 0
    checkpoint: Path | None = None
    tokenizer: Path = MODEL_DIRECTORY / "tokenizer.json"
    tokens: int = 139_264
    workers: int = 14
    seed: int = 0
    device: str = "cuda"
    small: bool = False
    longest: int | None = None
    save_every: float = 60.0
    probe: int = 0
    resume: bool = False

    @property
    def checkpoint_path(self) -> Path:
        """Where the checkpoint is."""
        return self.checkpoint or self.out / "checkpoint.pt"

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run that is done, by steps if their number is given, else by time (seconds)."""
        return min(1.0, step / self.steps if self.steps else elapsed / self.seconds)


class Trainer:
    """Network, optimizer and progress of one run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.network = Network(SMALL if settings.small else Shape(), seed=settings.seed).to(settings.device)
        if settings.device != "cpu":
            self.network.activations = torch.bfloat16
            torch.backends.cuda.matmul.allow_tf32 = True
        self.optimizer = MuonAdamW(self.network)
        self.step = 0
        self.elapsed = 0.0
        self.history: list[dict[str, Any]] = []
        self._probes: dict[str, list[Prompt]] = {}

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return self.settings.progress(self.step, self.elapsed)

    def rate(self) -> float:
        """Factor on the learning rates now."""
        warm = min(WARMUP_STEPS, self.settings.steps // 10 + 1) if self.settings.steps else WARMUP_STEPS
        return min(1.0, (self.step + 1) / warm) * min(1.0, (1 - self.progress) / (1 - FLAT))

    def update(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """One optimizer step. Returns each answer token's loss, its kind, and the language-model loss."""
        ids, targets, kinds = (self._move(torch.from_numpy(a.astype("int64"))) for a in batch)
        hidden, flat = self.network(ids), ids.view(-1)
        losses = F.cross_entropy(self.network.logits(hidden[targets - 1]).float(), flat[targets], reduction="none")
        draw = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        places = self._move(torch.randint(1, flat.numel(), (flat.numel() // 8,), generator=draw))
        kept = ((flat[places] != PAD) & (places % ids.shape[1] != 0)).float()
        text = F.cross_entropy(self.network.logits(hidden[places - 1]).float(), flat[places], reduction="none")
        text_loss = (text * kept).sum() / kept.sum()
        (losses.mean() + LM_WEIGHT * text_loss).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(self.rate(), self.step)
        self.network.zero_grad(set_to_none=True)
        self.step += 1
        return losses.detach(), kinds, text_loss.detach()

    def _move(self, tensor: Tensor) -> Tensor:
        """To the device without waiting for it (a copy from pageable memory would)."""
        pinned = tensor if self.settings.device == "cpu" else tensor.pin_memory()
        return pinned.to(self.settings.device, non_blocking=True)

    def save(self) -> None:
        """Write the checkpoint and the bfloat16 weights; a crash in between leaves the previous files whole."""
        from safetensors.torch import save_file

        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
        }
        path = self.settings.checkpoint_path
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        weights = {n: w.detach().to("cpu", torch.bfloat16).contiguous() for n, w in self.network.state_dict().items()}
        part = self.settings.out / "model.safetensors.part"
        save_file(weights, part, metadata={"format": "pt"})
        os.replace(part, self.settings.out / "model.safetensors")

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's contents."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed = state["step"], state["elapsed"]

    def log(self, line: dict[str, Any]) -> None:
        """Print a line of figures and append it to log.jsonl."""
        line = {"step": self.step, "seconds": round(self.elapsed, 1), "progress": round(self.progress, 4)} | line
        self.history.append(line)
        with (self.settings.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)

    def run(self, feed: Feed, until: int | None = None) -> None:
        """Train to the end of the run, or to step `until`, and save."""
        s = self.settings
        begun, base, first = time.monotonic(), self.elapsed, self.step
        saved = probed = shown = begun
        sums, counts = torch.zeros(len(KINDS), device=s.device), torch.zeros(len(KINDS), device=s.device)
        texts: list[Tensor] = []
        while self.progress < 1 and (until is None or self.step < until):
            feed.set_progress(self.progress)
            losses, kinds, text = self.update(feed.get())
            sums.index_add_(0, kinds, losses)
            counts.index_add_(0, kinds, torch.ones_like(losses))
            texts.append(text)
            now = time.monotonic()
            if self.step - first == _TIMED_FROM and not s.steps:
                begun = saved = probed = shown = now
            self.elapsed = base + now - begun
            last = self.progress >= 1 or self.step == until
            if now - shown > 5 or last:
                means = (sums / counts.clamp(min=1)).tolist()
                line: dict[str, Any] = {kind: round(mean, 4) for kind, mean in zip(KINDS, means, strict=True)}
                line["answers"] = round((sums.sum() / counts.sum()).item(), 4)
                line["text"] = round(torch.stack(texts).mean().item(), 4)
                line["mtok_s"] = round(len(texts) * s.tokens / max(now - shown, 1e-9) / 1e6, 2)
                self.log(line)
                sums.zero_()
                counts.zero_()
                texts.clear()
                shown = now
            if s.probe and now - probed > 60:
                self.log(self.exact_shares())
                probed = time.monotonic()
            if now - saved > s.save_every:
                self.save()
                saved = time.monotonic()
        self.save()

    @torch.no_grad()
    def exact_shares(self) -> dict[str, float]:
        """Share of exactly right answers at 1K for every task, on `probe` prompts each."""
        from tokenizers import Tokenizer

        if not self._probes:
            encoder = PieceEncoder(Tokenizer.from_file(str(self.settings.tokenizer)))
            self._probes = {t: prompts(t, self.settings.probe, 1024, encoder, seed=7) for t in TASKS + HARD_TASKS}
        compiled = self.network.before, self.network.after
        self.network.uncompiled()  # prompts have many lengths
        out = {}
        for task, items in self._probes.items():
            right = 0
            for item in items:
                hidden = self.network(torch.tensor([item.ids + item.answer[:-1]], device=self.settings.device))
                guess = self.network.logits(hidden[-len(item.answer) :]).argmax(-1)
                right += guess.tolist() == item.answer
            out[task] = round(right / len(items), 2)
        self.network.before, self.network.after = compiled
        return out


def train(settings: Settings, until: int | None = None) -> Trainer:
    """Run a training (to step `until` if given) and return the trainer; see the module's text for the files."""
    s = settings
    s.out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "elapsed": 0.0}
    resumed = s.resume and s.checkpoint_path.is_file()
    if resumed:
        state = torch.load(s.checkpoint_path, map_location="cpu", weights_only=True)
    else:
        (s.out / "log.jsonl").unlink(missing_ok=True)
    longest = s.longest or (SMALL.positions if s.small else None)
    maker = BatchMaker(s.tokenizer, s.tokens, s.seed, longest)
    # The workers are forked, so before anything touches the GPU.
    feed = Feed(maker, s.workers, state["step"], s.progress(state["step"], state["elapsed"]))
    try:
        trainer = Trainer(s)
        if resumed:
            trainer.restore(state)
        if s.device != "cpu":
            trainer.network.compile()
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            trainer.run(feed, until)
    finally:
        feed.close()
    if s.device != "cpu":
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/train-tiny"), help="directory for the files (default out/train-tiny)")
    add("--seconds", type=float, default=415.0, help="length of the run, counted after compilation (default 415)")
    add("--steps", type=int, default=0, help="length of the run in steps instead of seconds")
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint, if any, to the same --seconds or --steps",
    )
    add("--checkpoint", type=Path, help="checkpoint file (default OUT/checkpoint.pt)")
    add("--tokenizer", type=Path, default=Settings.tokenizer, help="tokenizer.json (default: the shipped one)")
    add("--tokens", type=int, default=Settings.tokens, help="tokens per step (default 139264)")
    add("--workers", type=int, default=Settings.workers, help="processes that make data; 0: in place (default 14)")
    add("--seed", type=int, default=0, help="seed of weights and data")
    add("--device", default="cuda", help="cuda or cpu (default cuda)")
    add("--small", action="store_true", help="a network of 2 layers, to try the code on a CPU")
    add("--longest", type=int, help="leave out longer sequences (tokens)")
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints (default 60)")
    add("--probe", type=int, default=0, help="once a minute, log exact answers at 1K on this many prompts per task")
    args = parser.parse_args(argv)
    if args.steps < 0 or args.seconds <= 0:
        parser.error("--steps must be 0 (then --seconds counts) or more, and --seconds more than 0")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; on a CPU try --device cpu --small --tokens 1088 --workers 0 --steps 60")
    train(Settings(**vars(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
