"""Folders of images: folders that are not classes, files that are not opened, and what is shown."""

import io
import os
import struct
import sys
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.image_folders import folder_classes
from dpkfc.app.owndata.images import encode_folder
from dpkfc.app.owndata.proposals import empty_schema, kind_of_data
from dpkfc.app.owndata.records import UNKNOWN
from dpkfc.app.owndata.schema import ImageForm, Schema, read_schema
from dpkfc.app.place import data_digest
from dpkfc.app.run_config import RunConfig
from tests.app.own_files import write_images

FORM = ImageForm(size=16)
SCHEMA = Schema(classes=("cat", "dog"), images=FORM)
PIXELS = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype(np.uint8)


def make_folders(root, *names):
    """Make folders with one image each."""
    for name in names:
        (root / name).mkdir(parents=True)
        Image.fromarray(PIXELS).save(root / name / "0.png")
    return root


@pytest.mark.parametrize(
    "names, error",
    [
        (["train/cat", "train/dog", "val/cat", "test/dog"], r"train, val, test are splits.*/train"),
        (["Training/cat", "Testing/cat"], "Training, Testing are splits"),
        (["seg_train/a", "seg_test/a", "seg_pred"], "seg_train, seg_test are splits"),
        (["annotations", "train2017", "val2017"], "are splits"),
        (["cats/train", "cats/test"], "'cats'"),
        (["cat", "dog", "__MACOSX/cat"], "__MACOSX is of a program"),
        (["cat", "dog", "lost+found"], r"lost\+found is of a program"),
        (["images", "masks"], "masks stands beside a folder of images"),
        (["cat", "dog", "labels"], "labels is not of a class"),
        (["images_part_1", "images_part_2"], "look like parts"),
        (["patient1", "patient2", "patient3"], "look like parts or persons"),
        (["Cat", "cat"], "'Cat' and 'cat' differ in case"),
        (["café", unicodedata.normalize("NFD", "café")], r"'cafe\\u0301' and 'caf\\xe9' differ"),
    ],
)
def test_folders_that_are_not_classes_are_named(tmp_path, names, error):
    if "differ" in error and sys.platform != "linux":
        pytest.skip("the names are one folder here")
    with pytest.raises(DatasetError, match=error) as caught:
        folder_classes(make_folders(tmp_path / "d", *names))
    assert len(str(caught.value).replace(str(tmp_path), "")) <= 160


@pytest.mark.parametrize(
    "names", [["with_mask", "without_mask"], ["valid", "invalid"], ["grade1", "grade2"], ["0", "1"]]
)
def test_classes_with_such_words_are_classes(tmp_path, names):
    assert folder_classes(make_folders(tmp_path, *names)) == tuple(sorted(names))


@pytest.mark.parametrize(
    "inner, error",
    [
        ("cat/images cat/masks", "cat/masks stands beside a folder of images"),
        ("cat/lung_masks", "cat/lung_masks is named like masks"),
        ("cat/a/@eaDir", "cat/a/@eaDir is of a program"),
        ("dog/__MACOSX", "dog/__MACOSX is of a program"),
        ("dog/x/train dog/x/test", "train, test are splits"),
    ],
)
def test_folders_inside_of_a_class_are_named(tmp_path, inner, error):
    folder = make_folders(tmp_path, "cat", "dog", *inner.split())
    with pytest.raises(DatasetError, match=error):
        encode_folder(folder, SCHEMA)
    if "train" not in error:
        text = empty_schema(folder, "", "", None)
        (tmp_path / "s.toml").write_text(text, "utf-8")
        schema = read_schema(tmp_path / "s.toml")
        assert schema.classes == ("cat", "dog")
        count = 2 + inner.count("cat/images")
        assert len(encode_folder(folder, schema)) == count


def test_a_schema_leaves_folders_of_the_system_out(tmp_path):
    folder = make_folders(tmp_path / "d", "cat", "dog", "__MACOSX", "@eaDir")
    (tmp_path / "s.toml").write_text(empty_schema(folder, "", "", None), "utf-8")
    schema = read_schema(tmp_path / "s.toml")
    assert schema.classes == ("cat", "dog") and len(encode_folder(folder, schema)) == 2


def test_hidden_files_and_folders_of_patients(tmp_path):
    folder = make_folders(tmp_path, "cat/p1/left", "cat/p2", "dog/.ipynb_checkpoints", "dog/.x/y")
    Image.fromarray(PIXELS).save(folder / "cat" / "._0.png")
    Image.fromarray(PIXELS).save(folder / ".0.png")
    Image.fromarray(PIXELS).save(folder / "dog" / "0.TIF")
    Image.fromarray(PIXELS).save(folder / "dog" / "1.bmp")
    (folder / "dog" / "2.dcm").write_text("x")
    records = encode_folder(folder, SCHEMA)
    assert records.names == ["cat/p1/left/0.png", "cat/p2/0.png", "dog/0.TIF", "dog/1.bmp"]
    assert torch.equal(records.inputs, records.inputs[:1].expand(4, -1, -1, -1))
    shares = {what: share for (what, _), share in records.figures.items()}
    assert shares.pop("equal to another file in pixels and class") == 1
    assert list(shares.values()) == [pytest.approx(1 / 5), 0]  # another suffix, and broken


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode elsewhere")
def test_names_that_are_not_unicode(tmp_path):
    folder = make_folders(tmp_path / "d", "cat", "dog")
    odd = os.fsdecode(b"M\xfcller")
    Image.fromarray(PIXELS).save(folder / "cat" / f"{odd}.png")
    assert encode_folder(folder, SCHEMA).names == ["cat/0.png", "cat/M\\xfcller.png", "dog/0.png"]
    # The run goes on: which files there are is private.
    before = data_digest(RunConfig().change(data=str(folder)))
    (folder / "cat" / f"{odd}.png").rename(folder / "cat" / f"{odd}{odd}.png")
    assert data_digest(RunConfig().change(data=str(folder))) != before
    (folder / odd).mkdir()
    with pytest.raises(DatasetError, match=r"folder 'M\\udcfcller' is not UTF-8; rename it"):
        folder_classes(folder)


def test_pipes_and_links_out_of_the_folder_are_not_opened(tmp_path):
    folder = write_images(tmp_path / "pets", 4)
    outside = make_folders(tmp_path / "outside", "x")
    os.mkfifo(folder / "cat" / "pipe.png")
    (folder / "cat" / "out.png").symlink_to(outside / "x" / "0.png")
    (folder / "cat" / "loop.png").symlink_to(folder / "cat" / "loop.png")
    (folder / "dog" / "in.png").symlink_to(folder / "cat" / "0.png")
    (folder / "dog" / "folder.png").mkdir()
    records = encode_folder(folder, SCHEMA)
    known = dict(zip(records.names, records.labels.tolist(), strict=True))
    assert len(known) == 8 and known["dog/in.png"] == 1
    assert [name for name, label in known.items() if label == UNKNOWN] == [
        "cat/loop.png",
        "cat/out.png",
        "cat/pipe.png",
    ]
    (folder / "dog" / "more").symlink_to(outside / "x")
    with pytest.raises(DatasetError, match="dog/more is a link, which is not followed"):
        encode_folder(folder, SCHEMA)


def test_rows_name_files_of_the_folder_alone(tmp_path):
    folder = make_folders(tmp_path / "d", "a", "b")
    make_folders(tmp_path / "e", "a")
    names = ["a/0", "a\\0.png", " b/0.png ", "../e/a/0.png", str(tmp_path / "e/a/0.png"), "a", "."]
    names += ["", "x\0y", "n" * 300, "c/0.png", "/dev/zero"]
    table = tmp_path / "labels.csv"
    rows = "".join(f"p{number},{name},cat\n" for number, name in enumerate(names))
    table.write_text("lesion,file,animal\n" + rows, "utf-8")
    schema = Schema(target="animal", classes=("cat", "dog"), images=ImageForm(size=16, file="file"))
    records = encode_folder(folder, schema, table)
    assert records.labels.tolist() == [0] * 3 + [UNKNOWN] * (len(names) - 3)
    assert records.figures["named by several rows", "files"] == pytest.approx(2 / len(names))
    text = empty_schema(folder, "animal", "", table)
    assert 'file = "lesion"' in text
    (folder / "a" / "0.png").rename(folder / "a" / "0.PNG")
    assert encode_folder(folder, schema, table).labels[0] == 0


def read_pixels(image, tmp_path, name="x.png", **settings):
    """Return pixels of a file, as colours from 0 to 255 `[16, 16, C]`, and remarks."""
    (tmp_path / "cat").mkdir(exist_ok=True)
    path = tmp_path / "cat" / name
    saved = {key: settings.pop(key) for key in ("exif", "transparency") if key in settings}
    image.save(path, **saved)
    schema = Schema(classes=("cat", "dog"), images=ImageForm(size=16, **settings))
    records = encode_folder(tmp_path, schema)
    path.unlink()
    remarks = {what for (what, _), share in records.figures.items() if share}
    return (records.inputs[0].permute(1, 2, 0).numpy() + 1) * 127.5, remarks


_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.jpg"])
def test_pictures_are_turned_as_they_are_shown(tmp_path, name):
    smooth = Image.fromarray(PIXELS[:2, :2]).resize((16, 16))
    for orientation, method in _STORED.items():
        exif = Image.Exif()
        exif[274] = orientation
        pixels, _ = read_pixels(smooth.transpose(method), tmp_path, name, exif=exif)
        assert np.abs(pixels - np.asarray(smooth)).max() < 30


@pytest.mark.parametrize("kind", ["RGBA", "LA", "RGB", "L", "I;16"])
@pytest.mark.parametrize("background, colour", [("white", 255), ("black", 0)])
def test_transparency_shows_the_background(tmp_path, kind, background, colour):
    alpha = np.zeros((16, 16), np.uint8)
    alpha[:8] = 255
    grey = np.where(alpha > 0, 128, 7)
    settings = {"background": background}
    if kind == "I;16":
        image = Image.fromarray((grey * 257).astype(np.uint16))
        settings["transparency"] = 7 * 257
    else:
        image = Image.fromarray(grey.astype(np.uint8)).convert(kind.rstrip("A"))
        if kind.endswith("A"):
            image.putalpha(Image.fromarray(alpha))
        else:
            settings["transparency"] = 7 if kind == "L" else (7, 7, 7)
    pixels, _ = read_pixels(image, tmp_path, **settings)
    assert np.allclose(pixels[:8], 128, atol=0.01) and np.allclose(pixels[8:], colour, atol=0.01)


@pytest.mark.parametrize("name", ["x.png", "x.tif"])
def test_white_scales_grey_values_of_more_than_8_bits(tmp_path, name):
    values = (np.arange(256).reshape(16, 16) * 16).astype(np.uint16)
    pixels, remarks = read_pixels(Image.fromarray(values), tmp_path, name, white=4095)
    assert np.allclose(pixels, values[..., None] / 4095 * 255, atol=1e-3) and not remarks
    pixels, remarks = read_pixels(Image.fromarray(values), tmp_path, name, white=2000)
    assert pixels.max() == 255 and remarks == {"with pixels outside of 0 to white"}
    eight = Image.fromarray(PIXELS)
    pixels, _ = read_pixels(eight, tmp_path, name, white=4095)
    assert np.allclose(pixels, PIXELS, atol=1e-3)


def test_white_is_inverted_where_a_file_says_so(tmp_path):
    values = (np.arange(256).reshape(16, 16) * 16).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF")
    content = bytearray(file.getvalue())
    place = content.find(struct.pack("<HHI", 262, 3, 1)) + 8
    content[place] = 0
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.tif").write_bytes(content)
    form = ImageForm(size=16, channels=1, white=4095)
    records = encode_folder(tmp_path, Schema(classes=("cat", "dog"), images=form))
    assert np.allclose(records.inputs[0, 0].numpy(), 1 - values / 4095 * 2, atol=1e-5)


def png_of_16_bits(pixels, significant=0):
    """Return a PNG file of 16 bits a channel, which Pillow writes for grey values alone."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    bits = chunk(b"sBIT", bytes([significant] * channels)) if significant else b""
    packed = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + bits + packed + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_are_not_read_as_8(tmp_path, channels):
    folder = make_folders(tmp_path, "cat", "dog")
    (folder / "cat" / "1.png").write_bytes(png_of_16_bits(np.full((16, 16, channels), 200)))
    records = encode_folder(folder, SCHEMA)
    assert records.labels.tolist() == [0, UNKNOWN, 1] and not records.inputs[1].any()
    assert any("16 bits" in what for what, _ in records.figures)


@pytest.mark.parametrize(
    "significant, line",
    [
        (12, "white = 4095  # as headers say"),
        (0, "white = 65535  # 16 bits; 4095 where a detector fills 12 of them"),
        (None, "# white = 4095  # of grey images with more than 8 bits"),
    ],
)
def test_white_is_proposed_by_headers(tmp_path, significant, line):
    folder = make_folders(tmp_path, "cat", "dog")
    if significant is not None:
        for number in range(1, 4):
            content = png_of_16_bits(np.full((16, 16, 1), 200), significant)
            (folder / "cat" / f"{number}.png").write_bytes(content)
    assert line in empty_schema(folder, "", "", None).splitlines()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.zip", "is an archive; unpack it"),
        ("a.csv.xz", "is an archive; unpack it"),
        ("a.json", "name it .jsonl"),
        ("a.orc", "save it as .csv, .parq"),
    ],
)
def test_files_of_other_forms_are_named_with_what_to_do(name, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("x")
    with pytest.raises(DatasetError, match=fix) as refusal:
        kind_of_data(Path(name))
    assert len(str(refusal.value)) <= 160


def test_parts_of_a_table_that_spark_wrote_as_csv_are_no_folder_of_images(tmp_path):
    (tmp_path / "part-00000-c000.csv").write_text("age,y\n1,0\n")
    with pytest.raises(DatasetError, match="parts of a table that are not .parquet; join them"):
        kind_of_data(tmp_path)
