"""What mkdocs does beside its configuration: pages and files of the site that lie outside of docs/.

README.md is the site's first page, CHANGELOG.md and CONTRIBUTING.md are pages too, and every file of the repository
that a page links to (a result, a picture, a script) is part of the site. So links work alike in the repository and on
the site. The reference of the optimizers and of the command line is written from the package.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import textwrap
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[)#\s])")


def source_of(page: str) -> Path:
    """The file in the repository that a page of the site is made of."""
    return ROOT / PAGES[page] if page in PAGES else DOCS / page


def place_of(target: Path) -> str | None:
    """Where a file of the repository lies on the site; None for what is not a file of it."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    if not target.is_relative_to(ROOT) or not target.is_file():
        return None
    relative = target.relative_to(ROOT).as_posix()
    return next((page for page, source in PAGES.items() if source == relative), f"repository/{relative}")


def linked_files(text: str, source: Path) -> set[Path]:
    """Files of the repository outside of the site's pages that a page links to."""
    targets = {Path(os.path.normpath(source.parent / match[2])) for match in LINK.finditer(text)}
    return {target for target in targets if (place_of(target) or "").startswith("repository/")}


def moved_links(text: str, page: str) -> str:
    """The text with links that hold on the site."""
    source = source_of(page)

    def moved(match: re.Match[str]) -> str:
        place = place_of(Path(os.path.normpath(source.parent / match[2])))
        if place is None:
            return match[0]  # for mkdocs to complain about
        return match[1] + os.path.relpath(place, PurePosixPath(page).parent)

    return LINK.sub(moved, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/, and the files that pages link to."""
    for page, name in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    outside: set[Path] = set()
    for file in files.documentation_pages():
        source = source_of(file.src_uri)
        outside |= linked_files(source.read_text(), source)
    for target in sorted(outside):
        place = place_of(target)
        assert place is not None
        files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Move links; write the parts of the reference that are made from the package."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    text = moved_links(markdown, page.file.src_uri)
    if "<!-- optimizers -->" in text:
        text = text.replace("<!-- optimizers -->", optimizers())
    if "<!-- commands -->" in text:
        text = text.replace("<!-- commands -->", commands())
    return text


EVERYONE = ("max_grad_norm", "state_dtype", "master_weights")
"""Arguments of every optimizer that signatures show, beside torch's or the paper's own."""


def optimizers() -> str:
    """A section for every named optimizer: its signature, and its docstring with a block for each indented part."""
    import tilestep

    shared = set(inspect.signature(tilestep.Optimizer).parameters) - {"params", *EVERYONE}
    sections = []
    for name in tilestep.registry:
        made = getattr(tilestep, name)
        parameters = [p for p in inspect.signature(made).parameters.values() if p.name not in shared]
        parameters.sort(key=lambda p: EVERYONE.index(p.name) if p.name in EVERYONE else -1)
        given = [str(p.replace(annotation=p.empty)) for p in parameters]
        first = next((place for place, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
        if first is not None:
            given.insert(first, "*")
        lines = textwrap.fill(", ".join(given), 96, break_on_hyphens=False)
        signature = f"{name}(\n{textwrap.indent(lines, '    ')}\n)" if len(lines) > 90 else f"{name}({lines})"
        text = (made.__doc__ or "").partition("Args:")[0]
        text = re.sub(r"((?:^ {4}.*\n)+)", r"\n```text\n\1```\n", textwrap.dedent(text) + "\n", flags=re.MULTILINE)
        text = re.sub(r"(?<=`text\n)((?: {4}.*\n)+)", lambda match: textwrap.dedent(match[1]), text)
        sections.append(f"### {name}\n\n```python\n{signature}\n```\n\n{text.strip()}")
    return "\n\n".join(sections)


def commands() -> str:
    """What `--help` says of every command."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from tilestep.cli import build_app

    app = build_app()
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    sections = []
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        text = runner.invoke(app, [name, "--help"], prog_name="tilestep").output
        lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        sections.append(f"## tilestep {name}\n\n```text\n{lines}\n```")
    return "\n\n".join(sections)


class Addresses(HTMLParser):
    """What a page links to, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def on_post_build(config: Any) -> None:
    """Look every link of every built page up, with its anchor; what is broken is a warning, and so fails the build."""
    site = Path(config.site_dir)
    pages = {path: Addresses(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of a server's root
        for address in page.targets:
            target, _, anchor = unquote(address).partition("#")
            if "://" in target or target.startswith(("mailto:", "data:", "javascript:")):
                continue
            file = Path(os.path.normpath(path.parent / target.partition("?")[0])) if target else path
            if not file.exists():
                log.warning("%s: the link %s leads nowhere", path.relative_to(site), address)
            elif anchor and file in pages and anchor not in pages[file].anchors | {"__top"}:
                log.warning("%s: the link %s has no such anchor", path.relative_to(site), address)
