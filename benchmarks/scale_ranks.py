"""Several processes against several threads: the same logical batch, DP-KFC, on the same cores.

    python benchmarks/scale_ranks.py                    # results/ranks.json (three minutes, two idle cores)
    python benchmarks/scale_ranks.py --only mnist-cnn --rounds 20
    python benchmarks/scale_ranks.py --smoke            # a tiny model; prints, writes nothing

All ways are alive at once and take one step a round in shuffled order; the figure is the median over rounds of the ratio
within a round. A step is a whole one: drawing, clipped sum, reduction between processes (gloo), ledger, noise, update. A
refresh rebuilds the preconditioner: probe and eigenproblems.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, hardware, judged, load_average, markdown, now, paired, read_json, summary, write_json

OUTPUT = RESULTS / "ranks.json"
WAYS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}
BASE, RANKS = "1 process, 2 threads", "2 processes, 1 thread each"
GOAL = 0.9  # work per second of two processes over that of two threads
MODELS = ("mnist-cnn", "encoder-256", "wrn-16-4")


def worker(way: str, rank: int, name: str, smoke: bool, folder: str, pipe: Any) -> None:
    """One process of a way: does what it is told, until it is told to stop."""
    import torch
    import torch.distributed as dist

    world, threads = WAYS[way]
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}-store", rank=rank, world_size=world)
    session, batches, loss_fn = _session(name, smoke, Path(folder), way)
    step = 0

    def one_step() -> None:
        session.step(next(batches), loss_fn)

    def refresh() -> None:
        nonlocal step
        step += 1
        session._coordinates.refresh(10_000 * step)  # a step at which it is due

    pipe.send("ready")
    while (what := pipe.recv()) != "stop":
        {"step": one_step, "refresh": refresh}[what]()
        pipe.send(what)
    session.close()
    if world > 1:
        dist.destroy_process_group()


def _session(name: str, smoke: bool, folder: Path, way: str) -> tuple[Any, Any, Any]:
    import torch

    from contenders import CLIP, DELTA, LR, NOISE, setting_for
    from dpkfc.config import PrivacyConfig
    from dpkfc.curvature import KFAC
    from dpkfc.session import Session
    from models import cases

    case = cases(smoke=smoke)[name]
    setting = setting_for(case, folder)
    model = setting.fresh()[0]
    config = PrivacyConfig(
        expected_batch_size=case.batch_size, steps=1_000_000, max_grad_norm=CLIP, sampler="fixed",
        preconditioner=KFAC(probe=case.probe(), probe_size=case.probe_size, every=10_000, sides="both"),
    )  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    session = Session(
        config.with_noise(NOISE, DELTA, setting.size), model, optimizer, setting.data,
        ledger_path=folder / f"{name}-{way}.jsonl",
    )  # fmt: skip
    return session, session.batches(), lambda m, batch: case.losses(m, *batch)


def measured(name: str, rounds: int, smoke: bool) -> dict[str, Any]:
    """Medians and ratios of one model."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, list[Any]] = {}
        processes = []
        for way, (world, _) in WAYS.items():
            for rank in range(world):
                here, there = context.Pipe()
                processes.append(context.Process(target=worker, args=(way, rank, name, smoke, folder, there)))
                processes[-1].start()
                pipes.setdefault(way, []).append(here)
        _answers(pipes)
        seconds: dict[str, dict[str, list[float]]] = {what: {way: [] for way in WAYS} for what in ("step", "refresh")}
        order = random.Random(0)
        for i in range(-2, rounds):
            for way in order.sample(list(WAYS), len(WAYS)):
                for what in ("step", "refresh") if i % 5 == 0 else ("step",):
                    taken = _timed(pipes[way], what)
                    if i >= 0:
                        seconds[what][way].append(taken)
        for pipe in (pipe for own in pipes.values() for pipe in own):
            pipe.send("stop")
        for process in processes:
            process.join()
    return {what: _compared(taken) for what, taken in seconds.items()}


def _timed(pipes: Sequence[Any], what: str) -> float:
    time.sleep(0.02)  # idle threads of the one before have stopped spinning
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(what)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - start


def _answers(pipes: dict[str, list[Any]]) -> None:
    for pipe in (pipe for own in pipes.values() for pipe in own):
        pipe.recv()


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the work per second of each way over that of one process with two threads, round by round."""
    found: dict[str, Any] = {}
    for way, taken in seconds.items():
        within = paired(seconds[BASE], taken)
        found[way] = {**summary(taken), "efficiency": within["ratio"], "quartiles": within["quartiles"]}
    return found


def table(results: dict[str, Any]) -> str:
    """One row a model and kind of work; steps and refreshes alike are the same work."""
    rows = []
    for name, entry in results["models"].items():
        for what in ("step", "refresh"):
            found, goal = entry[what], None if name.startswith("smoke-") else GOAL
            efficiency = judged(found[RANKS]["efficiency"], goal, found[RANKS]["quartiles"], least=True)
            rows.append([f"{entry['title']}, {what}", *(f"{found[way]['median_ms']:.1f} ms" for way in WAYS), efficiency])
    return markdown(["", *WAYS, "work per second, 2 processes over 2 threads (goal)"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)
    from models import cases

    known = cases(smoke=args.smoke)
    names = args.only or (["smoke-mlp"] if args.smoke else list(MODELS))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(known)}")
    results: dict[str, Any] = {"models": {}} | ({} if args.smoke else read_json(args.output))
    for name in names:
        case = known[name]
        entry = {"title": case.title, "batch_size": case.batch_size, "probe_size": case.probe_size, "date": now()}
        entry |= {"load_before": load_average(), "hardware": hardware(2)}
        results["models"][name] = entry | measured(name, 3 if args.smoke else args.rounds, args.smoke)
        results |= {"date": now(), "hardware": hardware(2)}
        if not args.smoke:
            write_json(args.output, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
