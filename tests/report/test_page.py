"""The page as text: complete, self-contained, and nothing that a run folder says becomes markup."""

import re
from html.parser import HTMLParser

import pytest

from dpkfc.app.html.contents import Contents, read_all
from dpkfc.app.html.page import build, render_card, write_page
from dpkfc.app.run_folder import RunFolderError
from tests.command_line import call
from tests.report.page_cases import HOSTILE, change_card, run_folder, summary, tuning

EMPTY = {"meta", "link", "img", "br", "input", "hr"}


class Checked(HTMLParser):
    """Every element with its attributes; complains about an element that is not closed."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.elements = []
        self.texts = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.texts.append(data)


def check_page(page):
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


def text_of(page):
    return " ".join(" ".join(check_page(page).texts).split())


def render_page(tmp_path, words="", method="dp-kfc"):
    run_folder(tmp_path / "a", method, words=words, recipe=words or "digits")
    run_folder(tmp_path / "b", "dp-sgd", sigma=2.0)
    (tmp_path / "a" / "plots").mkdir()
    (tmp_path / "a" / "plots" / "spectra.png").write_bytes(b"\x89PNG\r\n\x1a\nrest")
    paths = [tmp_path / "a", tmp_path / "b", tuning(tmp_path / "tune.json", words or "said")]
    read = read_all([*paths, tmp_path / "missing"])
    runs = [
        summary("dp-sgd", epsilon=e, seed=s, accuracy=0.8 + 0.01 * s)
        for e in (1.0, 8.0)
        for s in range(3)
    ]
    runs.append(summary(method, warnings=[words or "NOT PRIVATE: said"]))
    contents = Contents(runs=[*read.runs, *runs], studies=read.studies, broken=read.broken)
    return build(contents, words or "Report")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return render_page(tmp_path_factory.mktemp("page"))


def test_the_page_is_well_formed_and_says_what_it_must(written):
    page, text = check_page(written), text_of(written)
    for words in (
        "Accuracy against ε",
        "Learning curves",
        "Privacy card",
        "Tuning of digits",
        "It does not cover the choice of settings",
        "does not exist",
        "Figures that ε does NOT protect",
    ):
        assert words in text
    assert "dpkfc train --config config.toml" in text
    assert [attrs["lang"] for tag, attrs in page.elements if tag == "html"] == ["en"]
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert (
        headings[0] == 1
        and headings.count(1) == 1
        and all(b <= a + 1 for a, b in zip(headings, headings[1:], strict=False))
    )


def test_smoke_runs_are_marked_at_the_top_and_in_their_row(tmp_path):
    folders = [run_folder(tmp_path / "small", smoke=True), run_folder(tmp_path / "b")]
    text = text_of(build(read_all(folders), "Report"))
    assert "1 of 2 runs are smoke runs" in text and text.count("digits smoke run") == 1


def test_every_figure_has_words_and_every_heading_of_a_table_a_scope(written):
    page = check_page(written)
    figures = [attrs for _, attrs in page.elements if attrs.get("class") == "plot"]
    assert figures and all(
        attrs["role"] == "img" and len(attrs["aria-label"]) > 20 for attrs in figures
    )
    assert all(attrs.get("scope") for tag, attrs in page.elements if tag == "th")
    assert all(attrs.get("alt") for tag, attrs in page.elements if tag == "img")
    assert all(attrs.get("type") == "button" for tag, attrs in page.elements if tag == "button")


def test_nothing_is_fetched_and_no_script_but_ours_may_run(written):
    page = check_page(written)
    links = [
        attrs.get(name)
        for _, attrs in page.elements
        for name in ("src", "href", "action", "data")
        if attrs.get(name)
    ]
    assert all(link.startswith(("data:image/png", "#")) for link in links)
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    )
    assert "'unsafe-inline'" not in policy.split("style-src")[0]
    assert [attrs for tag, attrs in page.elements if tag == "script"] == [{}]


def test_a_card_of_federated_training_says_whom_its_guarantee_holds_against(tmp_path):
    path = run_folder(tmp_path / "a")
    change_card(
        path,
        title="federated DP-KFC on the digits",
        guarantee={
            "against": "all but the server",
            "epsilon_for_others": {"the server": 10.68001},
        },
    )
    (path / "config.toml").unlink()
    text = text_of(build(read_all([path]), "Report"))
    assert (
        text.count("all but the server") >= 3 and "ε for the server" in text and "10.6801" in text
    )
    assert "federated DP-KFC" in text and "the digits" in text


def test_a_hostile_run_folder_stays_text(written, tmp_path):
    harmless = {tag for tag, _ in check_page(written).elements}
    page = check_page(render_page(tmp_path, HOSTILE, HOSTILE))
    # Caveats are quoted.
    assert {tag for tag, _ in page.elements} <= harmless | {"blockquote"}
    assert not [
        name
        for _, attrs in page.elements
        for name in attrs
        if name.startswith("on") or name == "srcdoc"
    ]
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert any("</script><script>" in text for text in page.texts)


def test_a_damaged_card_is_named_and_markup_in_a_card_stays_text():
    assert "The card is damaged" in render_card({"format": 1, "guarantee": {}})


def test_a_picture_that_is_no_png_is_left_out(tmp_path):
    path = run_folder(tmp_path / "a")
    (path / "plots").mkdir()
    (path / "plots" / "spectra.png").write_text("<svg onload='window.hacked=1'></svg>")
    (path / "plots" / "signal_to_noise.png").write_bytes(b"\x89PNG\r\n\x1a\nrest")
    assert list(read_all([path]).runs[0].pictures) == ["Signal-to-noise ratio of each layer"]


def test_a_page_is_written_over_an_earlier_page_and_no_other_file(tmp_path):
    run, out = run_folder(tmp_path / "a"), tmp_path / "report.html"
    write_page([run], out)
    write_page([run], out)
    assert "<svg" in out.read_text("utf-8")
    (tmp_path / "mine.html").write_text("mine")
    below = run / "config.toml" / "x"
    for wrong, message in (
        (tmp_path / "mine.html", "exists and would be lost"),
        (tmp_path, "Is a directory"),
        (below, "written"),
    ):
        with pytest.raises(RunFolderError, match=message):
            write_page([run], wrong)
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_the_command_names_what_it_leaves_out(tmp_path):
    run_folder(tmp_path / "a")
    done = call("report", tmp_path / "a", tmp_path / "none", "--out", tmp_path / "r.html")
    assert done.exit_code == 0 and "(1 run, 0 tuning reports)" in done.stdout
    assert "none: does not exist; name run folders" in " ".join(done.stderr.split())
    wrong = call("report", tmp_path / "a" / "config.toml").stderr
    assert "config.toml: is neither a run folder nor a tune.json" in wrong
    done = call("report", tmp_path / "none", "--out", tmp_path / "r2.html")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and not (tmp_path / "r2.html").exists()
