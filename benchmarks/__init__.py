"""Side by side with peers: ratios, measured in one run each."""
