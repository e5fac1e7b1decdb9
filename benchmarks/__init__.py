"""Every figure that the README quotes, measured with its reference in the same run."""
