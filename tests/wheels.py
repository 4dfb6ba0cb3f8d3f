"""Build a wheel from a copy of its source, and install it in a fresh environment. No network."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def install_wheel(source, place, is_needed):
    """Install the wheel of `source` below `place`; return the folders of its scripts and modules.

    The libraries it needs are links into the environment of the running interpreter.
    """
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    offline = ("--no-index", "--no-deps")
    run_outside(*pip, "wheel", *offline, "--no-build-isolation", "-w", place, source)
    (wheel,) = place.glob("*.whl")
    environment = place / "environment"
    run_outside(sys.executable, "-m", "venv", "--without-pip", environment)
    bases = {"base": str(environment), "platbase": str(environment)}
    modules = Path(sysconfig.get_path("purelib", "venv", bases))
    scripts = Path(sysconfig.get_path("scripts", "venv", bases))
    for library in Path(sysconfig.get_path("purelib")).iterdir():
        if is_needed(library.name):
            (modules / library.name).symlink_to(library)
    run_outside(*pip, "--python", scripts / "python", "install", *offline, wheel)
    return scripts, modules


def run_outside(*words, cwd=None):
    """Run a command that must succeed, outside of the checkout, and return what it printed."""
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=user_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def user_environment():
    """What a command of a user finds: nothing of the checkout.

    pip takes a package that PYTHONPATH leads to for installed.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "DPKFC_DATA")
    return {name: value for name, value in os.environ.items() if name not in hidden}
