from importlib.metadata import version as installed_version

project = "rsembed"
author = "The rsembed authors"
version = release = installed_version("rsembed")

extensions = ["myst_nb"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Notebooks are executed by the tests; the pages show them as they are stored.
nb_execution_mode = "off"

html_theme = "furo"
html_title = f"rsembed {release}"
