"""Sphinx' settings for the site that `build.py` makes of the pages."""

project = "Elastable"
author = "the Elastable developers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = "Elastable"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}

nb_execution_mode = "off"  # tests/pages runs the notebooks
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # some pages begin below their second heading's level

smartquotes = False  # text stays as the page has it, and a tenth of the build is saved
default_role = "code"  # single backticks of a docstring are code, as in Markdown
autodoc_typehints = "description"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Call arguments", "params_style")]
