"""What shall be run: stages, their identity, and the runner that brings an experiment's folder up to date."""
