"""Give the site the layout of the repository, so that one link leads to the same thing in both.

Pages outside docs/ join those in it, and so does every file that a page links to. A folder becomes a list of its files.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = tuple(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
LINK = re.compile(r'(?:(?<=\]\()|(?<=<img src="))[^)"#:\s]+')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the files of docs/, the other pages, what any page links to, and the scripts at their place."""
    inside = [file for file in files if file.src_dir == config.docs_dir]
    for file in inside:
        files.remove(file)
    paths = {*OUTSIDE, *(Path(config.docs_dir, file.src_uri) for file in inside), *scripts_of(config)}
    linked = {path for page in paths if page.suffix == ".md" for path in linked_from(page)}
    folders = {path for path in linked if path.is_dir()}
    paths |= linked - folders | {path for folder in folders for path in folder.iterdir() if path.is_file()}
    for path in sorted(paths):
        aside = path not in OUTSIDE and not path.is_relative_to(config.docs_dir)
        level = InclusionLevel.NOT_IN_NAV if aside else InclusionLevel.UNDEFINED
        files.append(File.generated(config, uri(path), abs_src_path=str(path), inclusion=level))
    for folder in sorted(folders):
        files.append(listing(folder, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to folders to their lists."""
    here = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda link: f"{link[0]}/README.md" if (here / link[0]).is_dir() else link[0], markdown)


def on_page_content(html: str, **_: object) -> str:
    """Let diagrams scroll in a box, as the theme lets tables."""
    return re.sub(
        r'(?s)<pre class="mermaid">.*?</pre>', r'<div class="md-typeset__scrollwrap">\g<0></div>', html
    )


def scripts_of(config: MkDocsConfig) -> list[Path]:
    """Return the site's own scripts and styles; `make site` takes the scripts from npm."""
    names = (*config.extra_javascript, *config.extra.get("polyfills", ()), *config.extra_css)
    paths = [ROOT / str(name) for name in names]
    for path in paths:
        if not path.is_file():
            raise PluginError(f"{uri(path)} is missing: build the site by make site")
    return paths


def linked_from(page: Path) -> list[Path]:
    """Return the files and folders of the repository that a page links to."""
    paths = [(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return [path for path in paths if path.exists() and path.is_relative_to(ROOT)]


def listing(folder: Path, config: MkDocsConfig) -> File:
    """Return a page with links to the files of a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    text = "\n".join([f"# {uri(folder)}", "", *(f"- [{name}]({name})" for name in names)])
    place = f"{uri(folder)}/README.md"
    return File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def uri(path: Path) -> str:
    """Return a path in the repository, as links have it."""
    return path.relative_to(ROOT).as_posix()
