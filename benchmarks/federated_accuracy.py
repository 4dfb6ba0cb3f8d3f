"""The setting of the DP-FedSOFIM paper: a linear head on frozen features, 20 clients, 70 rounds, every arm tuned alike.

    python benchmarks/federated_accuracy.py --data-dir DIR      # start or continue; Ctrl-C loses no finished cell
    python benchmarks/federated_accuracy.py --smoke             # a few rounds on made-up features, results below --out
    python benchmarks/federated_accuracy.py --table             # the Markdown tables of what has been run
    python benchmarks/federated_accuracy.py --figure FILE.png   # accuracy over ε

Also reachable as `dpkfc reproduce dp-fedsofim`. Cells are kept by the hash of their settings in
benchmarks/results/federated_accuracy.json; networks and features below --out. One thread; noise is secure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "federated_accuracy.json"


def main() -> int:
    import torch

    from dpkfc.studies.federated.report import figure, tables
    from dpkfc.studies.federated.run import SMOKE, STUDY, reproduce
    from dpkfc.studies.store import Store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="folder with the data sets; default: $DPKFC_DATA")
    parser.add_argument("--out", type=Path, default=Path("runs/federated"), help="networks, features; results of --smoke")
    parser.add_argument("--results", type=Path, help="file of the results")
    parser.add_argument("--smoke", action="store_true", help="a few rounds on made-up features")
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    parser.add_argument("--figure", type=Path, help="draw what has been run and stop")
    arguments = parser.parse_args()
    path = arguments.results or (arguments.out / "smoke.json" if arguments.smoke else RESULTS)
    study = SMOKE if arguments.smoke else STUDY
    if arguments.figure:
        figure(study, Store(path), arguments.figure)
        return 0
    if not arguments.table:
        torch.set_num_threads(1)
        try:
            reproduce(study, path, arguments.out, data_dir=arguments.data_dir, told=lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print("stopped; the same command continues it", file=sys.stderr)
            return 130
    print(tables(study, Store(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
