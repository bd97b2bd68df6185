"""What a voyage means, for people who were not aboard: pages made from the logbook alone.

`site.build_site(root)` writes one folder of self-contained HTML files. Each kind of page is one file of `pages/` with
`collect(root, ...) -> dict` (JSON, read from the logbook) and `render(data) -> str` (that dict as one HTML file).
Invariant: a page asks nothing of any network, and every figure on it can be found again in the files it names.
"""
