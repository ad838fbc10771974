"""The command line: which parts, which sides, how many rounds."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from bench.context import Bench
from bench.export import export_model
from bench.floors import Shape
from bench.parts import PARTS, workloads
from bench.peers import llama, vllm
from bench.peers.place import HOME, ROOT
from bench.quiet import PATIENCE_S
from bench.results import Results
from bench.roster import Model, Roster
from bench.side import import_root
from bench.workload import FixedWork
from engine.config import EngineConfig
from engine.model import open_files
from engine.model.gguf_file import GGUFFile
from settings import get_settings

EPILOG = "Everything, five rounds, takes about an hour on two cores; nothing else may run meanwhile."
QUICK_PROMPTS = 8
QUICK_TOKENS = 16


def main() -> None:
    """Run the parts that were asked for. Ctrl-C ends every process; the parts that were finished are recorded."""
    args = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        with import_root() as path:
            _run(args, path)
    except KeyboardInterrupt:
        sys.exit("stopped; the parts that were finished are recorded")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/engine.py", description=__doc__, epilog=EPILOG)
    parser.add_argument("--only", type=_listed, default=[], metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--sides", type=_listed, default=[], metavar="SIDE,SIDE", help="those whose names begin so: headrace,vllm"
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (5; with --quick 1)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of each side")
    parser.add_argument("--quick", action="store_true", help="little work, to try the benchmark itself")
    parser.add_argument("--patience", type=float, help="seconds to wait for a quiet machine before each measurement")
    parser.add_argument("--out", type=Path, help="where RESULTS.md and results.json are; with --quick not in bench/")
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.patience = args.patience if args.patience is not None else (0.0 if args.quick else PATIENCE_S)
    args.out = args.out or (HOME / "quick" if args.quick else ROOT / "bench")
    return args


def _listed(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(args: argparse.Namespace, path: Path) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    model, shape = find_model()
    work = FixedWork.read()
    bench = Bench(
        model=model,
        shape=shape,
        roster=Roster(model, args.threads, path),
        work=work.quick(QUICK_PROMPTS, QUICK_TOKENS) if args.quick else work,
        results=Results(args.out),
        rounds=args.rounds,
        threads=args.threads,
        wanted=tuple(args.sides),
        patience_s=args.patience,
        quick=args.quick,
    )
    for gap in [*vllm.missing(), *llama.missing()]:
        bench.say(f"missing: {gap}")
    names = args.only or list(PARTS)
    together = [name for name in names if PARTS[name] is workloads.measure]
    if together:
        workloads.measure(bench, together)
    for name in names:
        if name not in together:
            bench.say(f"{name}: {(PARTS[name].__module__)}")
            PARTS[name](bench)
    bench.say(f"\n{args.out / 'RESULTS.md'}")


def find_model() -> tuple[Model, Shape]:
    """The configured model as a GGUF file and as a directory."""
    settings = get_settings()
    name = settings.model.model_path
    files = open_files(EngineConfig(model=name, cache=settings.cache))
    if not isinstance(files, GGUFFile):
        sys.exit(f"the benchmark needs a GGUF file, from which it makes the peers' models; {name} is a directory")
    directory = export_model(name, settings.cache)
    shape = Shape.of(directory)
    return Model(name, files.files[0], directory, shape.parameters, shape.kv_bytes_per_token), shape
