"""A card of several processes: rank 0 writes it, and all learn where the weights were changed."""

import pytest
import torch
from safetensors.torch import load_file

from dpkfc import PrivacyConfig
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.report.verify import verify_ledger
from tests.distributed import group
from tests.distributed.fsdp import N, Run, full, weights
from tests.test_session import loss_fn

SAID = {"title": "shared", "chosen_by": "beforehand", "not_private": {}}


class Certified(Run):
    """With secret noise, so that there is a guarantee to write down."""

    def plan(self):
        settings = {"expected_batch_size": 6, "steps": 2, **self.settings}
        return PrivacyConfig(**settings).with_noise(2.0, 1e-3, N)


RUN = Certified({"weight_average": WeightEMA(0.5)})


def _work(rank, folder, divided):
    group.start(rank, 2, folder / "store")
    with RUN.open(divided=divided, ledger=folder / "ledger.jsonl") as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
        session.write_card(folder / "card", **SAID)
        with session.averaged_weights():
            averaged = weights(session.model)
            names = {name: full(p) for name, p in session.model.named_parameters()}
        message = ""
        if rank == 1:
            next(iter(session.model.parameters())).data.mul_(2)
        try:
            session.write_card(folder / "again", **SAID)
        except RuntimeError as error:
            message = str(error)
    return {"averaged": averaged, "said": message, "names": list(names)}


@pytest.mark.parametrize("divided", [False, True])
def test_all_processes_write_one_card(divided, tmp_path):
    found = group.run(_work, 2, divided, folder=tmp_path)
    assert all(found)
    tensors = load_file(tmp_path / "card" / "model.safetensors")
    written = torch.cat([tensors[name].flatten() for name in found[0]["names"]])
    assert written.tolist() == found[0]["averaged"] == found[1]["averaged"]
    answers = verify_ledger(tmp_path / "card" / "ledger.jsonl")
    assert answers["weights"].startswith("equal to") and answers["pages of the card"].startswith(
        "say"
    )
    assert all("is not as the last release left it" in result["said"] for result in found)
    assert not (tmp_path / "again").exists()
