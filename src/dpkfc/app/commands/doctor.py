"""Define `dpkfc doctor`: how each layer of a model is treated."""

from __future__ import annotations

from dpkfc.app.commands.flags import SettingsOfModel
from dpkfc.terminal import open_console


def doctor(
    model: str = "",
    /,
    *,
    input_shape: str = "",
    settings: SettingsOfModel = None,
) -> None:
    """Show how each layer of a model is treated.

    Args:
        model: A recipe, a run folder, or module:factory; left out with --data or --task.
        input_shape: Shape of one input of a factory's model, e.g. 3,32,32.
        settings: flags of settings that were given.
    """
    from dpkfc.app.doctor import doctor_report

    doctor_report(model, settings or {}, input_shape, open_console())
