"""One file per kind of page, each with `collect(root, ...) -> dict` and `render(data) -> str`."""
