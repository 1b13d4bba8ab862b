"""The ladder's registry, sources, pages, tables and figures agree, and nothing written is stale."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import docs_facts
import docs_figures
import docs_tables
import docs_update
from docs_facts import H200, KERNELS, LADDER, PRIMARY, ROOT, RTX4080, MissingRecordError, rung

from fastattn.explain._formulas import V6_HALF, V6_SPLIT, dtypes

NAMES = list(docs_facts.registry())
# A line of the registry without its file is one test's failure, not the end of all of them. Tile
# sizes of a folder have no one place.
TILED = [n for n, stem in docs_facts.registry().items() if (KERNELS / f"{stem}.cu").is_file()]
TILED = [name for name in TILED if rung(name).arrays]
SKELETON = (
    "The arithmetic",
    "Who owns what",
    "What changed",
    "Before and after",
    "What hurts now",
)
HEADER = ("Idea", "New", "Who owns what", "Limit now", "Measured", "Read more")
STALE = "out of date: scripts/docs --update"


def needs_record(name: str) -> None:
    """A new rung has no row in the benchmark's record until a GPU has run it."""
    try:
        docs_facts.benchmark_row(name)
    except MissingRecordError as reason:
        pytest.xfail(str(reason))


# --- one line, one file, one page -----------------------------------------------------------------


def test_registry_and_files_agree() -> None:
    """A rung is a file, or a folder where it is a big one."""
    found = {path.stem for path in KERNELS.iterdir() if path.suffix == ".cu" or path.is_dir()}
    assert found == set(docs_facts.registry().values())
    for name, stem in docs_facts.registry().items():
        assert stem.startswith(f"{name}_")


def test_a_folder_s_source_is_the_file_that_defines_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs_facts, "registry", lambda: {"v9": "v9_big"})
    folder = tmp_path / "v9_big"
    folder.mkdir()
    (folder / "half.cuh").write_text("// extern const Kernel v9_big;\n")
    (folder / "instances.def").write_text("FASTATTN_INSTANCE(half, 64)\n")
    with pytest.raises(LookupError, match="v9: 0 files of v9_big/"):
        docs_facts.sources("v9", tmp_path)
    (folder / "kernel.cu").write_text("extern const Kernel v9_big;\nconst Kernel v9_big = {\n};\n")
    assert docs_facts.sources("v9", tmp_path) == [folder / "kernel.cu", folder / "half.cuh"]
    (folder / "other.cu").write_text("const Kernel v9_big = {};\n")
    with pytest.raises(LookupError, match="v9: 2 files of v9_big/"):
        docs_facts.sources("v9", tmp_path)
    (tmp_path / "v9_big.cu").write_text("")
    assert docs_facts.sources("v9", tmp_path) == [tmp_path / "v9_big.cu"]


def test_registry_and_pages_agree() -> None:
    assert {path.stem for path in LADDER.glob("v*.md")} == set(NAMES)
    figures = {path.stem for path in (LADDER / "figures").glob("*.svg")}
    assert figures == {*NAMES, "ladder"}


@pytest.mark.parametrize("name", NAMES)
def test_a_rung_is_short_and_opens_with_the_same_comment(name: str) -> None:
    first, *others = docs_facts.sources(name)
    text = first.read_text()
    assert text.count("\n") < (600 if others else 300)
    for path in others:
        assert path.read_text().count("\n") < 600, path
    comment = text.partition("\n#include")[0]
    found = re.findall(
        r"^// (Idea|New|Who owns what|Limit now|Measured|Read more)\b", comment, re.M
    )
    assert tuple(found) == HEADER
    assert f"docs/ladder/{name}.md" in comment


@pytest.mark.parametrize("name", NAMES)
def test_the_comment_s_measurement_is_the_record_s(name: str) -> None:
    """Roughly: the comment is part of the sources that the record was measured on."""
    needs_record(name)
    text = rung(name).source.read_text()
    said = re.search(
        r"^// Measured +([\d.]+) ms, ([\d.]+) TFLOP/s, error ([\d.e-]+) \(", text, re.M
    )
    assert said
    row = docs_facts.benchmark_row(name)
    assert float(said[1]) == pytest.approx(row["us"] / 1000, rel=0.05)
    assert float(said[2]) == pytest.approx(row["tflops"], rel=0.05)
    assert float(said[3]) == pytest.approx(row["error"], rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_pages_have_the_same_skeleton(name: str) -> None:
    text = (LADDER / f"{name}.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SKELETON] == list(SKELETON)
    assert rung(name).source.relative_to(ROOT).as_posix() in text
    assert f"](figures/{name}.svg)" in text.partition("## Who owns what")[2]
    changed = text.partition("## What changed")[2].partition("\n## ")[0]
    assert "<!-- quote: " in changed
    following = NAMES[NAMES.index(name) + 1 :][:1]
    for after in following:
        assert f"]({after}.md)" in text.partition("## What hurts now")[2]


def first_cells(text: str) -> list[str]:
    """The first cell of every row of the tables in a text, a link as its text."""
    cells = re.findall(r"^\| *([^|]*?) *\|", text, re.MULTILINE)
    return [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", cell) for cell in cells]


@pytest.mark.parametrize("page", [ROOT / "README.md", LADDER / "README.md"])
def test_tables_have_a_row_a_rung(page: Path) -> None:
    text = page.read_text()
    for name in NAMES:
        needs_record(name)
    measured, after = text.split("<!-- ladder:begin -->")[1].split("<!-- ladder:end -->")
    assert [cell for cell in first_cells(measured) if re.fullmatch(r"v\d+", cell)] == NAMES
    upper = [cell for cell in first_cells(after) if re.fullmatch(r"V\d+", cell)]
    assert [cell.lower() for cell in upper] == NAMES


def links() -> Iterator[tuple[Path, str]]:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(LADDER.glob("*.md"))):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("http://", "https://")):
                yield page, target


def test_links_lead_to_files() -> None:
    found = list(links())
    assert len(found) > 20
    broken = [
        f"{page.name}: {target}"
        for page, target in found
        if not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


# --- what is written by command -------------------------------------------------------------------


def test_nothing_written_is_stale() -> None:
    report = docs_update.update(write=False)
    assert report.changed == [], STALE


def test_no_value_is_left_open() -> None:
    """Where a record is missing, what needs it can't be filled."""
    report = docs_update.update(write=False)
    if report.missing:
        pytest.xfail("; ".join(report.missing))
    for page in docs_update.pages():
        text = page.read_text()
        assert "--><!--/-->" not in text, page.name
        assert "…<!--/-->" not in text, page.name
        assert not re.search(r"<!-- table: [^\n]* -->\n<!-- /table -->", text), page.name


def test_measured_numbers_in_prose_stand_between_markers() -> None:
    """A number of milliseconds or TFLOP/s outside of them would be one that nobody updates."""
    for name in NAMES:
        text = (LADDER / f"{name}.md").read_text()
        text = re.sub(r"<!--= .*?<!--/-->", "", text, flags=re.DOTALL)
        text = re.sub(
            r"<!-- (\w[\w-]*)(?::| ).*?<!-- (?:/\1|\1:end) -->", "", text, flags=re.DOTALL
        )
        text = re.sub(r"<!-- v4-steps:begin -->.*?<!-- v4-steps:end -->", "", text, flags=re.DOTALL)
        assert not re.search(r"\d (?:ms|µs|TFLOP/s)\b", text), name


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one source file, in place of the repository."""
    monkeypatch.setattr(docs_update, "ROOT", tmp_path)
    (tmp_path / "a.cu").write_text("int before;\n  int first;\n\n    int last;\nint after;\n")
    return tmp_path


PAGE = 'text\n<!-- quote: a.cu "int first" .. "int last" -->\n<!-- /quote -->\nmore\n'


def render(text: str) -> str:
    return str(docs_update.render_page(text, docs_update.Report(), "page"))


def test_a_quote_is_the_source_s_lines(tree: Path) -> None:
    text = render(PAGE)
    assert '```cpp title="a.cu"\nint first;\n\n  int last;\n```\n<!-- /quote -->\nmore\n' in text
    assert render(text) == text
    (tree / "a.cu").write_text("  int first = 1;\n  int last;\n")
    assert "int first = 1;\nint last;" in render(text)
    one_line = '<!-- quote: a.cu "int last" -->\n<!-- /quote -->'
    assert '```cpp title="a.cu"\nint last;\n```' in render(one_line)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int last;\n", '"int first" stands on 0 lines'),
        ("int first;\nint first;\nint last;\n", '"int first" stands on 2 lines'),
        ("int first;\n", '"int last" stands on 0 lines'),
        ("int last;\nint first;\n", 'stands before "int first"'),
        (None, "no such file"),
    ],
)
def test_a_quote_whose_anchor_is_gone_fails(tree: Path, source: str | None, message: str) -> None:
    (tree / "a.cu").unlink() if source is None else (tree / "a.cu").write_text(source)
    with pytest.raises(docs_update.StaleError, match=message):
        render(PAGE)


def test_values_and_tables_are_filled() -> None:
    assert render("a <!--= 2 * 21 -->7<!--/--> b") == "a <!--= 2 * 21 -->42<!--/--> b"
    text = render("<!-- table: shared v3 -->\n<!-- /table -->")
    assert "| total | 8,192 floats | 32,768 |" in text
    assert render(text) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\n<!--= 1 --><!--/-->", "begins a line"),
        ("<!-- table: nonsense -->\n<!-- /table -->", "no table 'nonsense'"),
    ],
)
def test_blocks_that_can_t_be_filled(text: str, message: str) -> None:
    with pytest.raises(docs_update.StaleError, match=message):
        render(text)


def test_what_lacks_a_record_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docs_facts, "RESULTS", ROOT / "benchmarks" / "nowhere")
    report = docs_update.Report()
    text = "about <!--= us('v3') -->5<!--/--> and <!--= us('v4') -->2<!--/-->"
    assert docs_update.render_page(text, report, "page") == text
    assert len(report.missing) == 1


def test_update_writes_and_check_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("old")
    monkeypatch.setattr(docs_update, "ROOT", tmp_path)
    monkeypatch.setattr(docs_update, "outputs", lambda report: {page: "new"})
    monkeypatch.setattr(sys, "argv", ["docs_update", "--check"])
    assert docs_update.main() == 1
    assert page.read_text() == "old"
    monkeypatch.setattr(sys, "argv", ["docs_update"])
    assert docs_update.main() == 0
    assert page.read_text() == "new"
    assert capsys.readouterr().out.splitlines() == ["page.md: out of date", "page.md: written"]


@pytest.mark.parametrize(("arguments", "status"), [(["--check"], 1), ([], 0)])
def test_a_check_fails_where_a_record_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
) -> None:
    def outputs(report: docs_update.Report) -> dict[Path, str]:
        report.lacks(MissingRecordError("no row of v9"))
        return {}

    monkeypatch.setattr(docs_update, "outputs", outputs)
    monkeypatch.setattr(sys, "argv", ["docs_update", *arguments])
    assert docs_update.main() == status
    assert capsys.readouterr().out.splitlines() == ["not filled: no row of v9"]


# --- what the pages are computed from -------------------------------------------------------------


def test_flop_is_the_benchmark_s() -> None:
    row = docs_facts.benchmark_row("v4")
    assert PRIMARY.flop == 4 * 4 * 12 * 2048**2 * 64
    assert docs_tables.tflops("v4") == pytest.approx(row["tflops"], rel=1e-3)


@pytest.mark.parametrize("name", [n for n in TILED if n in docs_facts.published()["profile"]])
def test_launch_figures_are_the_published_ones(name: str) -> None:
    """Occupancy from the tile sizes, against what ncu said of the same launch on an RTX 4080."""
    said = docs_facts.published()["profile"][name]
    item = rung(name)
    launch = (item.threads, item.shared_bytes, said["registers"])
    assert item.shared_bytes == pytest.approx(1000 * said["dynamic_shared_kb"], abs=5)
    assert RTX4080.blocks_per_sm(*launch) == said["blocks_per_sm"]
    assert 100 * RTX4080.occupancy(*launch) == pytest.approx(said["occupancy_limit"], abs=0.01)


@pytest.mark.parametrize("name", TILED)
def test_launch_figures_are_the_profiled_ones(name: str) -> None:
    try:
        row = docs_facts.profile_row(name)
    except MissingRecordError as reason:
        pytest.xfail(str(reason))
    item = rung(name)
    assert item.blocks(PRIMARY) == row["blocks"]
    assert item.threads == row["threads"]
    assert item.shared_bytes == row["shared_dynamic_bytes"]
    launch = (item.threads, item.shared_bytes, row["registers"])
    assert H200.blocks_per_sm(*launch) == row["blocks_per_sm"]
    assert 100 * H200.occupancy(*launch) == pytest.approx(row["occupancy_theoretical"], abs=0.1)


@pytest.mark.parametrize("dtype", dtypes("v6"))
def test_v6_s_launch_is_the_profiled_one(dtype: str) -> None:
    try:
        row = docs_facts.profile_row("v6", dtype)
    except MissingRecordError as reason:
        pytest.xfail(str(reason))
    head_dim = PRIMARY.head_dim
    is_split = dtype == "float32"
    shape = (V6_SPLIT if is_split else V6_HALF)[head_dim]
    tiles = shape.tiles(head_dim)
    assert row["blocks"] == PRIMARY.batch * PRIMARY.heads * -(-PRIMARY.length // tiles["Br"])
    assert row["threads"] == 32 * tiles["W"]
    shared = shape.split_bytes(head_dim) if is_split else shape.half_bytes(head_dim)
    assert row["shared_dynamic_bytes"] == shared


def test_tiles_come_from_the_sources() -> None:
    sizes = {name: (rung(name).block_q, rung(name).block_kv, rung(name).warps) for name in TILED}
    assert sizes["v1"] == (32, 32, 4)
    assert sizes["v4"] == (64, 32, 8)
    assert sizes["v5"] == (128, 64, 4)
    for name in TILED:
        said = re.search(
            r"static_assert\((?:sizeof\(SharedStorage\)|kShapes\[0\]\.shared_bytes\(64\)"
            r"|(shared_floats)\(64\)) == (\d+)\)",
            rung(name).source.read_text(),
        )
        assert said
        assert rung(name).shared_bytes == int(said[2]) * (4 if said[1] else 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2568, "0.257"), (5568.2, "5,568"), (58.854, "58.9"), (1536, "1,536"), (9.996, "10.0")],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert docs_tables.number(value) == text


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "ladder"])
def test_figures_are_drawn_from_the_sources(name: str) -> None:
    if name == "ladder":
        for each in NAMES:
            needs_record(each)
    drawn = docs_figures.figures()[name]()
    assert drawn == docs_figures.figures()[name]()
    assert (LADDER / "figures" / f"{name}.svg").read_text() == drawn, STALE
    root = ElementTree.fromstring(drawn)
    width = float(root.get("width", "0"))
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        # Some 6.2 pixels a character: text that would leave the picture.
        length = 6.2 * len(element.text or "")
        start = {"end": length, "middle": length / 2}.get(element.get("text-anchor", ""), 0)
        left = float(element.get("x", "0")) - start
        assert left >= 0, element.text
        assert left + length <= width, element.text
    if name in TILED:
        assert f"{rung(name).shared_bytes:,} bytes" in drawn
        assert f"{rung(name).blocks(PRIMARY):,} blocks" in drawn


# --- the site -------------------------------------------------------------------------------------


def test_every_page_is_in_the_site_s_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"\b{re.escape(page.name)}$", menu, re.MULTILINE), page.name


def test_the_site_loads_nothing_from_elsewhere() -> None:
    pytest.importorskip("mkdocs", reason="scripts/docs has its own environment")
    import docs_site

    for text in (
        '<script src="https://a.b/c.js">',
        '<link rel="stylesheet" href="//a.b/c.css">',
        '<img alt="" src="http://a.b/c.svg">',
        "@import 'https://a.b/c.css'",
        "url(https://a.b/c.woff2)",
    ):
        assert docs_site.LOADS.search(text), text
    for text in ('<a href="https://arxiv.org/">', '<script src="../c.js">', "url(c.woff2)"):
        assert not docs_site.LOADS.search(text), text
