"""MkDocs hooks: pages from outside of ``docs/``, the rungs' places in the menu, no other host."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

from docs_facts import ROOT, registry

# Pages that lie beside docs/, and what the links to them become. What has no page is plain text.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
# What a page loads by itself; an <a> is only followed.
LOADS = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']+"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)


def on_config(config: Any) -> Any:
    """Puts one page a rung below the ladder's."""
    for entry in config["nav"]:
        if entry.get("The ladder") == "ladder/README.md":
            rungs = [{name.upper(): f"ladder/{name}.md"} for name in registry()]
            entry["The ladder"] = [{"All rungs": "ladder/README.md"}, *rungs]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that lie outside of ``docs/``."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links that hold in the repository into links that hold in the site."""
    place = Path(page.file.src_uri)
    if place.name in OUTSIDE.values() and len(place.parts) == 1:
        markdown = markdown.replace("](docs/", "](")
    back = "../" * (len(place.parts) - 1)
    for source, target in OUTSIDE.items():
        for prefix in ("", f"{back}../"):
            if prefix or place.name in OUTSIDE.values():
                markdown = re.sub(
                    rf"\]\({re.escape(prefix + source)}(#[^)]*)?\)",
                    rf"]({back}{target}\1)",
                    markdown,
                )
    markdown = re.sub(
        r"\[([^\]]+)\]\((?:\.\./)*(?:LICENSE|(?:src|benchmarks)/[^)]*)\)", r"\1", markdown
    )
    # Markers of generated parts, which are for the repository's reader only.
    return re.sub(r"<!--[=/ ].*?-->", "", markdown, flags=re.DOTALL)


def on_post_build(*, config: Any) -> None:
    """Fails the build if a page or style would load something from another host."""
    site = Path(config["site_dir"])
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css", ".svg"}
        for match in LOADS.finditer(path.read_text())
    ]
    if found:
        raise PluginError("loaded from another host when viewed:\n" + "\n".join(found))
