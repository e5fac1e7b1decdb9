"""Training in this process: `et.fit`, `et.step`, `model.fit`."""
