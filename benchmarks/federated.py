"""What a federated round costs beside training: the server's step over the size of the model, and
whole runs.

    python benchmarks/federated.py                  # every part; about ten minutes on two cores
    python benchmarks/federated.py --part steps     # d = 10⁴ … 10⁷, 20 clients
    python benchmarks/federated.py --part runs      # 100 clients × 50 rounds in this process
    python benchmarks/federated.py --part flower    # the same on Flower's simulation
    python benchmarks/federated.py --smoke          # small sizes; prints, writes nothing

The server's step is everything from the first message to the new parameters: checks, sum over
clients, division, rule. FedAvg's is that with θ ← θ − ḡ, DP-FedSOFIM's with its preconditioned
step. `weighted` is the aggregation that other engines do, a mean of the clients' tensors weighted
by their sizes, and no check of messages. All in turn within one run, ratios of medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import (
    RESULTS,
    make_parser,
    markdown,
    read_json,
    stamp,
    write_json,
)

OUTPUT = RESULTS / "federated.json"
CLIENTS = 20
DELTA = 1e-5
PARTS = ("steps", "runs", "flower")


def server_of(rule: Any, d: int, rounds: int) -> Any:
    """A server of a model with d parameters, all clients enrolled."""
    import torch

    from dpkfc.federated import FederatedConfig, Server, TrustedServer

    width = 100
    model = torch.nn.Linear(width, d // width, bias=False)
    config = FederatedConfig(
        clients=CLIENTS,
        rounds=rounds,
        expected_records=50_000,
        privacy=TrustedServer("clients"),
        rule=rule,
        colluding=0,
    )
    server = Server(config.with_noise(10.0, DELTA), model)
    for client in range(CLIENTS):
        server.enroll({"kind": "hello", "contract": server.contract, "client": client})
    return server


def step_seconds(server: Any) -> float:
    """One round of messages made of numbers at random: wall time from the first message to the new
    parameters.
    """
    import torch

    sent = server.open_round()
    plain = {"kind": "sum", "round": sent[0]["round"], "contract": server.contract}
    body = {f"sum/{name}": torch.randn(p.shape) for name, p in server.parameters.items()}
    started = time.perf_counter()
    for client in sent:
        assert server.receive({**plain, **body, "client": client})
    server.close_round()
    return time.perf_counter() - started


def weighted_seconds(server: Any) -> float:
    """Σ nᵢ xᵢ / Σ nᵢ and θ ← θ − x̄, tensor by tensor."""
    import torch

    body = {name: torch.randn(p.shape) for name, p in server.parameters.items()}
    # A server refuses parameters that others have written.
    parameters = {name: p.detach().clone() for name, p in server.parameters.items()}
    weights = [100 + client for client in range(CLIENTS)]
    started = time.perf_counter()
    for name, p in parameters.items():
        total = body[name] * weights[0]
        for weight in weights[1:]:
            total.add_(body[name], alpha=weight)
        p.sub_(total / sum(weights))
    return time.perf_counter() - started


def server_steps(sizes: Sequence[int], times: int) -> list[dict[str, Any]]:
    """Medians of both rules, alternating, for each size."""
    from dpkfc.federated import FedAvg, FedSOFIM

    rows = []
    for d in sizes:
        rules = {"fedavg": FedAvg(), "fedsofim": FedSOFIM()}
        servers = {name: server_of(rule, d, times + 2) for name, rule in rules.items()}
        taken: dict[str, list[float]] = {name: [] for name in (*servers, "weighted")}
        for k in range(times + 1):
            for name, server in servers.items():
                seconds = step_seconds(server)
                if k:  # the first round makes the states
                    taken[name].append(seconds)
            taken["weighted"].append(weighted_seconds(servers["fedavg"]))
        medians = {f"{name}_ms": round(1e3 * statistics.median(x), 3) for name, x in taken.items()}
        sofim = statistics.median(taken["fedsofim"])
        ratio, usual = (
            round(sofim / statistics.median(taken[name]), 3) for name in ("fedavg", "weighted")
        )
        ratios = {"ratio": ratio, "ratio_to_weighted": usual}
        rows.append({"d": d, "clients": CLIENTS, **medians, **ratios})
    return rows


def runs(clients: int, rounds: int) -> list[dict[str, Any]]:
    """Whole runs of a linear head of 650 parameters on random features, 50 records a client."""
    import torch

    from dpkfc import KFAC, FeatureNoise
    from dpkfc.federated import (
        FederatedConfig,
        FedGD,
        FedSOFIM,
        PerUpload,
        SecureAggregation,
        TrustedServer,
        federate,
    )
    from dpkfc.federated.partition import iid, parts

    torch.manual_seed(0)
    records = 50 * clients
    x, y = torch.randn(records, 64), torch.randint(0, 10, (records,))
    data = parts((x, y), iid(records, clients))

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    cases = {
        "DP-FedGD, trusted server": {"rule": FedGD(), "privacy": TrustedServer()},
        "DP-FedSOFIM, shares of noise": {"rule": FedSOFIM(), "privacy": TrustedServer("clients")},
        "DP-FedSOFIM, per upload": {"rule": FedSOFIM(), "privacy": PerUpload()},
        "federated DP-KFC": {
            "privacy": TrustedServer("clients"),
            "preconditioner": KFAC(probe=FeatureNoise(64), every=10, sides="both"),
        },
        "DP-FedSOFIM, simulated masks": {"rule": FedSOFIM(), "privacy": SecureAggregation()},
    }
    rows = []
    for name, settings in cases.items():
        sizes = {"clients": clients, "rounds": rounds, "expected_records": records}
        plan = FederatedConfig(**sizes, colluding=0, **settings).calibrate(3.0, DELTA)
        run = federate(plan, torch.nn.Linear(64, 10), loss, data)
        per = 1e3 * run.seconds / (clients * rounds)
        taken = {"s": round(run.seconds, 2), "ms_per_client": round(per, 3)}
        rows.append({"run": name, "clients": clients, "rounds": rounds, **taken})
    return rows


def flower(clients: int, rounds: int) -> dict[str, Any]:
    """The demo's app on Flower's simulation, each client in a process of Ray's with a ledger of its
    own on the disk.
    """
    from tempfile import TemporaryDirectory

    from dpkfc.app.federated_demo import APP
    from dpkfc.federated.flower import simulate

    settings = {"clients": clients, "rounds": rounds, "method": "dp-fedsofim"}
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        run = simulate(APP, settings, folder=folder)
        seconds = time.perf_counter() - started
    survivors = min(record.survivors or 0 for record in run.records)
    later = [record.seconds for record in run.records[1:]]
    return {
        "app": "dpkfc demo-federated, DP-FedSOFIM, masks simulated",
        "clients": clients,
        "rounds": len(run.records),
        "s": round(seconds, 1),
        "round_s": round(statistics.median(later), 3),
        "survivors": survivors,
        "rejected": sum(run.server.rejected.values()),
    }


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """The server's step for people."""
    columns = ("fedavg_ms", "weighted_ms", "fedsofim_ms", "ratio", "ratio_to_weighted")
    steps = [[f"{r['d']:,}", *(f"{r[c]:g}" for c in columns)] for r in rows]
    return markdown(
        ["parameters", "FedAvg, ms", "weighted, ms", "DP-FedSOFIM, ms", "ratio", "to weighted"],
        steps,
    )


def runs_table(rows: Sequence[dict[str, Any]]) -> str:
    """Whole runs for people."""
    whole = [
        [r["run"], f"{r['clients']} × {r['rounds']}", f"{r['s']:g}", f"{r['ms_per_client']:g}"]
        for r in rows
    ]
    return markdown(["run", "clients × rounds", "s", "ms a client"], whole)


def table(found: dict[str, Any]) -> str:
    """Every part that has been measured."""
    parts = []
    if "steps" in found:
        parts.append(steps_table(found["steps"]["server_step"]))
    if "runs" in found:
        parts.append(runs_table(found["runs"]["runs"]))
    if "flower" in found:
        f = found["flower"]
        parts.append(
            f"Flower's simulation, {f['clients']} clients × {f['rounds']} rounds: {f['s']:g} s in"
            " all, "
            f"{f['round_s']:g} s a round after the first ({f['app']})."
        )
    return "\n\n".join(parts)


def measure(part: str, smoke: bool) -> dict[str, Any]:
    """One part."""
    if part == "runs":
        return {"goal_s": 20.0, "runs": runs(4, 3) if smoke else runs(100, 50)}
    if part == "flower":
        return {"goal_s": 180.0, **flower(100, 50)}
    sizes = [10**4, 10**5] if smoke else [10**4, 10**5, 10**6, 10**7]
    return {"server_step": server_steps(sizes, 3 if smoke else 15), "goal_ratio": 1.1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="may be given several times; default: all"
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    import torch

    torch.set_num_threads(arguments.threads)
    found = {} if arguments.smoke else read_json(OUTPUT)
    for part in arguments.part or (PARTS[:2] if arguments.smoke else PARTS):
        found[part] = stamp(arguments.threads) | measure(part, arguments.smoke)
        if not arguments.smoke:
            write_json(OUTPUT, found)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
