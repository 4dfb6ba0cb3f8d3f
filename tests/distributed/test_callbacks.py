"""Of several processes the first one calls callbacks; one that cannot start stops all."""

from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.test_callbacks import Recorder
from tests.test_session import loss_fn, net, session


def _watch(rank, folder):
    start(rank, 2, folder / "store")
    recorder = Recorder(private=True)
    # The second process has no callback: nobody waits for it.
    callbacks = [recorder] if rank == 0 else []
    found = {}
    with session(Case().plan(), net(), callbacks=callbacks) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
        found["steps"] = s.steps_done
    found["calls"] = recorder.names
    bad = Recorder(fails_in="start")
    with session(Case().plan(), net(), callbacks=[bad]) as s:
        try:
            s.step(next(iter(s.batches())), loss_fn)
        except (OSError, RuntimeError) as error:
            found["error"] = str(error)
        found["spent"] = s.steps_done
    found["tried"] = bad.names
    return found


def test_the_first_process_alone_calls_them_and_an_error_at_the_start_stops_all():
    first, second = run(_watch, 2)
    steps = first["steps"]
    assert first["calls"] == ["start", *["step"] * steps, "end"] and second["calls"] == []
    assert second["steps"] == steps > 0
    assert first["tried"] == ["start"] and second["tried"] == []
    assert all(
        "start has failed" in found["error"] and found["spent"] == 0 for found in (first, second)
    )
