"""A step of DP-SGD here, in opake and in jax_privacy: results/speed_peers.json.

    pip install jax-privacy opake                  # beside dpkfc, for this benchmark alone
    python benchmarks/speed_peers.py
    python benchmarks/speed_peers.py --smoke       # two rounds; writes only to --output

Every contender trains the same architecture on as many distinct examples, clips to C = 1, adds
noise of σ = 1 once and takes a step of SGD. The gradients of single examples that the peers form
take turns on the MLP, 64 at once. The peers draw noise from their own generators, which
are not secure ones, and keep no ledger. jax_privacy runs under `jax.jit`, and waits for its result.
Contenders take turns; figures are medians over rounds, of processor time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from common import RESULTS, judged, markdown, measure_once
from rounds import compare_steps

OUTPUT = RESULTS / "speed_peers.json"
NAMES = ("plain", "dpkfc", "opake", "jax_privacy")
# What is compared with what, by the first of the two.
PAIRS = {
    "dpkfc": ("dpkfc", "plain"),
    "opake": ("opake", "dpkfc"),
    "jax_privacy": ("jax_privacy", "dpkfc"),
}
PACKAGES = ("opake", "jax-privacy", "jax", "torch")
# Model to examples at once in the peers: gradients of 512 single examples of the MLP fill 4 GB.
MODELS: dict[str, int | None] = {"mnist-cnn": None, "mlp": 64}
WARMUP, ROUNDS = 1, 5


def make_jax(setting: Any, name: str) -> Callable[[], None]:
    """Return a step of jax_privacy under `jax.jit`."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import clipping, noise_addition

    from contenders import CLIP, LR, NOISE

    model, _ = setting.fresh()
    parameters: Any = [jnp.asarray(p.detach().numpy()) for p in model.parameters()]

    def convolve(x: Any, weight: Any, bias: Any) -> Any:
        dimensions = ("NCHW", "OIHW", "NCHW")
        y = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=dimensions)
        y = jax.nn.relu(y + bias[:, None, None])
        window = (1, 1, 2, 2)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")

    def outputs(parameters: Any, x: Any) -> Any:
        rest = list(parameters)
        if name == "mnist-cnn":
            for _ in range(2):
                x = convolve(x, rest.pop(0), rest.pop(0))
        x = x.reshape(len(x), -1)
        while rest:
            x = x @ rest.pop(0).T + rest.pop(0)
            x = jax.nn.relu(x) if rest else x
        return x

    def loss_fn(parameters: Any, x: Any, y: Any) -> Any:
        picked = jnp.take_along_axis(jax.nn.log_softmax(outputs(parameters, x)), y[:, None], 1)
        return -picked.mean()

    more: Any = {"microbatch_size": MODELS[name]}
    gradient = clipping.clipped_grad(loss_fn, l2_clip_norm=CLIP, batch_argnums=(1, 2), **more)
    privatizer = noise_addition.gaussian_privatizer(stddev=NOISE * CLIP, prng_key=jax.random.key(0))

    @jax.jit
    def update(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        noisy, state = privatizer.update(gradient(parameters, x, y), state)
        rate = LR / len(y)
        return jax.tree.map(lambda p, g: p - rate * g, parameters, noisy), state

    state = privatizer.init(parameters)
    generator = np.random.default_rng(0)

    def step() -> None:
        nonlocal parameters, state
        x, y = setting.draw(generator)
        given = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
        parameters, state = update(parameters, state, *given)
        jax.block_until_ready(parameters)

    return step


def measure(options: Namespace) -> dict[str, Any]:
    """Return the figures by model."""
    rounds = 2 if options.smoke else ROUNDS
    return {
        "packages": {name: version(name) for name in PACKAGES},
        "steps": {name: measure_model(name, rounds) for name in MODELS},
    }


def measure_model(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of all contenders for one model."""
    from contenders import Contender, dp_sgd, opake, plain, setting_for
    from models import cases

    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_for(case, Path(folder))
        live = {
            "plain": plain(setting),
            "dpkfc": dp_sgd(setting),
            "opake": opake(setting, MODELS[name]),
            "jax_privacy": Contender(step=make_jax(setting, name)),
        }
        found = compare_steps(live, rounds, WARMUP, PAIRS)
    return {"title": f"{case.title} ({case.batch_size})", **found}


def table(results: dict[str, Any]) -> str:
    """Return a row for each model."""
    rows = []
    for found in results["steps"].values():
        ratios = [found["ratios"][name] for name in NAMES[1:]]
        cells = [judged(ratio["ratio"], None, ratio["quartiles"]) for ratio in ratios]
        rows.append([found["title"], *(f"{found['ms'][name]:,.1f}" for name in NAMES), *cells])
    peers = [f"{name} {results['packages'][name]}" for name in ("opake", "jax-privacy")]
    head = ["model (batch)", "plain SGD, ms", "DP-SGD here, ms", *(f"{name}, ms" for name in peers)]
    return markdown([*head, "here ÷ plain SGD", "opake ÷ here", "jax-privacy ÷ here"], rows)


if __name__ == "__main__":
    # Read when jax starts: one thread, as for torch.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    sys.exit(measure_once(__doc__, None, OUTPUT, measure, table, threads=1))
