"""What is sent: frames, specs, commits and rows as bytes."""
