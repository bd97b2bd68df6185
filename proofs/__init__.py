"""What `make prove-NAME` runs. Each module measures everything its issue wants and writes `NAME.json` beside it, with commit and machine."""
