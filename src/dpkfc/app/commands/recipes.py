"""Define `dpkfc recipes`: the built-in tasks."""

from __future__ import annotations

from dpkfc.app.recipes.catalogue import RECIPES
from dpkfc.app.settings import RunSettings
from dpkfc.terminal import make_table, open_console


def print_recipes() -> None:
    """Show the built-in tasks that --recipe takes."""
    table = make_table("recipe", "data", "input", "classes", "method")
    for recipe in RECIPES.values():
        shape = " × ".join(map(str, recipe.input_shape))
        defaults = recipe.defaults.get("run", {})
        method = defaults.get("method", RunSettings.method)
        classes = str(recipe.num_classes) if recipe.num_classes > 1 else "–"
        table.add_row(recipe.name, recipe.title, shape, classes, method)
    console = open_console()
    console.print(table)
    console.print("For your own data: --data FILE or --task module:function instead of --recipe.")
