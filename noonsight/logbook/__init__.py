"""What happened, as files: records, and the only ways to write and read them."""
