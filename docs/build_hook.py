"""Give the site the tree of the repository, so that a relative link leads to the same page in both.

mkdocs looks for pages in `docs_dir` only. Here README.md becomes the first page of the site, and the notebooks and
their records stand beside docs/, without a copy of any file.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "notebooks/*.md", "notebooks/*.ipynb")
# Files that pages link to: the style sheet, figures, tables, records and results.
OTHERS = ("docs/*.css", "docs/**/*.svg", "docs/*.csv", "notebooks/*.csv", "notebooks/re*/**/*.*")


@event_priority(100)  # before the plugin that looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files and those of the repository that the site shows."""
    of_the_theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(config.docs_dir)]
    paths = [path.relative_to(ROOT) for pattern in (*PAGES, *OTHERS) for path in sorted(ROOT.glob(pattern))]
    ours = [File(path.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    return Files(of_the_theme + ours)
