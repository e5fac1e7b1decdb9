"""Training in this process: `et.fit`, `et.step`, `model.fit`."""

__all__ = ["fitting", "tape_step"]
